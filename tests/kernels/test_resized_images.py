"""Bilinear images in 16 bits are resized by Keras 3 without a clip that changes nothing."""

import numpy as np
import pytest
import tensorflow as tf

from keras_mp.kernels import slow
from tests.common import IS_KERAS_3, unscaled

pytestmark = pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 does not clip.")


@pytest.fixture(autouse=True)
def enabled():
    yield
    slow.enable_float32_where_faster()


def function(dtype, interpolation, jit_compile=False):
    """Returns the output of a layer and its gradient, and whether the output is clipped."""
    kwargs = {"interpolation": interpolation, "dtype": unscaled(dtype)}
    layer = tf.keras.layers.UpSampling2D((2, 3), **kwargs)

    @tf.function(jit_compile=jit_compile)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return y, tape.gradient(y, x, output_gradients=y)

    graph = run.get_concrete_function(tf.TensorSpec([2, 5, 4, 3], dtype)).graph
    return run, "Minimum" in {op.type for op in graph.get_operations()}


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_as_keras(dtype, jit_compile):
    numbers = tf.random.stateless_normal([2, 5, 4, 3], [1, 2])
    # The largest of the dtype is among them.
    x = tf.cast(tf.where(numbers > 2, float(tf.as_dtype(dtype).max), numbers), dtype)
    ours, clips = function(dtype, "bilinear", jit_compile)
    assert not clips
    slow.enable_float32_where_faster(False)
    of_keras, clips = function(dtype, "bilinear", jit_compile)
    assert clips
    for found, expected in zip(ours(x), of_keras(x)):
        assert found.dtype == expected.dtype == x.dtype
        np.testing.assert_array_equal(tf.cast(found, tf.float32), tf.cast(expected, tf.float32))


def test_infinity_stays_what_it_is():
    ours, _ = function("float16", "bilinear")
    y, _ = ours(tf.fill([2, 5, 4, 3], tf.constant(np.inf, tf.float16)))
    assert not tf.math.is_finite(y).numpy().any()


@pytest.mark.parametrize("interpolation", ["bicubic", "lanczos3"])
def test_what_leaves_the_range_of_its_input_is_clipped(interpolation):
    x = tf.constant([[0.0, 0, 65504, 65504]], tf.float16)[..., tf.newaxis, tf.newaxis]
    kwargs = {"interpolation": interpolation, "dtype": unscaled("float16")}
    y = tf.keras.layers.UpSampling2D(2, **kwargs)(x)
    assert float(tf.reduce_max(y)) == 65504
