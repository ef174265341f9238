import contextlib
import copy
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import Mixes, assert_all_equal, differentiated, mirrored, once, placed
from tests.models import OPTIMIZERS, make_optimizer, state

HALF = [tf.float16, tf.bfloat16]


def plain(value=(1.0, 2.0, 3.0, 4.0), dtype=tf.float32, **kwargs):
    return tf.Variable(value, dtype=dtype, **kwargs)


def autocast(value=(1.0, 2.0, 3.0, 4.0), dtype=tf.float32, **kwargs):
    return keras_mp.autocast_variable(tf.Variable(value, dtype=dtype, **kwargs))


def words(*lines):
    return " ".join(lines).split()


# tf.Variable's public interface: what each name is asked. A name that is not here fails the test.

TWO = np.full([4], 2.0, "float32")


# How it is written, with a tensor of four numbers.
WRITES = {
    "assign": lambda v, x: v.assign(x),
    "assign_by_name": lambda v, x: v.assign(value=x, read_value=True),
    "assign_add": lambda v, x: v.assign_add(x),
    "assign_sub": lambda v, x: v.assign_sub(x),
    "slice": lambda v, x: v[1:3].assign(x[1:3]),
    **{
        name: lambda v, x, name=name: getattr(v, name)(
            tf.IndexedSlices(x[1:3], tf.constant([1, 3]), tf.constant([4]))
        )
        for name in words(
            "scatter_add scatter_sub scatter_mul scatter_div scatter_max scatter_min",
            "scatter_update batch_scatter_update",
        )
    },
    **{
        name: lambda v, x, name=name: getattr(v, name)(tf.constant([[1], [3]]), x[1:3])
        for name in words(
            "scatter_nd_add scatter_nd_sub scatter_nd_update scatter_nd_max scatter_nd_min"
        )
    },
}


def attribute(name):
    return lambda v: getattr(v, name)


def call(name, *args, **kwargs):
    return lambda v: getattr(v, name)(*args, **kwargs)


SAME_IN_PLAIN = {
    **{
        name: attribute(name)
        for name in words(
            "aggregation synchronization constraint trainable device dtype graph initial_value",
            "initializer name op shape __array_priority__ create",
        )
    },
    **{
        name: call(name, TWO)
        for name in words(
            "load __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__",
            "__truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__",
            "__rpow__ __div__ __rdiv__ __lt__ __le__ __gt__ __ge__ __eq__ __ne__ __and__ __rand__",
            "__or__ __ror__ __xor__ __rxor__ __iadd__ __isub__ __imul__ __itruediv__ __irealdiv__",
            "__ipow__ __idiv__",
        )
    },
    **{
        name: call(name)
        for name in words(
            "value read_value read_value_no_copy numpy eval get_shape initialized_value",
            "is_initialized __neg__ __abs__ __invert__ __bool__ __nonzero__ __int__ __float__",
            "__complex__ __long__ __array__ __hash__",
        )
    },
    **{name: lambda v, write=write: write(v, tf.constant(TWO)) for name, write in WRITES.items()},
    "count_up_to": call("count_up_to", 3),
    "from_proto": lambda v: type(tf.Variable.from_proto),
    "gather_nd": call("gather_nd", [[1], [3]]),
    "sparse_read": call("sparse_read", [1, 3]),
    "set_shape": call("set_shape", [4]),
    "to_proto": lambda v: v.to_proto().SerializeToString(),
    "handle": lambda v: (v.handle.dtype, v.handle.shape),
    "experimental_ref": lambda v: v.experimental_ref().deref() is v,
    "ref": lambda v: v.ref().deref() is v,
    "SaveSliceInfo": attribute("SaveSliceInfo"),
    "__copy__": lambda v: copy.copy(v) is v,
    "__deepcopy__": lambda v: (copy.deepcopy(v), copy.deepcopy(v) is v),
    "__getitem__": lambda v: (v[1], v[1:3], v[1:3].assign([7.0, 7.0])),
    "__iter__": lambda v: list(v),
    "__matmul__": lambda v: tf.reshape(v, [2, 2]) @ tf.reshape(v, [2, 2]),
    "__rmatmul__": lambda v: TWO.reshape(1, 4) @ v,
    "__tf_tracing_type__": lambda v: None,  # test_a_function_takes_it_as_an_argument
    "__reduce__": lambda v: pickle.loads(pickle.dumps(v)) if tf.executing_eagerly() else None,
}
# What Python's object has, and what belongs to a class, not to its instances.
NOT_ASKED = {
    *dir(object),
    *("__abstractmethods__", "__dict__", "__weakref__", "__module__", "__composite_gradient__"),
    # Python adds these to a class when they are first read, or in newer versions only.
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    *("__static_attributes__", "__firstlineno__"),
} - {"__eq__", "__ne__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__", "__reduce__"}

