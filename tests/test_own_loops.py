"""Loops of a program's own, of models that are never compiled, under a policy with a loss scale."""

import warnings

import pytest
import tensorflow as tf

import keras_mp
from tests.common import FAMILIES, IS_KERAS_3, MODES, compiled_model, make_optimizer, ours, placed

L = tf.keras.layers
POLICIES = ["float32", "mixed_float16", "mixed_bfloat16"]
X = tf.random.stateless_normal([8, 4], [1, 2])
# With a loss of this size the gradients of float16 layers are zero, unless it is scaled.
TINY = 1e-7


def loop(apply, mode="function", scaled=lambda loss: loss, tape_of=tf.GradientTape):
    model = tf.keras.Sequential([tf.keras.Input((4,)), L.Dense(4, name="narrow")])

    def step():
        with tape_of() as tape:
            loss = scaled(tf.reduce_mean(model(X) ** 2) * TINY)
        gradients = tape.gradient(loss, model.trainable_variables)
        apply(zip(gradients, model.trainable_variables))

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
        loop(make_optimizer(name, 1e7, momentum=0.0).apply_gradients, mode)
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
@pytest.mark.parametrize("who", ["what the message says", "a tape", "a scaler"])
def test_who_scales_gets_no_message(who, mode):
    keras_mp.set_global_policy("mixed_float16")
    sgd, scale = tf.keras.optimizers.SGD(1e7), keras_mp.DynamicLossScale()
    if who == "what the message says":
        optimizer = keras_mp.LossScaleOptimizer(sgd)
        moved = loop(optimizer.apply_gradients, mode, optimizer.scale_loss)
    elif who == "a tape":
        tape_of = lambda: keras_mp.LossScaleGradientTape(scale)  # noqa: E731
        moved = loop(sgd.apply_gradients, mode, tape_of=tape_of)
    else:
        scaler = keras_mp.GradScaler()
        moved = loop(lambda pairs: (scaler.step(sgd, pairs), scaler.update()), mode, scaler.scale)
    assert moved > 0.1


def test_a_policy_without_a_loss_scale_needs_no_message():
    keras_mp.set_global_policy(keras_mp.Policy("mixed_float16", loss_scale=None))
    loop(tf.keras.optimizers.SGD(1e7).apply_gradients)


def test_a_model_that_was_compiled_before_does_not_hide_the_loop():
    keras_mp.set_global_policy("mixed_float16")
    compiled_model(L.Dense(4), inputs=4).fit(X, X, verbose=0)
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="nobody has scaled"):
        loop(tf.keras.optimizers.SGD(1e7).apply_gradients)


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 does not have the argument.")
def test_a_model_that_does_not_scale_on_purpose_needs_no_message():
    keras_mp.set_global_policy(keras_mp.Policy("mixed_float16"))
    compiled_model(L.Dense(4), inputs=4, auto_scale_loss=False).fit(X, X, verbose=0)
