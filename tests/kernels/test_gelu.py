"""GELU in 16 bits: float32's, rounded once, which keeps its input alone."""

import functools
import gc

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import MODES, differentiated

# With the tails, where it is small, and numbers whose cubes are beyond float16.
X = np.concatenate([np.linspace(-5, 5, 41), [-300, -50, 50, 300, 30000]]).astype("float32")
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
LOW = pytest.mark.parametrize("dtype", ROUNDING)
BY = pytest.mark.parametrize("approximate", [False, True], ids=["erf", "tanh"])


def layer(dtype, approximate, units):
    """A layer whose GELU takes what a product has made, which is its input."""
    return tf.keras.layers.Dense(
        units,
        lambda x: tf.nn.gelu(x, approximate),
        use_bias=False,
        kernel_initializer="identity",
        dtype=keras_mp.Policy(f"mixed_{dtype}"),
    )


def with_derivatives(function, x):
    """Values, gradients, and the derivatives of these."""
    once = functools.partial(differentiated, lambda: function(x), x)
    (y, gradient), second = differentiated(once, x, lambda pair: pair[1])
    return y, gradient, second


@LOW
@BY
@pytest.mark.parametrize("mode", MODES)
def test_it_is_that_of_float32_rounded_once(dtype, approximate, mode):
    x = tf.cast(tf.cast(X[None], dtype), tf.float32)
    ours = layer(dtype, approximate, len(X))
    ours(x)
    found = MODES[mode](lambda: with_derivatives(ours, x))()
    control = functools.partial(tf.nn.gelu, approximate=approximate)
    expected = with_derivatives(control, tf.cast(x, tf.float64))
    # Half of five times two units in the last place of float32's tanh, which is near -1. The second
    # derivative is rounded on its way.
    for each, exact, roundings in zip(found, expected, (1, 1, 4), strict=True):
        rtol = 1.01 * roundings * ROUNDING[dtype]
        np.testing.assert_allclose(each, exact, rtol=rtol, atol=6e-7 * roundings)


@LOW
@BY
def test_forward_mode(dtype, approximate):
    x = tf.cast(tf.cast(X[None, :41], dtype), tf.float32)
    ours = layer(dtype, approximate, 41)
    ours(x)
    derivatives = []
    control = functools.partial(tf.nn.gelu, approximate=approximate)
    for function, primal in ((ours, x), (control, tf.cast(x, tf.float64))):
        with tf.autodiff.ForwardAccumulator(primal, tf.ones_like(primal)) as forward:
            y = function(primal)
        derivatives.append(forward.jvp(y))
    # Rounded by the cast of the input, the product and the GELU.
    np.testing.assert_allclose(*derivatives, rtol=3.03 * ROUNDING[dtype], atol=6e-7)


@LOW
@BY
def test_the_backward_pass_keeps_its_input_alone(dtype, approximate):
    x = tf.ones([3, 1021])
    with_gelu = layer(dtype, approximate, 1021)
    without = tf.keras.layers.Dense(1021, use_bias=False, dtype=with_gelu.dtype_policy)

    def tensors():
        gc.collect()
        return [each for each in gc.get_objects() if isinstance(each, tf.Tensor)]

    def kept(layer):
        layer(x)
        before = len(tensors())
        with tf.GradientTape() as tape:
            y = layer(x)
        after = tensors()
        del tape
        assert any(each is y for each in after)
        return [each.dtype for each in after[before:] if each.shape == x.shape]

    found, of_product = kept(with_gelu), kept(without)
    # What the product returns is in both. More are what GELU returns, and an identity of it.
    assert len(found) <= len(of_product) + 2
    assert found.count(tf.float32) <= of_product.count(tf.float32)
