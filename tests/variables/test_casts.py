import functools
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import MODES, differentiated, mirrored, once, placed

# No casts but those of variables, on CPUs without units for 16 bits, too.
pytestmark = [once, pytest.mark.usefixtures("kernels_of_tensorflow")]


def autocast(value=(1.0, 2.0)):
    return keras_mp.autocast_variable(tf.Variable(value))


def casts_in(graph, to=tf.float16):
    """How many operations of a graph, and of functions it calls, cast what was read to a dtype."""
    definition = graph.as_graph_def()
    functions = [definition.node, *(each.node_def for each in definition.library.function)]
    return sum(_casts_of_reads(nodes, to) for nodes in functions)


def _casts_of_reads(nodes, to):
    by_name = {node.name: node.op for node in nodes}
    casts = (n for n in nodes if n.op == "Cast" and n.attr["DstT"].type == to.as_datatype_enum)
    reads = ("ReadVariableOp", "ResourceGather", "Identity")
    return sum(by_name.get(n.input[0].partition(":")[0]) in reads for n in casts)


def count(function, *args, scope="float16"):
    """Traces and runs a function in the scope; returns its casts and its result."""

    @tf.function(autograph=False)
    def run(*args):
        with keras_mp.autocast_scope(scope):
            return function(*args)

    concrete = run.get_concrete_function(*args)
    return casts_in(concrete.graph, tf.as_dtype(scope)), concrete(*args)


@pytest.mark.parametrize("scope", ["float16", "bfloat16"])
def test_fifty_reads_are_one_cast(scope):
    v = autocast()
    reads = [lambda: v * 1, lambda: v.value(), lambda: v[0], lambda: v.read_value()]
    casts, results = count(lambda: [reads[i % 4]() for i in range(50)], scope=scope)
    assert casts == 1
    assert all(r.dtype == scope for r in results)


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_of_many_reads_are_summed_in_float32(jit):
    rng = np.random.default_rng(0)
    xs = rng.uniform(0.5, 1.5, [50, 64]).astype(np.float16)
    v = autocast(rng.uniform(0.5, 1.5, 64).astype(np.float32))

    def gradient(read):
        with tf.GradientTape() as tape:
            y = tf.add_n([tf.cast(tf.reduce_sum(read() * x), tf.float32) for x in xs])
        return tape.gradient(y, v)

    @tf.function(jit_compile=jit)
    def once():
        with keras_mp.autocast_scope("float16"):
            return gradient(lambda: v)

    @tf.function(jit_compile=jit)
    def each_time():
        return gradient(lambda: tf.cast(v, tf.float16))

    expected = xs.astype(np.float64).sum(0)
    np.testing.assert_allclose(once(), expected, rtol=1e-6)
    np.testing.assert_allclose(once(), each_time(), rtol=3e-7)


WRITES = {
    "assign": lambda v: v.assign([8.0, 9.0]),
    "slice": lambda v: v[:1].assign([8.0]),
    "scatter": lambda v: v.scatter_add(tf.IndexedSlices([8.0], [0])),
    "wrapped": lambda v: v._variable.assign_add([8.0, 9.0]),
    "operation": lambda v: tf.raw_ops.AssignVariableOp(
        resource=v._variable.handle, value=[8.0, 9.0]
    ),
    "optimizer": lambda v: tf.raw_ops.ResourceApplyGradientDescent(
        var=v._variable.handle, alpha=1.0, delta=[8.0, 9.0]
    ),
    "function": lambda v: tf.function(lambda: v.assign([8.0, 9.0]))(),
    "branch": lambda v: tf.cond(
        tf.reduce_all(v > 0), lambda: v.assign([8.0, 9.0]).value(), lambda: v.value()
    ),
    "loop": lambda v: tf.while_loop(
        lambda i: i < 2, lambda i: (i + tf.cast(v.assign_add([8.0, 9.0])[0] > 0, tf.int32),), (0,)
    ),
    "conditional": lambda v: tf.switch_case(
        tf.constant(0), [lambda: v.assign([8.0, 9.0]).value(), lambda: v.value()]
    ),
}


@pytest.mark.parametrize("write", sorted(WRITES))
def test_a_read_after_a_write_is_cast_again(write):
    v, expected = autocast(), autocast()
    WRITES[write](expected)

    def function():
        before = [v * 1, v * 1]
        WRITES[write](v)
        return [*before, v * 1, v * 1]

    _, results = count(function)
    assert [r.numpy().tolist() for r in results[:2]] == [[1, 2]] * 2
    assert [r.numpy().tolist() for r in results[2:]] == [expected.numpy().tolist()] * 2
    assert expected.numpy().tolist() != [1, 2]


def test_control_dependencies_are_obeyed():
    v = autocast()

    def function():
        before = v * 1
        with tf.control_dependencies([before]):
            write = tf.py_function(lambda: v.assign([8.0, 9.0]).value(), [], tf.float32)
        with tf.control_dependencies([write]):
            return before, v * 1, v.read_value()

    _, (before, *after) = count(function)
    np.testing.assert_array_equal(before, [1, 2])
    np.testing.assert_array_equal(after, [[8, 9], [8, 9]])


