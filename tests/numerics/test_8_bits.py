"""Layers that cast to 8 bits: each tool says what that does to the numbers, and none fails."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.numerics import NotFiniteError, check, profile, watch
from tests.common import once

pytestmark = once
L = tf.keras.layers
X = np.random.default_rng(5).normal(size=[32, 24]).astype("float32")
Y = np.ones([32, 4], "float32")
DTYPES = ("float8_e5m2", "float8_e4m3fn")


class Quantized(L.Layer):
    def __init__(self, to, **kwargs):
        super().__init__(name="quantized", **kwargs)
        self.to = getattr(tf.dtypes.experimental, to)

    def get_config(self):
        return {"to": self.to.name, "dtype": self.dtype_policy}

    def call(self, x):
        return tf.cast(tf.reshape(tf.cast(x, self.to), [-1, 24]), x.dtype)


def quantized(to, policy, **kwargs):
    with keras_mp.policy_scope(policy):
        model = tf.keras.Sequential([tf.keras.Input([24]), Quantized(to, **kwargs), L.Dense(4)])
        model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_an_overflow_of_8_bits_is_named_by_check_and_by_watch(policy):
    model = quantized("float8_e4m3fn", policy)
    first = check(model, (1000 * X, Y)).findings[0]
    assert (first.hazard, first.where) == ("an overflow in the forward pass", "quantized")
    assert "the largest float8_e4m3fn is 448" in first.why
    with pytest.raises(NotFiniteError, match="Cast in quantized"), watch(model):
        model.fit(1000 * X, Y, verbose=0)


@pytest.mark.parametrize("to", DTYPES)
def test_it_is_watched_and_profiled(to):
    model = quantized(to, "mixed_float16")
    watching = watch(model, every=1, output_gradients=True)
    with watching:
        model.fit(X, Y, verbose=0, callbacks=[watching])
    assert watching.report()["output", "quantized"].histogram.total == X.size
    assert profile(model, (X, Y), steps=0).census.traced.work()
