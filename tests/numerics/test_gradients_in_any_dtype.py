"""Gradients that no dtype and no loss scale makes finite, though the loss is."""

import re

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import numerics
from tests.numerics.tools import dense, sequential

L = tf.keras.layers
X = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")


class Root(L.Layer):
    """Its gradient is that of a root at 0. It counts how often it runs in eager, in 16 bits."""

    count = 0

    def call(self, x):
        Root.count += tf.executing_eagerly() and x.dtype.size == 2
        return tf.sqrt(x - x) + x

    def compute_output_shape(self, shape):
        return shape


def model(policy, scale=4.0):
    layers = dense(6, name="first"), lambda: Root(name="root"), dense(2, name="last")
    # The loss scale falls to 1 in a few steps.
    optimizer = keras_mp.LossScaleOptimizer("sgd", keras_mp.DynamicLossScale(scale))
    optimizer = optimizer if policy == "mixed_float16" else "sgd"
    return sequential(*layers, shape=[6], policy=policy, optimizer=optimizer)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_check_knows_that_no_loss_scale_helps(dtype):
    Root.count = 0
    found = numerics.check(model(f"mixed_{dtype}", 2.0**15), (X, X[:, :2]))
    [finding] = found.findings
    assert finding.hazard == "a result that is not finite in any dtype"
    assert finding.where.startswith("first/")
    assert "No loss scale helps" in finding.why
    assert "numerics.watch" in finding.cure
    assert "dynamic" not in str(found.advice())
    assert Root.count <= 8


def test_its_cure_names_the_operation():
    with pytest.raises(numerics.NotFiniteError, match="backward pass") as raised, numerics.watch():
        model("mixed_bfloat16").fit(X, X[:, :2], verbose=0)
    assert re.search(r"SqrtGrad in \S*root", str(raised.value))