def test_only_writes_to_the_variable_count():
    v, other = autocast(), autocast()

    def function():
        results = []
        for _ in range(5):
            results.append(v * 1)
            other.assign_add(v)
            tf.function(lambda: v * 1)()
        return results

    casts, _ = count(function)
    assert casts == 1 + 5  # one here and one in each of the five functions


def test_branches_cast_for_themselves():
    v = autocast()

    def function(flag):
        first = v * 1
        chosen = tf.cond(flag, lambda: v * v, lambda: v + v + v)
        return first, chosen, v * 1

    casts, results = count(function, tf.constant(True))
    assert casts == 3 + 1  # The last one is of what the branches return.
    np.testing.assert_array_equal(results[1], [1, 4])


def test_a_loop_that_trains_reads_the_new_value_each_time():
    v = autocast([64.0])

    @tf.function
    def train():
        with keras_mp.autocast_scope("float16"):
            for _ in tf.range(3):
                with tf.GradientTape() as tape:
                    loss = v * v + 0 * v
                v._variable.assign_sub(0.25 * tape.gradient(loss, v))
            return v * 1

    assert train().numpy() == [8.0]


def test_a_read_before_the_tape_does_not_hide_later_ones_from_it():
    v, table = autocast(), autocast(np.ones([5, 3], np.float32))

    def function():
        before = v * 1, table * 1
        _, gradient = differentiated(lambda: v * v, v)
        (_, first), second = differentiated(
            lambda: differentiated(lambda: v * v * v, v), v, lambda both: both[1]
        )
        _, sparse = differentiated(lambda: tf.nn.embedding_lookup(table, [1, 1, 3]), table)
        symbolic = tf.gradients(v * v + v, v._variable)[0]
        return before, gradient, first, second, symbolic, sparse

    _, (_, gradient, first, second, symbolic, sparse) = count(function)
    np.testing.assert_array_equal(gradient, [2.0, 4.0])
    np.testing.assert_array_equal(first, [3.0, 12.0])
    np.testing.assert_array_equal(second, [6.0, 12.0])
    np.testing.assert_array_equal(symbolic, [3.0, 5.0])
    assert symbolic.dtype == tf.float32
    assert isinstance(sparse, tf.IndexedSlices)
    assert sparse.values.dtype == tf.float32
    np.testing.assert_array_equal(tf.convert_to_tensor(sparse)[:, 0], [0, 2, 0, 1, 0])


@pytest.mark.usefixtures("sums_of_tensorflow")
def test_a_shape_that_may_change():
    v = keras_mp.autocast_variable(tf.Variable([1.0], shape=tf.TensorShape(None)))
    v.assign([[3.0, 4.0]])
    casts, gradient = count(lambda: differentiated(lambda: v * v, v)[1])
    assert casts == 1
    np.testing.assert_array_equal(gradient, [[6.0, 8.0]])


def test_each_dtype_and_each_replica_has_its_own_cast():
    strategy = mirrored(2)
    with strategy.scope():
        v = autocast()

    @tf.function
    def step():
        def replica():
            with keras_mp.autocast_scope("float16"):
                half = v * 1 + v
            with keras_mp.autocast_scope("bfloat16"):
                return half, v * 1 + v

        return strategy.run(replica)

    graph = step.get_concrete_function().graph
    assert casts_in(graph, tf.float16) == casts_in(graph, tf.bfloat16) == 2
    for half, brain in zip(*map(strategy.experimental_local_results, step()), strict=True):
        np.testing.assert_array_equal(half, [2.0, 4.0])
        np.testing.assert_array_equal(tf.cast(brain, tf.float32), [2.0, 4.0])


def test_graphs_are_not_kept():
    v = autocast()
    graphs = []

    def trace():
        @tf.function
        def function():
            graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
            with keras_mp.autocast_scope("float16"):
                return v * v

        function()

    trace()
    gc.collect()
    assert graphs
    assert [graph() for graph in graphs] == [None] * len(graphs)


def test_graphs_of_tensorflow_1_cast_each_time():
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        v = autocast()
        session.run(v.initializer)
        with keras_mp.autocast_scope("float16"):
            before = v * 1
            with tf.control_dependencies([before, v.assign([8.0, 9.0]).op]):
                after = v * 1
        assert casts_in(graph) == 2
        np.testing.assert_array_equal(session.run([before, after]), [[1, 2], [8, 9]])


# cast_once


def recurrent(cell, x, steps=5):
    def body(i, h):
        return i + 1, cell(h)

    return tf.while_loop(lambda i, h: i < steps, body, (0, x), maximum_iterations=steps)[1]


