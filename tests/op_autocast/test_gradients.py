"""Gradients: with respect to what user code sees, of sums, wherever they are computed."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import inside
from tests.common import assert_all_equal, differentiated, distance, once
from tests.op_autocast.common import HALF, normal, region

pytestmark = once

WRAPS = [lambda function: function, tf.function]


@pytest.mark.parametrize("wrap", WRAPS)
def test_with_respect_to_intermediates(wrap):
    w = normal(4, 4, seed=1)

    @wrap
    def function(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            a = x @ w
            b = tf.nn.relu(a)
            c = tf.reduce_sum((b @ w) ** 2)
        return [tape.gradient(c, each) for each in (x, a, b)] + [tape.gradient(b, a)]

    exact = function(normal(4, 4))
    with keras_mp.autocast("bfloat16"):
        found = function(normal(4, 4))
    assert all(0 <= distance(each, right) < 0.02 for each, right in zip(found, exact))
    assert any(distance(each, right) > 0 for each, right in zip(found, exact))


def test_of_a_tensor_that_is_watched_and_that_several_operations_take():
    """What they give back is summed in float32, as what the program sees is float32."""
    with keras_mp.autocast("bfloat16"), tf.GradientTape() as tape:
        x = normal(1, 1) @ tf.eye(1)
        tape.watch(x)
        y = sum((x @ tf.constant([[1 + 2.0**-7 * i]]) for i in range(5)), 0.0)
    assert tape.gradient(y, x).numpy().item() == 5 + 10 * 2.0**-7


def test_a_float32_tensor_that_is_watched_late():
    with keras_mp.autocast("bfloat16"):
        z = normal(2, 2) @ normal(2, 2)
        with tf.GradientTape() as tape:
            tape.watch(z)
            y = tf.nn.relu(z)
            with tape.stop_recording():
                y * 3.0
            y = y @ tf.eye(2)
    np.testing.assert_array_equal(tape.gradient(y, z), tf.cast(z > 0, tf.float32))


@pytest.mark.parametrize("wrap", [*WRAPS, lambda f: tf.function(f, jit_compile=True)])
@pytest.mark.parametrize("dtype", HALF)
def test_of_a_bias_is_a_right_sum(dtype, wrap):
    rows = 10_000
    first, second = tf.Variable([0.0]), tf.Variable([0.0])

    def biased(x):
        return tf.nn.relu(tf.nn.bias_add(x @ tf.ones([4, 1]), first) + second)

    with region(dtype):
        function = wrap(lambda x: differentiated(lambda: biased(x), [first, second]))
        _, gradients = function(tf.ones([rows, 4]))
    for gradient in gradients:
        assert abs(gradient.numpy().item() / rows - 1) < 2**-8


@pytest.mark.parametrize("wrap", WRAPS)
def test_recomputed_outside_of_the_region_as_inside(wrap):
    w = tf.Variable(normal(4, 4))
    x = normal(8, 4, seed=1)

    @tf.recompute_grad
    def layer(x):
        return tf.nn.relu(x @ w + 1.0) @ w

    def outside(x):
        def forward():
            with keras_mp.autocast("bfloat16"):
                return layer(x)

        return differentiated(forward, w, tf.sin)[1]

    def inside(x):
        with keras_mp.autocast("bfloat16"):
            return differentiated(lambda: layer(x), w, tf.sin)[1]

    found, expected = wrap(outside)(x), wrap(inside)(x)
    np.testing.assert_array_equal(found, expected)
    _, exact = differentiated(lambda: layer(x), w, tf.sin)
    assert 0 < distance(found, exact) < 0.05


@pytest.mark.parametrize("wrap", WRAPS)
def test_backward_pass_in_a_region_is_that_of_the_forward_pass(wrap):
    """What ran in float32 has a float32 gradient, also if that is asked for in a region."""
    x = normal(4, 4)

    @wrap
    def function(dtype_of_backward):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x @ x)
        with region(dtype_of_backward):
            return tape.gradient(loss, x)

    np.testing.assert_array_equal(function("bfloat16"), function(None))


def test_gradient_functions_of_the_users_run_as_their_forward_pass():
    states = []

    @tf.custom_gradient
    def function(x):
        def gradient(upstream):
            states.append((keras_mp.autocast_state().dtype, inside.dtype_in_reach()))
            return upstream

        return tf.identity(x), gradient

    low = tf.bfloat16
    for around, of_region, in_reach in (
        (region("bfloat16"), low, low),
        (inside.in_reach("bfloat16"), None, low),
        (region(None), None, None),
    ):
        for wrap, backward in itertools.product(WRAPS, (region("bfloat16"), region(None))):

            @wrap
            def run(x):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    with around:
                        y = function(x)
                with backward:
                    return tape.gradient(y, x)

            run(tf.constant(1.0))
            assert {each for each, _ in states} == {of_region}
            assert in_reach is None or {each for _, each in states} == {low}
            states.clear()


@tf.custom_gradient
def reversed_gradient(x):
    return x, lambda upstream: -upstream


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(
    ("function", "factor"),
    [(reversed_gradient, -1.0), (tf.stop_gradient, 0.0), (tf.grad_pass_through(tf.round), 1.0)],
    ids=["reversed", "stopped", "passed through"],
)
def test_what_a_program_says_of_a_gradient_holds_between_two_products(function, factor, wrap):
    w = tf.eye(4)

    @wrap
    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x @ w) @ w
        return tape.gradient(y, x, unconnected_gradients="zero")

    with keras_mp.autocast("bfloat16"):
        np.testing.assert_array_equal(gradients(normal(4, 4)), tf.fill([4, 4], factor))


def test_gradient_function_without_variables_is_an_error_as_ever():
    w = tf.Variable(1.0)

    @tf.custom_gradient
    def function(x):
        return x * w, lambda upstream: upstream

    with keras_mp.autocast("bfloat16"), pytest.raises(TypeError, match="'variables'"):
        function(tf.constant(1.0))


def test_without_the_pairs_of_casts_values_are_equal():
    """In a step, and where the backward pass is made of the forward pass's graph."""
    w, b = tf.Variable(normal(4, 4)), tf.Variable(normal(4))
    x = normal(4, 4, seed=1)

    def results():
        @tf.function
        def forward(x):
            z = tf.nn.leaky_relu(x @ w + b)
            return tf.reduce_sum(tf.concat([z @ w, tf.transpose(z) @ w, z], 0) ** 2)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                y = forward(x)
            return [y, *tape.gradient(y, [w, b])]

        with tf.GradientTape() as tape, keras_mp.autocast("bfloat16"):
            y = forward(x)
        with keras_mp.autocast("bfloat16"):
            return [y, *tape.gradient(y, [w, b]), *step(x)]

    # Grappler fuses what has no casts in between, and then rounds less.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        found = results()
        tf.config.run_functions_eagerly(True)
        expected = results()
    finally:
        tf.config.run_functions_eagerly(False)
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    assert_all_equal(found, expected)