INTERFACE = sorted({n for n in dir(plain()) if n.startswith("__") or n[0] != "_"} - NOT_ASKED)
INTERFACE += ["__lt__", "__le__", "__gt__", "__ge__"]


def comparable(thing):
    """Something that can be compared with ==, of tensors, variables and what else is returned."""
    if isinstance(thing, (list, tuple)):
        return [comparable(each) for each in thing]
    if isinstance(thing, tf.Variable):
        return "variable", comparable(tf.convert_to_tensor(thing))
    if isinstance(thing, tf.Operation):
        return thing.type
    if tf.is_tensor(thing):
        if not tf.executing_eagerly():
            return thing.dtype, thing.shape.as_list()
        return thing.dtype, np.asarray(thing).tolist()
    return thing.tolist() if isinstance(thing, np.ndarray) else thing


def outcome(question, variable):
    try:
        return comparable(question(variable))
    except Exception as error:
        return type(error)


def asked(question, make, mode):
    """What is answered, in a function while it is traced, and the variable's value afterwards."""
    if mode == "graph":
        with tf.Graph().as_default() as graph, tf.compat.v1.Session().as_default() as session:
            variable = make(name="v")
            session.run(tf.compat.v1.global_variables_initializer())
            answer = outcome(question, variable)
            return "its graph" if answer is graph else answer, session.run(variable).tolist()
    variable, answers = make(name="v"), []

    def function():
        answers.append(outcome(question, variable))
        return tf.convert_to_tensor(variable)

    function = tf.function(function, autograph=False) if mode == "function" else function
    value = function().numpy().tolist()
    return *answers, value


# In a function these are the wrapped variable's.
OF_A_GRAPH = ("op", "graph", "initializer")


@once
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for mode in ("eager", "function", "graph")
        for name in sorted(set(INTERFACE))
        if mode != "function" or name not in OF_A_GRAPH
    ],
)
def test_outside_of_the_scope_it_is_its_variable(name, mode):
    expected, found = (asked(SAME_IN_PLAIN[name], make, mode) for make in (plain, autocast))
    if mode == "graph" and name == "__hash__":
        expected, found = ((type(answer), value) for answer, value in (expected, found))
    assert found == expected


@once
@pytest.mark.parametrize("name", OF_A_GRAPH)
def test_in_a_function_these_are_the_wrapped_variables(name):
    v = autocast()
    answers = []

    @tf.function(autograph=False)
    def function():
        for variable in (v, v._variable):
            try:
                answers.append(getattr(variable, name))
            except Exception as error:
                answers.append((type(error), str(error)))

    function()
    assert answers[0] == answers[1]


# In the scope.

# XLA has no kernel for them, whichever variable they come from.
UNKNOWN_TO_XLA = {"gather_nd", "read_value_no_copy", "batch_scatter_update"} | {
    "scatter_nd_max",
    "scatter_nd_min",
}

READS = {
    "value": lambda v: v.value(),
    "read_value": lambda v: v.read_value(),
    "read_value_no_copy": lambda v: v.read_value_no_copy(),
    "sparse_read": lambda v: v.sparse_read([1, 3]),
    "gather_nd": lambda v: v.gather_nd([[1], [3]]),
    "convert": lambda v: tf.convert_to_tensor(v),
    "identity": lambda v: tf.identity(v),
    "gather": lambda v: tf.gather(v, [1, 3]),
    "slice": lambda v: v[1:3],
    "element": lambda v: v[0],
    "iterated": lambda v: tf.stack(list(v)) if tf.executing_eagerly() else v.value(),
    "sum": lambda v: tf.reduce_sum(v),
    "operators": lambda v: -((2 * v + 1) / v - v**2) + abs(v) % 3,
    "matmul": lambda v: tf.matmul(v[tf.newaxis], v[tf.newaxis], transpose_b=True),
    "concatenated": lambda v: tf.concat([v, v], 0),
    "stacked": lambda v: tf.stack([v, v]),
    "packed": lambda v: tf.convert_to_tensor([v[0], v[1]]),
    "chosen": lambda v: tf.where(v > 2, v, tf.zeros_like(v)),
    "embedded": lambda v: tf.nn.embedding_lookup(v, [1, 3]),
}


