"""Optimizers that Keras does not find by their name in a file, and wrappers among wrappers."""

import copy

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, assert_all_equal, value
from tests.models import FAMILIES, chain, compiled_model, make_optimizer, training_state
from tests.saving.common import COPIES, set_policy


class Adam(tf.keras.optimizers.SGD):
    """An optimizer of a program, with the name of one of Keras's, which is not registered."""


@tf.keras.utils.register_keras_serializable(package="tests")
class Registered(tf.keras.optimizers.SGD):
    pass


@tf.keras.utils.register_keras_serializable(package="tests")
class RMSprop(tf.keras.optimizers.SGD):
    pass


NOT_IN_TABLE = ["Lamb"] if IS_KERAS_3 else ["Lion", "Adafactor"]
CLASSES = [getattr(tf.keras.optimizers, name) for name in NOT_IN_TABLE] + [Registered, RMSprop]

# What makes an optimizer, which `compile` wraps if nothing here scales the loss.
OPTIMIZERS = {cls.__name__: lambda cls=cls: cls(0.01) for cls in CLASSES}
for family in FAMILIES:
    OPTIMIZERS |= {
        f"outside of it, {family}": lambda family=family: keras_mp.OptimizerWrapper(
            keras_mp.LossScaleOptimizer(make_optimizer(family))
        ),
        f"inside of it, {family}": lambda family=family: keras_mp.LossScaleOptimizer(
            keras_mp.OptimizerWrapper(make_optimizer(family))
        ),
    }


def trained(optimizer):
    set_policy("mixed_float16", 64.0, 2)
    model = compiled_model(inputs=4, optimizer=optimizer, run_eagerly=True)
    step(model)
    return model


def step(model):
    model.train_on_batch(np.full([2, 4], 0.5), np.ones([2, 1]))


def assert_trains_on(again, model):
    classes = [[type(each) for each in chain(one.optimizer)] for one in (again, model)]
    assert classes[0] == classes[1]
    assert keras_mp.LossScaleOptimizer in classes[0]
    again.run_eagerly = True  # .h5 files do not say so.
    for one in (again, model):
        step(one)
    assert_all_equal(training_state(again), training_state(model))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_model_with_such_an_optimizer_trains_on(optimizer, way, tmp_path):
    model = trained(OPTIMIZERS[optimizer]())
    assert_trains_on(COPIES[way](model, tmp_path), model)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_such_an_optimizer_is_made_of_its_config(cls):
    inner = cls(tf.keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5))
    optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.serialize(inner))
    config = tf.keras.optimizers.serialize(inner)
    for wrapper in (
        optimizer,
        keras_mp.LossScaleOptimizer.from_config(optimizer.get_config()),
        tf.keras.optimizers.deserialize(tf.keras.optimizers.serialize(optimizer)),
        keras_mp.OptimizerWrapper.from_config({"inner_optimizer": config}),
    ):
        assert type(wrapper.inner_optimizer) is cls
        assert float(wrapper.learning_rate) == 0.5


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
@pytest.mark.parametrize("in_scope", [True, False])
def test_an_optimizer_with_a_name_of_keras_is_the_one_that_the_program_names(
    suffix, in_scope, tmp_path
):
    model = trained(Adam(0.01, momentum=0.9))
    path = str(tmp_path / f"model{suffix}")
    model.save(path)
    if in_scope:
        with tf.keras.utils.custom_object_scope({"Adam": Adam}):
            again = tf.keras.models.load_model(path)
    else:
        again = tf.keras.models.load_model(path, custom_objects={"Adam": Adam})
    assert_trains_on(again, model)


@pytest.mark.skipif(IS_KERAS_3, reason="Only legacy optimizers are copied with their state.")
def test_a_copy_of_a_wrapper_has_the_state_of_its_optimizer():
    model = trained(tf.keras.optimizers.legacy.Adam(0.1))
    step(model)
    weights = model.get_weights()
    copied = copy.deepcopy(model.optimizer)
    gradients = [(tf.ones_like(weight), weight) for weight in model.trainable_weights]
    results = []
    for optimizer in (copied, model.optimizer):
        model.set_weights(weights)
        optimizer.apply_gradients(gradients, scaled=True)
        results.append([*model.get_weights(), *map(value, optimizer.variables)])
    assert_all_equal(*results)
    assert int(value(copied.iterations)) == 3


# Functions in a SavedModel that make steps, with everything that scales a loss.


class Trainer(tf.Module):
    """Makes steps by one of `steps.KINDS`."""

    def __init__(self, kind, family, wrap):
        super().__init__()
        self.v = tf.Variable([1.0, 2.0])
        step = steps.with_scale(
            *(kind, "dynamic", self.loss, [self.v]),
            make=lambda rate: wrap(make_optimizer(family, rate)),
        )
        self.make_step, self.scales = step, step.scales
        if kind == "scaler":  # which does not know the optimizer
            self.optimizer = step.optimizer

    def loss(self, factor):
        return tf.reduce_sum(self.v) * factor

    @tf.function(input_signature=[tf.TensorSpec([])])
    def step(self, factor):
        self.make_step(factor)
        return self.v.read_value()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["minimize", "rfc", "scaler", "tensorflow 1", "keras_3"])
def test_a_module_with_a_train_step_is_saved(kind, family, tmp_path):
    wrap = keras_mp.OptimizerWrapper if kind == "rfc" else lambda optimizer: optimizer
    trainer = Trainer(kind, family, wrap)
    trainer.step(tf.constant(1.0))
    tf.saved_model.save(trainer, str(tmp_path / "trainer"))
    loaded = tf.saved_model.load(str(tmp_path / "trainer"))
    for factor in (2.0, np.nan, 0.5):
        expected = trainer.step(tf.constant(factor))
        np.testing.assert_array_equal(loaded.step(tf.constant(factor)), expected)
    assert np.isfinite(expected).all()
    assert int(trainer.scales.steps_skipped) == 1
    if kind in steps.WAYS:
        assert ("legacy" in type(loaded.scales).__module__) == family.startswith("legacy")
    # What only functions use is no part of a checkpoint.
    checkpoint = tf.train.Checkpoint(optimizer=trainer.scales).save(str(tmp_path / "checkpoint"))
    keys = " ".join(key for key, _ in tf.train.list_variables(checkpoint))
    assert "loss_scale" in keys
    assert not any(word in keys for word in ("made", "report", "losses"))
