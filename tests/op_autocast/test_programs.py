"""Whole programs: unchanged float32 code against itself in float32."""

import numpy as np
import pytest
import tensorflow as tf

from tests.common import assert_all_equal, once
from tests.op_autocast.common import ROUNDING, casts, error, operations, region
from tests.op_autocast.programs import Programs

pytestmark = once

NAMES = [name for name in vars(Programs) if not name.startswith("_")]
# In XLA a list needs its size, and eager loops have none.
COMPILED = ["condition", "convolutions", "loop", "recomputed"]


@pytest.fixture(scope="module")
def programs():
    return Programs()


def run(programs, function, dtype):
    """Results, and gradients of their squares, computed outside of the region."""
    with tf.GradientTape() as tape:
        tape.watch(programs.x)
        with region(dtype):
            y = function(programs.x)
        assert y.dtype == tf.float32
        loss = tf.reduce_sum(y**2)
    gradients = tape.gradient(loss, [*programs.variables, programs.x])
    return y, [None if g is None else tf.convert_to_tensor(g) for g in gradients]


def run_inside(programs, function, dtype):
    """The same, the backward pass inside of the region and of the function as well."""
    with region(dtype):
        return function(programs.x)


def check(programs, name, wrap, dtype="bfloat16", run=run, rounds=True):
    function = wrap(getattr(programs, name))
    exact, exact_gradients = run(programs, function, None)
    found, gradients = run(programs, function, dtype)
    # A few operations in a row, each of which rounds what it takes and what it returns.
    assert error(found, exact) < 10 * ROUNDING[dtype]
    if rounds:
        assert error(found, exact) > 0
    assert [g is None for g in gradients] == [g is None for g in exact_gradients]
    for gradient, expected in zip(gradients, exact_gradients):
        if expected is not None:
            assert gradient.dtype == tf.float32
            assert error(gradient, expected) < 30 * ROUNDING[dtype]
    again, _ = run(programs, function, None)
    np.testing.assert_array_equal(again, exact)


@pytest.mark.parametrize("name", NAMES)
def test_in_eager(programs, name):
    check(programs, name, lambda function: function)


@pytest.mark.parametrize("name", NAMES)
def test_in_a_function(programs, name):
    check(programs, name, tf.function)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(programs, name):
    def wrap(function):
        @tf.function(jit_compile=True)
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
                loss = tf.reduce_sum(y**2)
            return y, tape.gradient(loss, [*programs.variables, x])

        return step

    # Older versions of XLA compute bfloat16 in float32 on CPUs, and leave out casts.
    check(programs, name, wrap, run=run_inside, rounds=False)


@pytest.mark.parametrize("name", ["mlp", "loop", "recomputed"])
def test_in_float16(programs, name):
    check(programs, name, lambda function: function, "float16")


def by_hand(x, w, b, v):
    """An MLP with the casts that a region makes."""
    x, w, b, v = (tf.cast(each, "bfloat16") for each in (x, w, b, v))
    return tf.cast(tf.nn.relu(x @ w + b) @ v, "float32")


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_bitwise_as_cast_by_hand(programs, wrap):
    p = programs
    variables = [p.w, p.b, p.v]
    automatic = wrap(lambda x: tf.nn.relu(x @ p.w + p.b) @ p.v)
    manual = wrap(lambda x: by_hand(x, *variables))
    results = []
    for function, dtype in ((automatic, "bfloat16"), (manual, None)):
        with tf.GradientTape() as tape:
            with region(dtype):
                y = function(p.x)
            loss = tf.reduce_sum(y)
        results.append([y, *tape.gradient(loss, variables)])
    assert_all_equal(*results)


def test_what_comes_from_outside_of_a_loop_is_cast_once():
    @tf.function
    def function(x):
        with region("bfloat16"):
            kernel = tf.exp(x)
            body = lambda i, y: (i + 1, y @ kernel)  # noqa: E731
            return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]

    x = tf.eye(4)
    graph = function.get_concrete_function(x).graph.as_graph_def()
    (body,) = (each for each in graph.library.function if "while_body" in each.signature.name)
    dtypes = [each[1] for each in operations(graph, "MatMul")]
    assert dtypes == ["bfloat16"]
    assert casts(body) == 2  # of the state, to 16 bits and back
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    assert error(tape.gradient(y, x), gradient_of_loop(x)) < 10 * ROUNDING["bfloat16"]


def gradient_of_loop(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x
        for _ in range(3):
            y = y @ tf.exp(x)
    return tape.gradient(y, x)