@pytest.mark.parametrize("mode", MODES)
def test_cast_once_reaches_into_loops(mode):
    kernel = autocast([[0.5, 0.25], [-0.5, 1.0]])
    x = tf.constant([[1.0, -1.0]], tf.float16)

    def forward(variables):
        with keras_mp.autocast_scope("float16"), keras_mp.cast_once(variables):
            return recurrent(lambda h: tf.tanh(h @ kernel) + h @ kernel, x)

    (y, expected), (same, gradient) = (
        placed(mode, lambda: differentiated(lambda: forward(held), kernel))()
        for held in ([], [kernel])
    )
    assert gradient.dtype == tf.float32
    # The same additions; XLA may keep more bits between two operations in float16.
    np.testing.assert_allclose(same, y, rtol=2e-3 if mode == "jit" else 0)
    np.testing.assert_allclose(gradient, expected, rtol=2e-3 if mode == "jit" else 1e-6)
    for variables, casts in (([], 1), ([kernel], 0)):
        function = tf.function(functools.partial(forward, variables), autograph=False)
        graph = function.get_concrete_function().graph.as_graph_def()
        (body,) = [f for f in graph.library.function if "while_body" in f.signature.name]
        assert [node.op for node in body.node_def].count("Cast") == casts


def test_assignments_inside_of_cast_once_are_refused():
    v = autocast()
    with keras_mp.autocast_scope("float16"):
        with keras_mp.cast_once([v]):
            for write in ("assign", "slice", "scatter"):
                with pytest.raises(RuntimeError, match="inside of `keras_mp.cast_once`"):
                    WRITES[write](v)
        v.assign([3.0, 4.0])
        np.testing.assert_array_equal(v * 1, [3.0, 4.0])


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_tapes_and_recomputation_inside_of_cast_once(mode):
    v = autocast()
    x = tf.constant([3.0, 3.0], tf.float16)

    def gradients():
        with keras_mp.autocast_scope("float16"), keras_mp.cast_once([v]):
            _, inside = differentiated(lambda: v * 3 + v * x, v)
            _, recomputed = differentiated(lambda: keras_mp.recompute_grad(lambda x: x * v)(x), v)
            return inside, recomputed

    for gradient, expected in zip(placed(mode, gradients)(), (6, 3)):
        np.testing.assert_array_equal(gradient, [expected] * 2)


@pytest.mark.parametrize("in_function", [False, True])
def test_what_is_traced_inside_of_cast_once_may_run_outside(in_function):
    v = autocast()
    helper = tf.function(lambda x: x * v)
    one = tf.constant(1.0, tf.float16)

    def held():
        with keras_mp.autocast_scope("float16"), keras_mp.cast_once([v]):
            data = tf.data.Dataset.range(1).map(lambda i: tf.cast(i + 1, v.dtype) * v)
            return helper(one), data

    if in_function:
        tf.function(lambda: held()[0])()
    else:
        _, data = held()
    v.assign([5.0, 6.0])
    with keras_mp.autocast_scope("float16"):
        np.testing.assert_array_equal(helper(one), [5.0, 6.0])
        np.testing.assert_array_equal(held()[0], [5.0, 6.0])
    if not in_function:
        np.testing.assert_array_equal(next(iter(data)), [5.0, 6.0])


def test_an_alias_of_the_handle_ends_the_sharing():
    v = autocast()

    def function():
        alias = tf.identity(v._variable.handle)
        before = v * 1
        tf.raw_ops.AssignAddVariableOp(resource=alias, value=tf.constant([1.0, 1.0]))
        return before, v * 1

    _, (before, after) = count(function)
    np.testing.assert_array_equal(before, [1, 2])
    np.testing.assert_array_equal(after, [2, 3])


def test_a_variable_that_is_an_argument_too():
    v = autocast()

    @tf.function
    def function(argument):
        with keras_mp.autocast_scope("float16"):
            before = v * 1
            with tf.control_dependencies([before]):
                write = argument.assign_add([1.0, 1.0])
            with tf.control_dependencies([tf.identity(write)]):
                return before, v * 1

    function(tf.Variable([9.0, 9.0]))
    before, after = function(v._variable)
    np.testing.assert_array_equal(before, [1, 2])
    np.testing.assert_array_equal(after, [2, 3])


def test_cast_once_nests_and_follows_the_scope():
    v, w = autocast(), autocast([3.0, 4.0])
    with keras_mp.autocast_scope("float16"), keras_mp.cast_once([v, tf.Variable(1.0)]):
        with keras_mp.cast_once([w]):
            assert (v * w).dtype == tf.float16
            with pytest.raises(RuntimeError, match="inside of"):
                v.assign([5.0, 6.0])
        with keras_mp.autocast_scope("bfloat16"):
            assert (v * w).dtype == tf.bfloat16
        with keras_mp.autocast_scope(None):
            assert (v * w).dtype == tf.float32
    with keras_mp.cast_once([v]):
        v.assign([5.0, 6.0])  # nothing is cast without a scope, so nothing is held
        np.testing.assert_array_equal(v * 1, [5.0, 6.0])
