"""Where code is traced, and runs later or elsewhere: functions, files, data sets, replicas."""

import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import distance, mirrored, needs_onednn, once
from tests.op_autocast.common import casts, is_rounded, normal, operations, region
from tests.replicas import workers

pytestmark = once


def product(x):
    return tf.matmul(x, x)


X = normal(4, 4)
EXACT = product(X)


def test_a_trace_for_each_region():
    function = tf.function(product)
    regions = [*map(region, (None, "bfloat16", "float16")), region("bfloat16", deny=["MatMul"])]
    for _ in range(2):
        for i, each in enumerate(regions):
            with each:
                result = function(X)
            assert is_rounded(result, "float16" if i == 2 else "bfloat16") == (i in (1, 2))
    assert function.experimental_get_tracing_count() == 4
    # Equal regions share a trace, and so do a disabled region and none.
    with keras_mp.autocast("bfloat16", deny=("MatMul",)):
        function(X)
    with keras_mp.autocast("bfloat16"), keras_mp.autocast(enabled=False):
        function(X)
    assert function.experimental_get_tracing_count() == 4


def test_a_function_in_a_function():
    inner = tf.function(product)

    @tf.function
    def outer(x):
        with keras_mp.autocast("bfloat16"):
            first = inner(x)
        return first, inner(x)

    first, second = outer(X)
    assert is_rounded(first)
    np.testing.assert_array_equal(second, EXACT)
    with keras_mp.autocast("float16"):
        first, second = outer(X)
    assert is_rounded(first)
    assert is_rounded(second, "float16")


def test_a_concrete_function_is_what_it_was_traced_as():
    function = tf.function(product)
    outside = function.get_concrete_function(X)
    with keras_mp.autocast("bfloat16"):
        inside = function.get_concrete_function(X)
        np.testing.assert_array_equal(outside(X), EXACT)
    assert is_rounded(inside(X))


def test_pairs_of_casts_are_left_out():
    w, b = tf.Variable(normal(4, 4)), tf.Variable(normal(4))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            for _ in range(3):
                x = tf.nn.relu(x @ w + b)
            loss = tf.reduce_sum(x)
        return tape.gradient(loss, [w, b])

    with keras_mp.autocast("bfloat16"):
        definition = step.get_concrete_function(X).function_def
    # Forward: x, each read of w and b, the result; backward: the result, each gradient.
    assert casts(definition) <= 2 + 2 * 3 + 1 + 2 * 3
    types = [node.op for node in definition.node_def]
    assert types.count("MatMul") == 8
    with keras_mp.autocast("bfloat16"):
        graph = step.get_concrete_function(X).graph
    assert {dtype for _, dtype in operations(graph, "MatMul", "Relu")} == {"bfloat16"}


def test_a_cast_of_the_users_own_stays_an_output():
    @tf.function
    def function(x):
        y = product(x)
        return {"narrow": tf.cast(y, "bfloat16"), "wide": y}

    with keras_mp.autocast("bfloat16"):
        results = function(X)
        concrete = function.get_concrete_function(X)
    assert results["narrow"].dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(results["narrow"], tf.float32), results["wide"])
    assert concrete.structured_outputs["narrow"].dtype == tf.bfloat16


def test_order_that_the_user_asks_for_is_kept():
    v = tf.Variable(0.0)

    @tf.function
    def function(x):
        y = tf.nn.relu(product(x))
        with tf.control_dependencies([v.assign_add(1.0)]):
            z = y @ x
        return z, v.read_value()

    with keras_mp.autocast("bfloat16"):
        z, count = function(X)
    assert (is_rounded(z), float(count)) == (True, 1.0)


class Module(tf.Module):
    def __init__(self, input_signature):
        self.w = tf.Variable(normal(4, 3))
        self.function = tf.function(lambda x: tf.nn.relu(x @ self.w), input_signature)


@pytest.mark.parametrize("signature", [None, [tf.TensorSpec([None, 4])]])
def test_a_saved_model_is_as_the_region_in_which_it_is_saved(signature, tmp_path):
    module = Module(signature)
    results = {}
    for dtype in ("bfloat16", None):
        with region(dtype):
            results[dtype] = module.function(X)
    for dtype in (None, "bfloat16"):
        with region(dtype):
            tf.saved_model.save(module, str(tmp_path / str(dtype)))
        loaded = tf.saved_model.load(str(tmp_path / str(dtype)))
        np.testing.assert_array_equal(loaded.function(X), results[dtype])
        with region("float16"):
            np.testing.assert_array_equal(loaded.function(X), results[dtype])