@once
@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
@pytest.mark.parametrize("dtype", [*HALF, tf.float32, tf.float64])
def test_every_read_casts_in_the_scope(dtype, mode):
    v = autocast()
    reads = sorted(READS.keys() - (UNKNOWN_TO_XLA if mode == "jit" else set()))

    def function():
        with keras_mp.autocast_scope(dtype):
            return [READS[read](v) for read in reads]

    # Among themselves, weights are float32, and what is computed from them is rounded once.
    exact = 1e-6 if mode == "jit" else 0
    bound = {tf.float16: 4e-3, tf.bfloat16: 3e-2}.get(dtype, exact)
    for read, got in zip(reads, placed(mode, function)(), strict=True):
        expected = READS[read](tf.Variable(tf.cast(v.numpy(), dtype)))
        assert got.dtype == dtype, read
        both = [tf.cast(each, tf.float64) for each in (got, expected)]
        np.testing.assert_allclose(*both, rtol=bound, atol=0, err_msg=read)


@once
@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("given", ["scope's", "true"])
def test_every_write_is_made_in_the_true_dtype(given, dtype, mode):
    exact = tf.constant([1.5, -2.0, 0.25, 8.0])
    writes = sorted(WRITES.keys() - (UNKNOWN_TO_XLA if mode == "jit" else set()))
    variables = {write: autocast((1 / 3, 2 / 3, 4 / 3, 8 / 3)) for write in writes}
    results = {}

    def function():
        with keras_mp.autocast_scope(dtype):
            value = exact if given == "true" else tf.cast(exact, dtype)
            for write, v in variables.items():
                results[write] = WRITES[write](v, value)

    placed(mode, function)()
    for write, v in variables.items():
        expected = plain((1 / 3, 2 / 3, 4 / 3, 8 / 3))
        WRITES[write](expected, exact)
        np.testing.assert_array_equal(v.numpy(), expected.numpy(), err_msg=write)
        if mode == "eager" and write != "batch_scatter_update":
            assert isinstance(results[write], keras_mp.AutoCastVariable), write
            with keras_mp.autocast_scope(dtype):
                assert tf.identity(results[write]).dtype == dtype, write
            assert tf.identity(results[write]).dtype == tf.float32, write


def test_outside_of_the_scope_it_refuses_what_a_plain_variable_refuses():
    for v in (plain(), autocast()):
        with pytest.raises(ValueError, match="float16"):
            v.assign(tf.ones(4, tf.float16))
        with pytest.raises(ValueError, match="float16"):
            tf.convert_to_tensor(v, dtype=tf.float16)


def test_where_float32_is_asked_for_nothing_is_rounded():
    third = tf.constant(1 / 3)
    kernel, average = autocast(third), autocast(0.0)
    with keras_mp.autocast_scope("float16"):
        assert tf.convert_to_tensor(kernel, dtype=tf.float32).numpy() == third.numpy()
        average.assign(kernel)
        wide = autocast(0.0, tf.float64)
        wide.assign(kernel)
    assert average.numpy() == third.numpy() == wide.numpy()


def test_true_dtype_and_values_shown_do_not_depend_on_the_scope():
    v = autocast(0.3, name="v")
    with keras_mp.autocast_scope("float16"):
        assert (v.dtype, v.true_dtype, v.numpy().dtype) == (tf.float16, tf.float32, np.float32)
        assert float(v) == v.numpy() == np.asarray(v)
        inside = repr(v)
    assert inside == f"<AutoCastVariable cast_to=float16 of {v._variable!r}>"
    assert "tf.Variable 'v:0' shape=() dtype=float32, numpy=0.3" in inside
    assert repr(v) == inside.replace("float16", "None")

    @tf.function
    def function():
        reprs.append(repr(v))

    reprs = []
    function()
    assert reprs == [
        "<AutoCastVariable cast_to=None of <tf.Variable 'v:0' shape=() dtype=float32>>"
    ]


