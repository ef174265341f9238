"""Whole programs: unchanged float32 code against itself in float32."""

import numpy as np
import pytest
import tensorflow as tf

from tests.common import assert_all_equal, differentiated, distance, once
from tests.op_autocast.common import ROUNDING, casts, normal, operations, region

pytestmark = once


class Programs:
    """Functions of `x`, by name, that share variables."""

    def __init__(self):
        shapes = {"w": [6, 8], "b": [8], "v": [8, 6], "c": [6], "filters": [3, 3, 2, 4]}
        for i, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, tf.Variable(normal(*shape, seed=i), name=name))
        self.variables = [self.w, self.b, self.v, self.c, self.filters]
        self.x = normal(4, 6, seed=9)
        self.image = normal(2, 6, 6, 2, seed=10)
        self.inner = tf.function(lambda x: tf.nn.relu(x @ self.w))

    def mlp(self, x):
        return tf.nn.bias_add(tf.nn.relu(x @ self.w + self.b) @ self.v, self.c)

    def convolutions(self, x):
        image = self.image * tf.reshape(x[:2, 0], [2, 1, 1, 1])
        y = tf.nn.conv2d(image, self.filters, 1, "SAME")
        y = tf.compat.v1.nn.fused_batch_norm(y, tf.ones([4]), tf.zeros([4]))[0]
        return tf.reduce_mean(tf.nn.avg_pool2d(tf.nn.relu(y), 2, 2, "SAME"), [1, 2])

    def loop(self, x):
        """A recurrent cell; `x @ w` comes from outside, and so does the read of `v`."""
        kernel = self.v.read_value()

        def cell(i, h):
            return i + 1, tf.tanh(x @ self.w + tf.nn.relu(h @ kernel) @ self.w + self.b)

        state = (0, tf.zeros([4, 8]))
        return tf.while_loop(lambda i, _: i < 3, cell, state, maximum_iterations=3)[1]

    def attention(self, x):
        query = key = value = x @ self.w
        mask = (1 - tf.linalg.band_part(tf.ones([4, 4]), -1, 0)) * -1e9
        logits = tf.einsum("ij,kj->ik", query, key) / 8**0.5 + mask
        return tf.nn.softmax(logits) @ value

    def condition(self, x):
        y = x @ self.w
        positive = tf.reduce_sum(y) > -100
        return tf.cond(positive, lambda: tf.nn.relu(y) @ self.v, lambda: y @ self.v * 2)

    def mapped(self, x):
        return tf.map_fn(lambda row: tf.squeeze(row[None] @ self.w, 0), x)

    def vectorized(self, x):
        row = lambda row: tf.squeeze(tf.nn.relu(row[None] @ self.w) @ self.v, 0)  # noqa: E731
        return tf.vectorized_map(row, x)

    def nested(self, x):
        return self.inner(x) @ self.v

    def custom_gradient(self, x):
        @tf.custom_gradient
        def product(x, w):
            return x @ w, lambda up: (up @ tf.transpose(w), tf.transpose(x) @ up)

        return product(x, tf.identity(self.w))

    def recomputed(self, x):
        return tf.recompute_grad(lambda x: tf.nn.relu(x @ self.w) @ self.v)(x)

    def embedding(self, x):
        return tf.gather(self.v, [1, 2, 3, 3]) @ self.w * x[0, 0]

    def arrays(self, x):
        array = tf.TensorArray(tf.float32, 4)
        for i in range(4):
            array = array.write(i, x[i : i + 1] @ self.w)
        return array.concat()

    def second_order(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.tanh(x @ self.w) @ self.v)
        return tape.gradient(y, x)

    def forward_mode(self, x):
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = tf.tanh(x @ self.w) @ self.v
        return accumulator.jvp(y)

    def jacobian(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x @ self.w) @ self.v
        return tape.jacobian(y, x)


NAMES = [name for name in vars(Programs) if not name.startswith("_")]
# In XLA a list needs its size, and eager loops have none.
COMPILED = ["condition", "convolutions", "loop", "recomputed"]


@pytest.fixture(scope="module")
def programs():
    return Programs()


def run(programs, function, dtype):
    """Results, and gradients of their squares, computed outside of the region."""
    inside = lambda: run_inside(programs, function, dtype)  # noqa: E731
    y, gradients = differentiated(inside, [*programs.variables, programs.x], tf.square)
    assert y.dtype == tf.float32
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
    assert distance(found, exact) < 10 * ROUNDING[dtype]
    if rounds:
        assert distance(found, exact) > 0
    assert [g is None for g in gradients] == [g is None for g in exact_gradients]
    for gradient, expected in zip(gradients, exact_gradients):
        if expected is not None:
            assert gradient.dtype == tf.float32
            assert distance(gradient, expected) < 30 * ROUNDING[dtype]
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
            return differentiated(lambda: function(x), [*programs.variables, x], tf.square)

        return step

    # Older versions of XLA compute bfloat16 in float32 on CPUs, and leave out casts.
    check(programs, name, wrap, run=run_inside, rounds=False)


@pytest.mark.parametrize("name", ["mlp", "loop", "recomputed", "attention"])
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
        inside = lambda: run_inside(p, function, dtype)  # noqa: E731
        y, gradients = differentiated(inside, variables)
        results.append([y, *gradients])
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
    exact = differentiated(lambda: x @ tf.exp(x) @ tf.exp(x) @ tf.exp(x), x)
    for found, right in zip(differentiated(lambda: function(x), x), exact):
        assert distance(found, right) < 10 * ROUNDING["bfloat16"]
