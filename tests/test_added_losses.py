"""Losses that layers add in float16: a warning if they are infinite, and only then."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import ours

X = np.full([4, 8], 100.0, "float32")
MODES = [{"run_eagerly": True}, {"jit_compile": False}, {"jit_compile": True}]


class Adds(tf.keras.layers.Layer):
    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        self.add_loss(tf.reduce_sum(tf.square(x)) * self.factor)
        return x


def fit(factor, policy, mode):
    with keras_mp.policy_scope(policy):
        layers = [Adds(factor, name="adds"), tf.keras.layers.Dense(1)]
        model = tf.keras.Sequential([tf.keras.Input([8]), *layers])
        model.compile("sgd", "mse", **mode)
        return model.fit(X, X[:, :1], epochs=3, verbose=0).history["loss"]


@pytest.mark.parametrize("mode", MODES, ids=["eager", "graph", "jit"])
def test_an_infinite_loss_is_told_of_once(mode):
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="'adds' adds a loss") as warned:
        fit(1.0, "mixed_float16", mode)
    assert len(ours(warned)) == 1


@pytest.mark.parametrize("mode", MODES, ids=["eager", "graph", "jit"])
def test_a_finite_loss_and_one_of_another_dtype_are_not_told_of(mode):
    X[:] = 10.0
    try:
        assert np.isfinite(fit(0.01, "mixed_float16", mode)).all()
        assert np.isfinite(fit(1e6, "mixed_bfloat16", mode)).all()
    finally:
        X[:] = 100.0