@pytest.mark.parametrize(
    ("thing", "error"),
    [
        *((thing, TypeError) for thing in (tf.constant(1.0), 1.0, None, np.ones(3))),
        *((tf.Variable(value), ValueError) for value in (1, True, "text", 1j)),
    ],
    ids=str,
)
def test_what_is_no_variable_or_not_floating_is_refused(thing, error):
    with pytest.raises(error, match="Received"):
        keras_mp.autocast_variable(thing)
    with tf.Graph().as_default(), pytest.raises(TypeError, match="Received"):
        keras_mp.autocast_variable(tf.compat.v1.Variable(1.0, use_resource=False))


def test_a_keras_weight_is_refused_unless_it_is_a_tf_variable():
    layer = tf.keras.layers.Dense(1)
    layer.build([None, 1])
    if isinstance(layer.kernel, tf.Variable):
        assert keras_mp.autocast_variable(layer.kernel).true_dtype == tf.float32
    else:
        with pytest.raises(TypeError, match="weights of Keras layers do so by themselves"):
            keras_mp.autocast_variable(layer.kernel)


def test_wrapping_twice_wraps_once():
    v = autocast()
    assert keras_mp.autocast_variable(v) is v
    assert isinstance(v, tf.Variable)
    assert tf.is_tensor(v)
    assert not isinstance(v, type(plain()))
    assert type(v) is type(autocast())


# The scope.


def test_scopes_nest_and_end_with_an_exception():
    v = autocast()
    assert keras_mp.autocast_dtype() is None
    with keras_mp.autocast_scope("float16"):
        with contextlib.suppress(RuntimeError), keras_mp.autocast_scope("bfloat16"):
            assert v.dtype == tf.bfloat16
            raise RuntimeError
        assert v.dtype == keras_mp.autocast_dtype() == tf.float16
        with keras_mp.autocast_scope(None):
            assert v.dtype == tf.float32
            assert keras_mp.autocast_dtype() is None
        assert v.dtype == tf.float16
    assert v.dtype == tf.float32


def test_the_scope_belongs_to_its_thread():
    v = autocast()
    seen = []
    with keras_mp.autocast_scope("float16"):
        kept = keras_mp.in_current_scope(lambda: seen.append(v.dtype))
        for target in (lambda: seen.append(v.dtype), kept):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    kept()
    assert seen == [tf.float32, tf.float16, tf.float16]


@pytest.mark.parametrize("dtype", ["int32", tf.bool, "string", "complex64"])
def test_only_floating_dtypes_make_a_scope(dtype):
    with pytest.raises(ValueError, match="Received: dtype="):
        keras_mp.autocast_scope(dtype)


def test_the_scope_is_shared_with_keras():
    layer = tf.keras.layers.Dense(2, dtype="mixed_float16", use_bias=False)
    layer.build([None, 4])
    with keras_mp.autocast_scope("bfloat16"):
        assert tf.convert_to_tensor(layer.kernel).dtype == tf.bfloat16
    v = autocast()
    assert Mixes(lambda x: x * v, dtype="mixed_float16")(tf.ones(4)).dtype == tf.float16
    assert v.dtype == tf.float32


@once
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_function_traced_in_the_scope(dtype):
    v = autocast()
    captured = tf.function(lambda: v * 2)
    argument = tf.function(lambda v: v * 2)
    with keras_mp.autocast_scope(dtype):
        assert captured().dtype == argument(v).dtype == dtype
    assert argument(v).dtype == tf.float32
    # What autocast_scope's docs say.
    assert captured().dtype == ("float32" if dtype == "float16" else dtype)


def test_a_function_takes_it_as_an_argument():
    traces = []

    @tf.function
    def function(v, nested):
        traces.append(None)
        v.assign_add(nested["w"][0])
        return v * nested["w"][0]

    v, w = autocast(2.0), autocast(3.0)
    for _ in range(3):
        function(v, {"w": [w]})
    assert v.numpy() == 11
    assert len(traces) == 1
    assert function(w, {"w": [v]}) == 14 * 11
    assert function(v, {"w": [plain(1.0)]}) == 12
    with keras_mp.autocast_scope("float16"):
        assert function(v, {"w": [w]}).dtype == tf.float16
        function(v, {"w": [w]})
    assert len(traces) == 4


