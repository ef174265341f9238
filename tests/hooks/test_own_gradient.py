"""Gradients of one's own, wherever what they are of is computed."""

import numpy as np
import pytest
import tensorflow as tf

from keras_mp.hooks import own_gradient
from tests.common import once

pytestmark = once


def forward(x, y):
    product = x * y
    return [product, product + 1], [x * 1]


def backward(upstream, inputs, outputs, kept):
    # Ten times the true gradient of x, and none of y.
    assert len(inputs) == len(outputs) == 2
    return [(upstream[0] + upstream[1]) * inputs[1] * kept[0] / inputs[0] * 10, None]


def product(x, y):
    return own_gradient.compute("Product", forward, backward, [x, y])


def gradients(x, y):
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        first, second = product(x, y)
        total = tf.reduce_sum(first + second)
    return tape.gradient(total, [x, y])


X, Y = tf.constant([1.0, 2.0]), tf.constant([3.0, 5.0])
EXPECTED = [60.0, 100.0]


def test_in_eager():
    of_x, of_y = gradients(X, Y)
    np.testing.assert_allclose(of_x, EXPECTED)
    assert of_y is None


def test_arguments_of_a_function():
    np.testing.assert_allclose(tf.function(lambda x, y: gradients(x, y)[0])(X, Y), EXPECTED)


def test_eager_tensors_that_a_function_closes_over():
    np.testing.assert_allclose(tf.function(lambda: gradients(X, Y)[0])(), EXPECTED)
    np.testing.assert_allclose(tf.function(lambda x: gradients(x, Y)[0])(X), EXPECTED)


def test_a_tape_around_a_function():
    function = tf.function(lambda x: product(x, Y)[0])
    with tf.GradientTape() as tape:
        tape.watch(X)
        value = function(X)
    np.testing.assert_allclose(tape.gradient(value, X), [30.0, 50.0])


@pytest.mark.parametrize("runs", ["cond", "while_loop", "map_fn"])
def test_in_control_flow(runs):
    bodies = {
        "cond": lambda x: tf.cond(x[0] > 0, lambda: product(x, Y)[0], lambda: x),
        "while_loop": lambda x: tf.while_loop(
            lambda i, _: i < 1, lambda i, x: (i + 1, product(x, Y)[0]), (0, x)
        )[1],
        "map_fn": lambda x: tf.map_fn(lambda pair: product(*pair)[0], (x, Y), x.dtype),
    }

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = bodies[runs](x)
        return tape.gradient(value, x)

    np.testing.assert_allclose(gradient(X), [30.0, 50.0])
