"""Loss scale managers of TensorFlow 1: their schedules, in eager, in functions and in graphs."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import batches, compiled_model, once

pytestmark = once
v1 = keras_mp.compat.v1


SLOW = {"incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 2, "decr_ratio": 0.5}
FAST = {"incr_every_n_steps": 1, "decr_every_n_nan_or_inf": 1}


@pytest.mark.parametrize(
    ("first", "arguments", "verdicts", "scales", "good", "bad"),
    [
        # What is not given is as in TensorFlow 1.
        (100, {"incr_every_n_steps": 1}, "+--", [200, 200, 160], "000", "010"),
        (8, SLOW, "+++++++", [8, 8, 16, 16, 16, 32, 32], "1201201", "0000000"),
        # Good steps are counted in a row, and bad ones are not.
        (8, SLOW, "-++-+-++-", [8, 8, 8, 4, 4, 4, 4, 4, 2], "012010120", "111001110"),
        (8, SLOW, "-+++-", [8, 8, 8, 16, 16], "01200", "11101"),
        (3.5, {**FAST, "incr_ratio": 1.5}, "++", [5.25, 7.875], "00", "00"),
        (1000, {**FAST, "decr_ratio": 1e-30}, "-+-", [1, 2, 1], "000", "000"),
        (1.5, {**FAST, "decr_ratio": 0.8}, "---", [np.float32(1.2), 1, 1], "000", "000"),
        (0.5, FAST, "--+", [0.5, 0.5, 1], "000", "000"),  # below 1 from the start
        (2.0**126, FAST, "++-", [2.0**127, 2.0**127, np.float32(0.8) * 2.0**127], "000", "000"),
        (8, {**FAST, "incr_ratio": 1e30}, "++", [np.float32(8e30)] * 2, "00", "00"),
    ],
)
def test_the_schedule(first, arguments, verdicts, scales, good, bad):
    manager = v1.ExponentialUpdateLossScaleManager(first, **arguments)
    found = []
    for verdict in verdicts:
        manager.update_loss_scale(tf.constant(verdict == "+"))
        numbers = manager.get_loss_scale(), manager.good_steps, manager.bad_steps
        found.append(tuple(number.numpy() for number in numbers))
    assert found == [*zip(scales, map(int, good), map(int, bad))]


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
    manager = v1.ExponentialUpdateLossScaleManager(
        2.0**10, 100, decr_every_n_nan_or_inf=2, decr_ratio=0.5
    )
    loss_scale = v1.ManagedLossScale(manager)
    layers = tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)
    optimizer = keras_mp.LossScaleOptimizer("sgd", loss_scale)
    model = compiled_model(*layers, optimizer=optimizer, **how)
    x = np.ones([2, 2], "float32")
    inputs = [x, x[:0], x * np.inf, x[:0], x * np.inf]
    model.fit(batches(*((each, each[:, :1]) for each in inputs)), verbose=0, shuffle=False)
    assert int(model.optimizer.steps_skipped) == 4
    assert float(loss_scale()) == 2.0**9