@once
def test_functions_do_not_keep_their_arguments_alive():
    function = tf.function(lambda v: v * 2)
    v = autocast(1.0)
    inner = weakref.ref(v._variable)
    function(v)
    del v, function
    gc.collect()
    assert inner() is None


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_recompute_grad_counts_a_gradient_once_and_reads_in_the_same_dtype(policy, mode):
    seen = []

    class Scale(tf.keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(name="w", shape=(3,), initializer="ones")
            self.v = self.add_weight(name="v", shape=(3,), initializer="ones")
            self.built = True

        def call(self, x):
            return x * keras_mp.recompute_grad(self.computed)(self.w)

        def computed(self, w):
            seen.append(tf.convert_to_tensor(self.v).dtype.name)
            return w * 2.0 * self.v

    with keras_mp.policy_scope(policy):
        layer = Scale()
    layer.build([1, 3])

    def gradients():
        return differentiated(lambda: layer(tf.ones([1, 3])), layer.trainable_variables)[1]

    np.testing.assert_array_equal(placed(mode, gradients)(), np.full([2, 3], 2.0))
    assert set(seen) == {layer.compute_dtype}
    assert len(seen) > 1


# Gradients.


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("dtype", HALF)
def test_gradients_have_the_true_dtype(dtype, mode):
    v, table, unused = autocast(), autocast(np.ones([5, 2])), autocast()

    def gradients():
        with tf.GradientTape(persistent=True) as tape, keras_mp.autocast_scope(dtype):
            y = tf.reduce_sum(v * v) + tf.reduce_sum(tf.gather(table, [1, 1, 3]))
        with tf.GradientTape(watch_accessed_variables=False) as watching:
            watching.watch(v)
            with keras_mp.autocast_scope(dtype):
                z = tf.reduce_sum(v * v)
        return (
            tape.gradient(y, v),
            tape.gradient(y, table),
            watching.gradient(z, v),
            tape.jacobian(y, v),
            tape.gradient(y, unused, unconnected_gradients="zero"),
        )

    dv, d_table, watched, jacobian, zero = placed(mode, gradients)()
    assert dv.dtype == d_table.dtype == watched.dtype == zero.dtype == tf.float32
    assert isinstance(d_table, tf.IndexedSlices)
    np.testing.assert_array_equal(dv, [2.0, 4.0, 6.0, 8.0])
    np.testing.assert_array_equal(watched, dv)
    np.testing.assert_array_equal(jacobian, dv)
    np.testing.assert_array_equal(tf.convert_to_tensor(d_table)[:, 0], [0, 2, 0, 1, 0])


def test_forward_mode():
    v = autocast()
    tangents = tf.constant([1.0, 0.0, 0.5, 0.0])

    def forward(read):
        scope = keras_mp.autocast_scope("float16")
        with tf.autodiff.ForwardAccumulator(v, tangents) as accumulator, scope:
            return accumulator.jvp(read() * read())

    for jvp in (forward(lambda: v), tf.function(lambda: forward(lambda: v))()):
        assert jvp.dtype == tf.float16
        np.testing.assert_array_equal(jvp, [2.0, 0.0, 3.0, 0.0])


# Under tf.distribute.


DISTRIBUTED = {
    "mirrored": {},
    "on read": {"synchronization": tf.VariableSynchronization.ON_READ, "trainable": False},
}


def make_distributed(kind):
    mean = tf.VariableAggregation.MEAN
    return tf.Variable([1.0, 2.0], aggregation=mean, **DISTRIBUTED[kind])


@pytest.mark.parametrize("kind", ["mirrored", "on read"])
def test_a_distributed_variable_keeps_its_class(kind):
    strategy = mirrored(2)
    with strategy.scope():
        inner = make_distributed(kind)
    v = keras_mp.autocast_variable(inner)
    assert isinstance(v, type(inner))
    assert isinstance(v, tf.distribute.DistributedValues)
    assert type(v) is type(keras_mp.autocast_variable(inner))
    assert repr(v) == f"<AutoCastVariable cast_to=None of {inner!r}>"

    def step():
        with keras_mp.autocast_scope("float16"):
            read = v * 2
            assert v[0].dtype == tf.reduce_sum(v).dtype == v.dtype == tf.float16
            v.assign_add(tf.cast([1.0, 1.0], tf.float16))
            return read

    reads = strategy.experimental_local_results(strategy.run(tf.function(step)))
    assert [(r.dtype, r.numpy().tolist()) for r in reads] == [(tf.float16, [2, 4])] * 2
    components = strategy.experimental_local_results(v)
    assert len(components) == 2
    for component in components:
        assert component.dtype == tf.float32
        np.testing.assert_array_equal(component, [2.0, 3.0])
    np.testing.assert_array_equal(v.numpy(), [2.0, 3.0])
    with keras_mp.autocast_scope("float16"):
        assert tf.identity(v).dtype == (v + 1).dtype == tf.float16
    if kind == "mirrored":
        strategy.extended.update(v, lambda each, x: each.assign_sub(x), args=([1.0, 1.0],))
        np.testing.assert_array_equal(v.numpy(), [1.0, 2.0])
        total = strategy.reduce(tf.distribute.ReduceOp.MEAN, v, axis=None)
        np.testing.assert_array_equal(total, [1.0, 2.0])


@pytest.mark.parametrize("traced", [False, True])
def test_a_variable_that_is_summed_when_it_is_read_is_read_in_replicas(traced):
    # As a metric's result is.
    strategy = mirrored(2)
    with strategy.scope():
        v = keras_mp.autocast_variable(make_distributed("on read"))

    def step():
        context = tf.distribute.get_replica_context()
        v.assign([1.0, 2.0 + tf.cast(context.replica_id_in_sync_group, tf.float32)])
        with tf.__internal__.distribute.variable_sync_on_read_context():
            plain = tf.identity(v)
            with keras_mp.autocast_scope("float16"):
                cast = tf.identity(v)
        return plain, cast, tf.identity(v)

    plain, cast, own = strategy.run(tf.function(step) if traced else step)
    for each in strategy.experimental_local_results(plain):
        np.testing.assert_array_equal(each, [1.0, 2.5])
    for each in strategy.experimental_local_results(cast):
        assert each.dtype == tf.float16
        np.testing.assert_array_equal(each, [1.0, 2.5])
    own = [each.numpy()[1] for each in strategy.experimental_local_results(own)]
    assert own == [2.0, 3.0]


@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_control_dependencies_wait_for_an_update_of_all_replicas(aggregation):
    with mirrored(2).scope():
        v = keras_mp.autocast_variable(
            tf.Variable(0.0, aggregation=getattr(tf.VariableAggregation, aggregation))
        )

        @tf.function
        def update():
            with tf.control_dependencies([v.assign_add(1.0)]):
                v.assign_add(1.0)
                with tf.control_dependencies([v]):
                    return tf.identity(v)

        assert (float(update()), float(v.numpy())) == (2, 2)


@pytest.mark.parametrize("kind", ["mirrored", "on read"])
def test_assignments_chain_under_replicas(kind):
    strategy = mirrored(2)
    with strategy.scope():
        v = keras_mp.autocast_variable(make_distributed(kind))
        if kind == "mirrored":  # the other one sums what is assigned here
            assert v.assign([1.0, 1.0]).assign_add([3.0, 3.0]) is v
            np.testing.assert_array_equal(v.numpy(), [4.0, 4.0])
            assert not isinstance(v.assign_sub([0.0, 0.0], read_value=False), tf.Variable)
    seen = []

    def step():
        result = v.assign([1.0, 1.0]).assign_add([3.0, 3.0])
        seen.append((result, v.assign([4.0, 4.0], False, None, False)))
        with keras_mp.autocast_scope("float16"):
            return tf.identity(result)

    for function in (step, tf.function(step)):
        for each in strategy.experimental_local_results(strategy.run(function)):
            assert each.dtype == tf.float16
            np.testing.assert_array_equal(each, [4.0, 4.0])
    assert all(read is v for read, _ in seen)
    assert not any(isinstance(not_read, tf.Variable) for _, not_read in seen)


def test_a_function_tells_two_mirrored_variables_apart():
    with mirrored(2).scope():
        one, other = (keras_mp.autocast_variable(tf.Variable(x)) for x in (1.0, 10.0))
    function = tf.function(lambda v: v * 2)
    assert (float(function(one)), float(function(other))) == (2, 20)


def test_classes_of_parameter_servers_and_caches():
    from tensorflow.python.distribute import ps_values

    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        aggregating = tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.MEAN)
    assert isinstance(aggregating, ps_values.AggregatingVariable)
    for inner in (aggregating, ps_values.CachingVariable(plain())):
        v = keras_mp.autocast_variable(inner)
        assert isinstance(v, type(inner))
        with keras_mp.autocast_scope("float16"):
            assert tf.identity(v).dtype == (v + 1).dtype == v[0].dtype == tf.float16
            v.assign_add(tf.ones_like(v))
        assert tf.identity(v).dtype == tf.float32
        np.testing.assert_array_equal(v.read_value()[:2], [2.0, 3.0])
    assert not isinstance(autocast(), tf.distribute.DistributedValues)


