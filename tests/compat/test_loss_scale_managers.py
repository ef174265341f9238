"""Loss scale managers of TensorFlow 1: their schedules, in eager, in functions and in graphs."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_mp
from tests.common import batches, once

pytestmark = once
v1 = keras_mp.compat.v1


class Model:
    """What the text of the schedule says, in plain Python."""

    def __init__(
        self,
        init_loss_scale,
        incr_every_n_steps,
        decr_every_n_nan_or_inf,
        incr_ratio,
        decr_ratio,
    ):
        self.scale, self.good, self.bad = np.float32(init_loss_scale), 0, 0
        self.incr_every, self.decr_every = incr_every_n_steps, decr_every_n_nan_or_inf
        self.incr_ratio, self.decr_ratio = np.float32(incr_ratio), np.float32(decr_ratio)

    def update(self, is_finite):
        if is_finite:
            self.good += 1
            if self.good >= self.incr_every:
                with np.errstate(over="ignore"):
                    grown = self.scale * self.incr_ratio
                self.scale = grown if np.isfinite(grown) else self.scale
                self.good = self.bad = 0
        else:
            self.good = 0
            self.bad += 1
            if self.bad >= self.decr_every:
                self.scale = max(np.float32(1), self.scale * self.decr_ratio)
                self.good = self.bad = 0


schedules = st.fixed_dictionaries(
    {
        "init_loss_scale": st.sampled_from([1, 3.5, 1000, 2.0**15, 2.0**126]),
        "incr_every_n_steps": st.integers(1, 4),
        "decr_every_n_nan_or_inf": st.integers(1, 4),
        "incr_ratio": st.sampled_from([2, 1.5, 1e30]),
        "decr_ratio": st.sampled_from([0.8, 0.5, 1e-30]),
    }
)


@settings(max_examples=150, deadline=None)
@given(schedules, st.lists(st.booleans(), max_size=25))
def test_the_schedule_is_the_one_of_its_text(schedule, steps):
    manager = v1.ExponentialUpdateLossScaleManager(**schedule)
    model = Model(**schedule)
    for is_finite in steps:
        manager.update_loss_scale(tf.constant(is_finite))
        model.update(is_finite)
        assert manager.get_loss_scale().numpy() == model.scale
        assert (int(manager.good_steps), int(manager.bad_steps)) == (model.good, model.bad)


def test_defaults_are_those_of_tensorflow_1():
    manager = v1.ExponentialUpdateLossScaleManager(init_loss_scale=100, incr_every_n_steps=1)
    for is_finite, scale in ((True, 200), (False, 200), (False, 160)):
        manager.update_loss_scale(is_finite)
        assert float(manager.get_loss_scale()) == scale


def test_a_manager_in_a_graph_and_in_a_function():
    with tf.Graph().as_default():
        manager = v1.ExponentialUpdateLossScaleManager(8, 2, 1, decr_ratio=0.5)
        finite = tf.compat.v1.placeholder(tf.bool, [])
        update = manager.update_loss_scale(finite)
        assert isinstance(update, tf.Operation)
        names = [v.op.name for v in tf.compat.v1.global_variables()]
        assert names == ["loss_scale", "good_steps", "bad_steps"]
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for is_finite in (True, True, False, False):
                session.run(update, {finite: is_finite})
            assert session.run(manager.get_loss_scale()) == 4
    manager = v1.ExponentialUpdateLossScaleManager(8, 2, 1, decr_ratio=0.5)
    update = tf.function(manager.update_loss_scale)
    for is_finite in (True, True, False, False):
        update(tf.constant(is_finite))
    assert float(manager.get_loss_scale()) == 4


def test_a_fixed_manager():
    manager = v1.FixedLossScaleManager(5000)
    assert isinstance(manager, v1.LossScaleManager)
    manager.update_loss_scale(tf.constant(False))
    assert float(manager.get_loss_scale()) == 5000


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: v1.FixedLossScaleManager(0), "at least 1.17"),
        (lambda: v1.FixedLossScaleManager("8"), "must be an int or a float"),
        (lambda: v1.ExponentialUpdateLossScaleManager(float("nan"), 1), "must be finite"),
        (lambda: v1.ExponentialUpdateLossScaleManager(8, 0), "incr_every_n_steps=0"),
        (lambda: v1.ExponentialUpdateLossScaleManager(8, 1.5), "must be an int"),
        (lambda: v1.ExponentialUpdateLossScaleManager(8, 1, 0), "decr_every_n_nan_or_inf=0"),
        (lambda: v1.ExponentialUpdateLossScaleManager(8, 1, incr_ratio=1), "above 1"),
        (lambda: v1.ExponentialUpdateLossScaleManager(8, 1, decr_ratio=1), "below 1"),
        (v1.LossScaleManager, "abstract"),
    ],
)
def test_arguments_are_checked(make, error):
    with pytest.raises((TypeError, ValueError), match=error):
        make()


def test_a_manager_is_saved_with_its_variables(tmp_path):
    manager = v1.ExponentialUpdateLossScaleManager(8, 2)
    manager.update_loss_scale(True)
    path = tf.train.Checkpoint(manager=manager).save(tmp_path / "checkpoint")
    other = v1.ExponentialUpdateLossScaleManager(1, 2)
    tf.train.Checkpoint(manager=other).restore(path).assert_consumed()
    assert (float(other.get_loss_scale()), int(other.good_steps)) == (8, 1)


@pytest.mark.parametrize("how", [{"run_eagerly": True}, {"jit_compile": False}])
def test_a_batch_without_examples_is_not_counted(how):
    keras_mp.set_global_policy("mixed_float16")
    model = tf.keras.Sequential(
        [tf.keras.Input([2]), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)]
    )
    manager = v1.ExponentialUpdateLossScaleManager(
        2.0**10, 100, decr_every_n_nan_or_inf=2, decr_ratio=0.5
    )
    loss_scale = v1.ManagedLossScale(manager)
    model.compile(keras_mp.LossScaleOptimizer("sgd", loss_scale), "mse", **how)
    x = np.ones([2, 2], "float32")
    inputs = [x, x[:0], x * np.inf, x[:0], x * np.inf]
    model.fit(batches(*((each, each[:, :1]) for each in inputs)), verbose=0, shuffle=False)
    assert int(model.optimizer.steps_skipped) == 4
    assert float(loss_scale()) == 2.0**9