def test_data_sets_are_as_the_region_in_which_they_are_made():
    data = tf.data.Dataset.from_tensors(X)
    outside = data.map(product)
    with keras_mp.autocast("bfloat16"):
        inside = data.map(product)
        np.testing.assert_array_equal(next(iter(outside)), EXACT)
    assert is_rounded(next(iter(inside)))


def test_python_functions_in_graphs_are_outside():
    found = []

    def python(x):
        found.append(keras_mp.autocast_state().dtype)
        return x

    with keras_mp.autocast("bfloat16"):
        tf.function(lambda x: tf.py_function(python, [x], tf.float32))(X)
    assert found == [None]


def test_graphs_of_tensorflow_1():
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        with keras_mp.autocast("bfloat16"):
            x = v1.placeholder(tf.float32, [None, 4])
            resource = v1.get_variable("a", initializer=X.numpy(), use_resource=True)
            reference = v1.get_variable("b", initializer=X.numpy(), use_resource=False)
            y = tf.nn.relu(x @ resource) @ reference
        gradients = tf.gradients(y, [x, y, resource, reference])
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            result, *gradients = session.run([y, *gradients], {x: X.numpy()})
    assert {dtype for _, dtype in operations(graph, "MatMul")} == {"bfloat16"}
    exact = tf.nn.relu(X @ X) @ X
    assert 0 < distance(result, exact) < 0.02
    assert [gradient.dtype for gradient in gradients] == ["float32"] * 4
    np.testing.assert_array_equal(gradients[1], tf.ones([4, 4]))


def test_each_replica_is_rounded():
    strategy = mirrored(2)
    for wrap in (lambda f: f, tf.function):

        @wrap
        def step(x):
            return strategy.run(product, [x])

        with keras_mp.autocast("bfloat16"):
            inside = strategy.experimental_local_results(step(X))
        outside = strategy.experimental_local_results(step(X))
        assert len(inside) == 2
        assert all(map(is_rounded, inside))
        for each in outside:
            np.testing.assert_array_equal(each, EXACT)


def test_numbers_are_checked_as_ever():
    with keras_mp.autocast("bfloat16"):
        tf.debugging.enable_check_numerics()
        try:
            assert is_rounded(product(X))
            with pytest.raises(tf.errors.InvalidArgumentError, match="NaN|Inf"):
                product(X * np.nan)
        finally:
            tf.debugging.disable_check_numerics()


# What a tape keeps in eager, in a process of its own.

WIDTH, BATCH, LAYERS = 128, 2048, 20


def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


def kept_by_a_tape():
    """Bytes that a tape keeps, with two kinds of sums, outside of a region and inside."""
    weights = [tf.Variable(tf.random.normal([WIDTH, WIDTH]) / 11) for _ in range(LAYERS)]
    biases = [tf.Variable(tf.zeros([WIDTH])) for _ in range(LAYERS)]
    x = tf.random.normal([BATCH, WIDTH])

    def run(add):
        y = x
        with tf.GradientTape() as tape:
            for w, b in zip(weights, biases):
                y = tf.nn.relu(add(y @ w, b))
        return tape, y

    found, kept = [], []  # All tapes stay, so that no memory is used a second time.
    for add in (tf.nn.bias_add, tf.add):
        for enabled in (False, True):
            with keras_mp.autocast("bfloat16", enabled=enabled):
                kept.append(run(add))
                before = resident()
                kept += [run(add) for _ in range(3)]
            found.append((resident() - before) // 3)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="It asks Linux.")
@needs_onednn  # TensorFlow's own product of bfloat16 matrices makes float32 copies of them.
def test_a_tape_keeps_16_bits():
    bias_add, bias_add_16, add, add_16 = workers.in_own_process(kept_by_a_tape)
    # 0.65 and 0.52. What else the process allocates moves them by some hundredths.
    assert bias_add_16 < 0.75 * bias_add
    assert add_16 < 0.75 * add