# Saving.


def test_checkpoints_are_those_of_plain_variables_which_may_also_come_later(tmp_path):
    saved = {"plain": plain((1 / 3, 2 / 3)), "autocast": autocast((1 / 3, 2 / 3))}
    keys = []
    for kind, variable in saved.items():
        path = tf.train.Checkpoint(v=variable, many=[variable]).save(str(tmp_path / kind))
        keys.append(tf.train.list_variables(path))
        for other in (plain((0.0, 0.0)), autocast((0.0, 0.0))):
            tf.train.Checkpoint(v=other).restore(path).assert_existing_objects_matched()
            np.testing.assert_array_equal(other.numpy(), variable.numpy())
        later = tf.train.Checkpoint()
        later.restore(path).expect_partial()
        later.v = autocast((0.0, 0.0))
        np.testing.assert_array_equal(later.v.numpy(), np.float32([1 / 3, 2 / 3]))
    assert keys[0] == keys[1]


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path):
    variable = autocast()
    options = tf.train.CheckpointOptions(enable_async=True)
    checkpoint = tf.train.Checkpoint(v=variable, many=[variable])
    path = checkpoint.save(str(tmp_path / "c"), options)
    variable.assign_add(tf.ones([4]))
    checkpoint.sync()
    variable.assign(tf.zeros([4]))
    checkpoint.read(path).assert_consumed()
    assert variable.numpy().tolist() == [1, 2, 3, 4]


