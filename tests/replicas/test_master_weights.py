import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import FAMILIES, assert_all_equal, make_optimizer, value
from tests.replicas import workers


def train(strategy, index, method, dtype):
    """What each worker ends with: the weight, the float32 weight and the optimizer's variables."""
    with strategy.scope():
        v = tf.Variable(tf.ones([64], dtype))
        optimizer = make_optimizer(FAMILIES[0].replace("SGD", "Adam"), 1e-3)
        if method is not None:
            # Without a seed, which each worker would draw for itself.
            optimizer = keras_mp.MasterWeightOptimizer(optimizer, method)
        optimizer.build([v])

    @tf.function
    def step(factor):
        def replica_step():
            gradient = tf.cast(tf.linspace(1.0, 2.0, 64) * factor, v.dtype)
            optimizer.apply_gradients([(gradient, v)])

        strategy.run(replica_step)

    for i in range(6):
        step(tf.constant(2.0 ** (index + i)))
    weights = optimizer.float32_weights() if method else [v]
    variables = optimizer.variables
    kept = variables() if callable(variables) else variables
    return value(v), value(weights[0]), [value(each) for each in kept]


# TensorFlow sends initial values to all workers, which it cannot with bfloat16 and int16.
METHODS = {"copy": "float16", "stochastic_rounding": "float16", None: "float32"}


@pytest.fixture(scope="module")
def results():
    """What each of two workers ends with, by method."""
    calls = [(train, {"method": method, "dtype": METHODS[method]}) for method in METHODS]
    return dict(zip(METHODS, workers.run(calls, count=2), strict=True))


@pytest.mark.parametrize("method", ["copy", "stochastic_rounding"])
def test_all_workers_have_the_same_weights(method, results):
    first, second = results[method]
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    assert_all_equal(first[2], second[2])
    assert (first[1] != 1).any()


def test_two_workers_train_as_with_float32_variables(results):
    for (_, our, _), (_, their, _) in zip(results["copy"], results[None], strict=True):
        np.testing.assert_array_equal(our, their)
