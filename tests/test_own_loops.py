"""Loops of a program's own, of models that are never compiled, under a policy with a loss scale."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import FAMILIES, IS_KERAS_3, MODES, make_optimizer, ours, placed

L = tf.keras.layers
POLICIES = ["float32", "mixed_float16", "mixed_bfloat16"]
X = tf.random.stateless_normal([8, 4], [1, 2])
# With a loss of this size the gradients of float16 layers are zero, unless it is scaled.
TINY = 1e-7


class Loops(tf.keras.Model):
    """Has a `fit` of its own, and an optimizer that Keras does not know."""

    def __init__(self, mode="eager"):
        super().__init__()
        self.dense = L.Dense(4)
        self.my_optimizer = tf.keras.optimizers.SGD(1e7)
        self.my_step = placed(mode, self.train)

    def call(self, x):
        return self.dense(x)

    def train(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x) ** 2) * TINY
        gradients = tape.gradient(loss, self.trainable_variables)
        self.my_optimizer.apply_gradients(zip(gradients, self.trainable_variables))

    def fit(self, data):
        for x in data:
            self.my_step(x)


class InBatches(Loops):
    """Has a `train_on_batch` of its own."""

    def train_on_batch(self, x):
        self.my_step(x)

    def fit(self, data):
        for x in data:
            self.train_on_batch(x)


def moves(cls, mode, is_built):
    tf.keras.utils.set_random_seed(0)
    model = cls(mode)
    initial = tf.keras.initializers.GlorotUniform(0)([4, 4])
    if is_built:
        model(X)
        model.dense.kernel.assign(initial)
    else:
        model.dense.kernel_initializer = tf.keras.initializers.Constant(initial.numpy())
        model.fit([X])
    model.fit([X] * 3)
    return model.dense.kernel.numpy() - initial.numpy()


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", [Loops, InBatches])
def test_a_loop_of_a_model_that_was_never_compiled_scales(cls, mode, policy):
    moved = {}
    for name in ("float32", policy):
        keras_mp.set_global_policy(name)
        moved[name] = moves(cls, mode, is_built=True)
    assert abs(moved["float32"]).max() > 0.1
    np.testing.assert_allclose(moved[policy], moved["float32"], atol=0.02)


def test_a_model_that_is_built_in_its_loop_scales():
    keras_mp.set_global_policy("mixed_float16")
    assert abs(moves(Loops, "eager", is_built=False)).max() > 0.1


def loop(optimizer, mode, scaled=lambda loss: loss, tape_of=tf.GradientTape):
    model = tf.keras.Sequential([tf.keras.Input((4,)), L.Dense(4, name="narrow")])

    def step():
        with tape_of() as tape:
            loss = scaled(tf.reduce_mean(model(X) ** 2) * TINY)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    before, step = model.get_weights()[0], placed(mode, step)
    for _ in range(2):
        step()
    return abs(model.get_weights()[0] - before).max()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_optimizer_that_nobody_wrapped_is_named_once(name, mode, policy):
    keras_mp.set_global_policy(policy)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loop(make_optimizer(name, 1e7, momentum=0.0), mode)
    found = [str(each.message) for each in ours(told)]
    if policy != "mixed_float16":
        assert not found
        return
    (message,) = found
    assert "The optimizer (SGD) applies gradients of float16 layers, such as 'narrow'" in message
    assert "    optimizer = keras_mp.LossScaleOptimizer(optimizer)\n" in message
    assert "    scaled_loss = optimizer.scale_loss(loss)\n" in message
    assert [each.filename for each in ours(told)] == [__file__]


@pytest.mark.parametrize("mode", MODES)
def test_what_the_message_says_helps(mode):
    keras_mp.set_global_policy("mixed_float16")
    optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD(1e7))
    assert loop(optimizer, mode, optimizer.scale_loss) > 0.1


@pytest.mark.parametrize("mode", MODES)
def test_a_tape_or_a_scaler_that_scales_needs_no_message(mode):
    keras_mp.set_global_policy("mixed_float16")
    tape_of = lambda: keras_mp.LossScaleGradientTape(scale)  # noqa: E731
    scale = keras_mp.DynamicLossScale()
    assert loop(tf.keras.optimizers.SGD(1e7), mode, tape_of=tape_of) > 0.1
    scaler = keras_mp.GradScaler()
    optimizer = tf.keras.optimizers.SGD(1e7)
    model = tf.keras.Sequential([tf.keras.Input((4,)), L.Dense(4)])

    def step():
        with tf.GradientTape() as tape:
            loss = scaler.scale(tf.reduce_mean(model(X) ** 2) * TINY)
        gradients = tape.gradient(loss, model.trainable_variables)
        scaler.step(optimizer, zip(gradients, model.trainable_variables))
        scaler.update()

    placed(mode, step)()


def test_a_policy_without_a_loss_scale_needs_no_message():
    keras_mp.set_global_policy(keras_mp.Policy("mixed_float16", loss_scale=None))
    loop(tf.keras.optimizers.SGD(1e7), "function")


def test_a_model_that_was_compiled_before_does_not_hide_the_loop():
    keras_mp.set_global_policy("mixed_float16")
    model = tf.keras.Sequential([tf.keras.Input((4,)), L.Dense(4)])
    model.compile("sgd", "mse")
    model.fit(X, X, verbose=0)
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="nobody has scaled"):
        loop(tf.keras.optimizers.SGD(1e7), "function")


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 does not have the argument.")
def test_a_model_that_does_not_scale_on_purpose_needs_no_message():
    keras_mp.set_global_policy(keras_mp.Policy("mixed_float16"))
    model = tf.keras.Sequential([tf.keras.Input((4,)), L.Dense(4)])
    model.compile("sgd", "mse", auto_scale_loss=False)
    model.fit(X, X, verbose=0)