class Dense(tf.Module):
    def __init__(self, wrap):
        self.kernel = wrap(tf.Variable([[1.0, 2.0], [3.0, 4.0]], name="kernel"))

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float16)])
    def __call__(self, x):
        with keras_mp.autocast_scope("float16"):
            return x @ tf.cast(self.kernel, tf.float16)


def test_saved_models_hold_plain_variables(tmp_path):
    modules = [Dense(lambda v: v), Dense(keras_mp.autocast_variable)]
    assert [v.name for v in modules[0].variables] == [v.name for v in modules[1].variables]
    with mirrored(2).scope():
        modules.append(Dense(keras_mp.autocast_variable))
    x = tf.constant([[1.0, -1.0]], tf.float16)
    for i, module in enumerate(modules):
        tf.saved_model.save(module, str(tmp_path / str(i)))
        loaded = tf.saved_model.load(str(tmp_path / str(i)))
        np.testing.assert_array_equal(loaded(x), [[-2.0, -2.0]])
        np.testing.assert_array_equal(loaded.kernel.numpy(), module.kernel.numpy())
        assert loaded.kernel.dtype == tf.float32
        loaded.kernel.assign(tf.zeros([2, 2]))
        np.testing.assert_array_equal(loaded(x), [[0.0, 0.0]])
    files = [
        tf.train.list_variables(str(tmp_path / str(i) / "variables/variables")) for i in (0, 1)
    ]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("duplicate", "is_mirrored"),
    [
        (copy.deepcopy, False),
        (copy.deepcopy, True),
        (lambda v: pickle.loads(pickle.dumps(v)), False),
    ],
)
def test_copies_cast_too_and_are_independent(duplicate, is_mirrored):
    with mirrored(2).scope() if is_mirrored else contextlib.nullcontext():
        v = autocast(name="v")
        other = duplicate(v)
    other.assign_add(tf.ones(4))
    np.testing.assert_array_equal(v.numpy(), [1, 2, 3, 4])
    np.testing.assert_array_equal(other.numpy(), [2, 3, 4, 5])
    with keras_mp.autocast_scope("float16"):
        assert tf.identity(other).dtype == tf.float16
    assert isinstance(other, type(v))
    assert copy.copy(v) is v


# Optimizers.


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_optimizers_train_it_as_a_plain_variable(name, wrapped):
    final = []
    for make in (plain, autocast):
        v, optimizer, way = make(), make_optimizer(name), steps.unscaled
        if wrapped:
            optimizer, way = keras_mp.LossScaleOptimizer(optimizer), steps.rfc

        def loss():
            with keras_mp.autocast_scope("float16"):
                return tf.reduce_sum(tf.cast(v, tf.float16) ** 2)

        step = way(optimizer, loss, [v])
        for _ in range(3):
            step()
        final.append([v.numpy(), *state(optimizer)])
    assert_all_equal(*final)
