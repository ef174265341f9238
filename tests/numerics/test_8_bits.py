"""Layers that cast to 8 bits: each tool says what that does to the numbers, and none fails."""

import numpy as np
import pytest
import tensorflow as tf

from keras_mp import numerics
from tests.common import once
from tests.numerics.tools import dense, sequential

pytestmark = once
L = tf.keras.layers
X = np.random.default_rng(5).normal(size=[32, 24]).astype("float32")
Y = np.ones([32, 4], "float32")


class Quantized(L.Layer):
    def __init__(self, to, **kwargs):
        super().__init__(name="quantized", **kwargs)
        self.to = getattr(tf.dtypes.experimental, to)

    def get_config(self):
        return {"to": self.to.name, "dtype": self.dtype_policy}

    def call(self, x):
        return tf.cast(tf.reshape(tf.cast(x, self.to), [-1, 24]), x.dtype)


def quantized(to, policy):
    return sequential(lambda: Quantized(to), dense(4), shape=[24], policy=policy)


def test_an_overflow_of_8_bits_is_named_by_check_and_by_watch():
    model = quantized("float8_e4m3fn", "mixed_bfloat16")
    first = numerics.check(model, (1000 * X, Y)).findings[0]
    assert (first.hazard, first.where) == ("an overflow in the forward pass", "quantized")
    assert "the largest float8_e4m3fn is 448" in first.why
    with pytest.raises(numerics.NotFiniteError, match="Cast in quantized"), numerics.watch(model):
        model.fit(1000 * X, Y, verbose=0)


def test_it_is_watched_and_profiled():
    model = quantized("float8_e5m2", "mixed_float16")
    watching = numerics.watch(model, every=1, output_gradients=True)
    with watching:
        model.fit(X, Y, verbose=0, callbacks=[watching])
    assert watching.report()["output", "quantized"].histogram.total == X.size
    assert numerics.profile(model, (X, Y), steps=0).census.work()
