"""Layers in float8: what they keep of their tensors is no gradient, and not scaled.

Keras computes in float8 in a graph only: in eager its gradient function fails.
"""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, mirrored

pytestmark = pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no float8.")


class OwnTrainStep(tf.keras.Model):
    """A model whose `train_step` calls the optimizer, without loss scaling."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, [v.value for v in self.trainable_variables])
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def sgd(loop="fit"):
    accumulated = 2 if loop == "accumulating fit" else None
    return tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulated)


def weights(make_optimizer, loop, replicas):
    """The values of each weight on all replicas, by path, after four steps."""
    tf.keras.utils.set_random_seed(1)
    strategy = mirrored(2) if replicas == 2 else tf.distribute.get_strategy()
    with strategy.scope():
        dense = tf.keras.layers.Dense(4, name="float8")
        layers = [tf.keras.Input([8]), dense, tf.keras.layers.Dense(1, name="out")]
        model = tf.keras.Sequential(layers, name="model")
        dense.quantize("float8")
        if loop == "train_step":
            model = OwnTrainStep(model.inputs, model.outputs, name="model")
        model.compile(make_optimizer(), "mse", jit_compile=loop == "compiled fit")
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    y = x.sum(1, keepdims=True) / 8
    model.fit(x, y, batch_size=4 * replicas, shuffle=False, verbose=0, epochs=replicas)
    results = strategy.experimental_local_results
    return {weight.path: [np.float32(r) for r in results(weight.value)] for weight in model.weights}


@pytest.mark.parametrize(
    ("loop", "scales_loss", "replicas"),
    [
        *(("fit", True, 1), ("fit", False, 1), ("accumulating fit", True, 1)),
        *(("train_step", False, 1), ("compiled fit", True, 1)),
        *(("fit", True, 2), ("train_step", False, 2)),
    ],
)
def test_it_trains_as_with_the_optimizers_of_keras(loop, scales_loss, replicas):
    def control():
        keras_own = tf.keras.optimizers.LossScaleOptimizer
        return keras_own(sgd(loop), 128) if scales_loss else sgd(loop)

    def ours():
        # `fit` scales the loss by itself.
        scale = 128 if scales_loss else 1 if "fit" in loop else 1024
        return keras_mp.LossScaleOptimizer(sgd(loop), scale)

    expected = weights(control, loop, replicas)
    with warnings.catch_warnings():
        if not scales_loss:
            warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
        actual = weights(ours, loop, replicas)
    assert sum("amax_history" in path for path in actual) == 3
    [history] = [values for path, values in actual.items() if "inputs_amax_history" in path]
    assert len({values.tobytes() for values in history}) == replicas
    # XLA of TensorFlow 2.16 adds up in another order if a scale is multiplied.
    rtol = 2**-20 if loop == "compiled fit" else 0
    for path, values in expected.items():
        np.testing.assert_allclose(actual[path], values, rtol, err_msg=path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nobody_is_told_to_set_the_policy_that_was_set(dtype):
    with (
        keras_mp.policy_scope(f"float8_from_mixed_{dtype}"),
        warnings.catch_warnings(record=True) as w,
    ):
        warnings.simplefilter("always")
        model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(1)])
        model.compile(keras_mp.LossScaleOptimizer(sgd()), "mse")
    assert [str(each.message) for each in w] == []
