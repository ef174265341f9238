import collections
import copy
import functools
import gc
import os
import types

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import keras_api, layers
from keras_mp.variables import type_errors
from tests.common import IS_KERAS_3, digits, mirrored, pairs

POLICIES = ["float32", "float64", "mixed_float16", "mixed_bfloat16"]
MODES = ["eager", "function", "jit"]


def run(layer, mode, *args, **kwargs):
    """Calls a layer in eager, in a function, or in one that XLA compiles."""
    if mode == "eager":
        return layer(*args, **kwargs)
    layer(*args, **kwargs)
    return tf.function(layer, jit_compile=mode == "jit")(*args, **kwargs)


# Layers of the RFC and of the documentation of Policy.


class SimpleDense(layers.Layer):
    def build(self, _):
        self.kernel = self.add_weight("kernel", (10, 10))

    def call(self, inputs):
        return tf.linalg.matmul(inputs, self.kernel)


class AddRandom(layers.Layer):
    def call(self, inputs):
        rand = tf.random.normal(shape=tf.shape(inputs), dtype=self.compute_dtype)
        return inputs + rand


class TwoArguments(layers.Layer):
    def call(self, a, b):
        return a + 1.0, b + 1.0


def input_bias(shape, dtype):
    return tf.random.normal(shape, dtype=dtype)


class MatMulWithInputBias(layers.Layer):
    def call(self, x):
        x += input_bias(x.shape, self.compute_dtype)
        return tf.linalg.matmul(x, x)


class DenseWrapper(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = tf.keras.layers.Dense(10, dtype=self.dtype_policy)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return self.dense(inputs)


@pytest.mark.parametrize(
    ("make", "policy", "mode"),
    pairs(
        [SimpleDense, AddRandom, TwoArguments, MatMulWithInputBias, DenseWrapper], POLICIES, MODES
    ),
)
def test_the_layers_of_the_rfc(make, policy, mode):
    layer = make(dtype=policy)
    x = tf.ones([10, 10])
    outputs = run(layer, mode, *([x, x] if make is TwoArguments else [x]))
    policy = tf.keras.mixed_precision.Policy(policy)
    for output in tf.nest.flatten(outputs):
        assert output.dtype == policy.compute_dtype
    for weight in layer.weights:
        assert weight.dtype == policy.variable_dtype
    assert layer.compute_dtype == policy.compute_dtype
    assert layer.variable_dtype == layer.dtype == policy.variable_dtype
    assert layer.dtype_policy.name == policy.name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_computes_what_casts_by_hand_compute(policy, mode):
    layer = SimpleDense(dtype=policy)
    x = tf.random.stateless_normal([4, 10], [1, 2])
    got = run(layer, mode, x)
    dtype = layer.compute_dtype
    expected = tf.function(tf.matmul, jit_compile=mode == "jit")(
        tf.cast(x, dtype), tf.cast(tf.convert_to_tensor(layer.kernel), dtype)
    )
    # XLA may leave out a cast to a narrow type and back, here that of the sum before it is rounded.
    bound = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 0) if mode == "jit" else 0
    np.testing.assert_allclose(
        tf.cast(got, tf.float64), tf.cast(expected, tf.float64), rtol=0, atol=bound
    )


# Weights.


class Weights(layers.Layer):
    def build(self, _):
        self.cast = self.add_weight(shape=[2], initializer="ones", name="cast")
        self.kept = self.add_weight(shape=[2], initializer="ones", name="kept", autocast=False)
        self.older = self.add_weight("older", [2], experimental_autocast=False)
        self.count = self.add_weight(shape=[], dtype="int32", initializer="zeros", trainable=False)

    def call(self, x):
        weights = (self.cast, self.kept, self.older, self.count)
        self.seen = [tf.convert_to_tensor(w).dtype for w in weights]
        self.dtypes = [tf.as_dtype(w.dtype) for w in weights]
        self.true_dtype = tf.as_dtype(getattr(self.cast, "true_dtype", self.dtype))
        return x * self.cast


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_are_cast_unless_told_not_to(policy):
    layer = Weights(dtype=policy)
    layer(tf.ones([3, 2]))  # a warning of a bare variable would be an error
    compute, variable = tf.as_dtype(layer.compute_dtype), tf.as_dtype(layer.dtype)
    assert layer.seen == [compute, variable, variable, tf.int32]
    assert layer.dtypes == layer.seen
    assert [tf.convert_to_tensor(w).dtype for w in (layer.cast, layer.kept)] == [variable] * 2
    assert layer.true_dtype == variable
    assert [len(layer.weights), len(layer.trainable_weights)] == [4, 3]


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_assigned_in_the_variable_dtype(mode):
    third = np.float32(1 / 3)

    class Assigns(layers.Layer):
        def build(self, _):
            make = functools.partial(self.add_weight, shape=[], initializer="ones")
            self.set, self.more, self.less, self.from_half = (make(name=n) for n in "abcd")

        def call(self, x):
            self.set.assign(tf.constant(third))
            self.more.assign_add(tf.constant(third))
            self.less.assign_sub(tf.constant(third))
            self.from_half.assign_add(tf.constant(third, tf.float16))
            return x + self.set

    layer = Assigns(dtype="mixed_float16")
    layer.build([None])
    layer.built = True
    call = layer if mode == "eager" else tf.function(layer, jit_compile=mode == "jit")
    assert call(tf.zeros([1])).numpy() == np.float16(third)
    expected = [third, 1 + third, 1 - third, 1 + np.float32(np.float16(third))]
    np.testing.assert_array_equal(layer.get_weights(), np.float32(expected))


@pytest.mark.parametrize(
    "given",
    [
        (("w", (2, 3), "float64", "ones"), {}),
        (((2, 3), "ones", "float64"), {}),
        (("w",), {"shape": (2, 3), "dtype": tf.float64, "initializer": "ones"}),
        (((2, 3),), {"dtype": "float64", "initializer": "ones", "name": "w"}),
        ((None, (2, 3)), {"dtype": "float64", "initializer": "ones"}),
        (("w", (2, 3), "float64"), {"initializer": tf.keras.initializers.Ones()}),
    ],
)
def test_add_weight_takes_both_orders(given):
    args, kwargs = given
    weight = layers.Layer(dtype="mixed_float16").add_weight(*args, **kwargs)
    assert (tuple(weight.shape), weight.dtype) == ((2, 3), "float64")
    np.testing.assert_array_equal(weight.numpy(), np.ones([2, 3]))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("w",), {"name": "w"}),
        (((2,),), {"shape": (2,)}),
        (((2,), "ones", "float32", 4), {}),
        ((), {"shape": (2,), "autocast": True, "experimental_autocast": False}),
    ],
)
def test_add_weight_refuses_contradictions(args, kwargs):
    with pytest.raises(TypeError, match="Received"):
        layers.Layer().add_weight(*args, **kwargs)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_regularizers_see_the_variable_dtype(policy):
    seen = []

    class Penalty(tf.keras.regularizers.Regularizer):
        def __call__(self, weight):
            seen.append(tf.convert_to_tensor(weight).dtype)
            return tf.reduce_sum(tf.convert_to_tensor(weight)) * 1000

    class Regularized(layers.Layer):
        def build(self, _):
            self.w = self.add_weight(shape=[100], initializer="ones", regularizer=Penalty())

        def call(self, x):
            (self.inside,) = self.losses
            return x * tf.reduce_sum(self.w)

    layer = Regularized(dtype=policy)
    layer(tf.ones([2]))
    (outside,) = layer.losses
    assert set(seen) == {tf.float32}
    assert (float(layer.inside), float(outside)) == (100_000, 100_000)


def test_casts_of_one_weight_are_shared_in_a_graph():
    class Reads(layers.Layer):
        def build(self, _):
            self.w = self.add_weight(shape=[2], initializer="ones")

        def call(self, x):
            for _ in range(50):
                x = x * self.w
            return x

    layer = Reads(dtype="mixed_float16")
    x = tf.ones([2], tf.float16)
    layer(x)
    graph = tf.function(layer).get_concrete_function(x).graph
    assert [op.type for op in graph.get_operations()].count("Cast") == 1


class Recurrent(layers.Layer):
    def build(self, _):
        self.kernel = self.add_weight(shape=[2, 2], initializer="identity")

    def call(self, x, once):
        def body(i, h):
            return i + 1, tf.tanh(h @ self.kernel)

        def loop():
            return tf.while_loop(lambda i, h: i < 4, body, (0, x), maximum_iterations=4)[1]

        if not once:
            return loop()
        with self.weights_cast_once():
            return loop()


@pytest.mark.parametrize("in_function", [False, True])
def test_weights_cast_once_reaches_into_loops(in_function):
    layer = Recurrent(dtype="mixed_float16")
    x = tf.constant([[0.5, -0.5]], tf.float16)
    layer(x, once=True)
    call = functools.partial(layer, x)
    if in_function:
        bodies = []
        for once in (False, True):
            function = tf.function(functools.partial(layer, once=once), autograph=False)
            library = function.get_concrete_function(x).graph.as_graph_def().library.function
            (body,) = [f for f in library if "while_body" in f.signature.name]
            bodies.append([node.op for node in body.node_def].count("Cast"))
        assert bodies == [1, 0]
        call = tf.function(call, autograph=False)
    np.testing.assert_array_equal(call(once=True), call(once=False))


@pytest.mark.parametrize("write", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("in_function", [False, True])
def test_assignments_while_weights_are_cast_once_are_refused(write, in_function):
    class Writes(layers.Layer):
        def build(self, _):
            self.w = self.add_weight(shape=[2], initializer="ones")

        def call(self, x):
            with self.weights_cast_once():
                getattr(self.w, write)(tf.ones([2]))
            return x

    layer = Writes(dtype="mixed_float16")
    with pytest.raises(RuntimeError, match="inside of `keras_mp.cast_once`"):
        (tf.function(layer) if in_function else layer)(tf.ones([2]))


# Arguments.


class Dtypes(layers.Layer):
    """Returns what dtype each tensor among its arguments has."""

    def call(self, x, y=None, *, z=None, **others):
        # Not as an attribute that Keras would track.
        object.__setattr__(self, "given", (x, y, z, others))
        return tf.cast(tf.nest.flatten(x)[0], self.compute_dtype)


def dtypes_of(structure):
    return tf.nest.map_structure(lambda t: t.dtype.name, structure)


def test_all_floating_arguments_are_cast_and_nothing_else():
    layer = Dtypes(dtype="mixed_float16")
    floats = [tf.ones([2], dtype) for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64)]
    layer(
        floats,
        {"a": tf.ones([2]), "b": (tf.constant([1]), [tf.constant([True])])},
        z=tf.ones([2], tf.float64),
        w=tf.constant(["text"]),
        c=tf.constant([1j]),
    )
    x, y, z, others = layer.given
    assert dtypes_of(list(x)) == ["float16"] * 4
    assert dtypes_of(y) == {"a": "float16", "b": ("int32", ["bool"])}
    assert z.dtype == tf.float16
    assert (others["w"].dtype, others["c"].dtype) == (tf.string, tf.complex128)


def test_ragged_and_sparse_arguments_are_cast():
    layer = Dtypes(dtype="mixed_bfloat16")
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    sparse = tf.sparse.from_dense([[0.0, 1.0]])
    layer(tf.ones([2]), ragged, z=[sparse])
    _, y, z, _ = layer.given
    assert isinstance(y, tf.RaggedTensor)
    assert isinstance(z[0], tf.SparseTensor)
    assert y.dtype == z[0].dtype == tf.bfloat16
    assert ragged.dtype == sparse.dtype == tf.float32


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "bool"])
def test_arrays_are_converted_and_cast(dtype):
    layer = Dtypes(dtype="mixed_float16")
    layer(np.ones([2], dtype), np.ones([2], dtype), z={"k": np.ones([2], dtype)})
    expected = "float16" if dtype.startswith("float") else dtype
    x, y, z, _ = layer.given
    assert x.dtype.name == y.dtype.name == z["k"].dtype.name == expected


def test_what_is_no_tensor_is_passed_on():
    layer = Dtypes(dtype="mixed_float16")
    thing = object()
    layer(tf.ones([2]), z=[thing, None, "text", 3, 0.5])
    assert layer.given[2] == [thing, None, "text", 3, 0.5]
    assert isinstance(layer.given[2][4], float)
    layer(tf.ones([2]), z=range(2))
    assert layer.given[2] == range(2)


def test_containers_keep_their_type():
    Pair = collections.namedtuple("Pair", ["left", "right"])
    given = {
        "pair": Pair(tf.ones([2]), tf.constant(1)),
        "default": collections.defaultdict(list, a=tf.ones([2])),
        "ordered": collections.OrderedDict(b=tf.ones([2]), a=tf.constant(1)),
        "tuple": (tf.ones([2]), [tf.ones([2])]),
    }
    layer = Dtypes(dtype="mixed_float16")
    layer(tf.ones([2]), **given)
    others = layer.given[3]
    for name, value in given.items():
        assert type(others[name]) is type(value)
        assert others[name] is not value
    assert others["pair"].left.dtype == others["default"]["a"].dtype == tf.float16
    assert others["default"]["missing"] == []
    assert list(others["ordered"]) == ["b", "a"]
    assert dtypes_of(others["tuple"]) == ("float16", ["float16"])


def test_variables_are_cast_and_those_that_cast_themselves_are_passed_on():
    layer = Dtypes(dtype="mixed_float16")
    bare, own = tf.Variable([1.0]), keras_mp.autocast_variable(tf.Variable([1.0]))
    layer(bare, z=own)
    assert layer.given[0].dtype == tf.float16
    assert layer.given[2] is own
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(layer(bare))
    assert tape.gradient(y, bare).dtype == tf.float32


class Boxes(list):
    """A list with an attribute."""

    unit = "cm"


class Stubborn(collections.OrderedDict):
    """A dict that refuses to be changed as a whole, as some libraries have it."""

    def update(self, *args, **kwargs):
        raise TypeError("no update")


class Returned(dict):
    """A dict that calls itself its copy."""

    def __copy__(self):
        return self


class Configuration(collections.abc.Mapping):
    """A mapping that cannot be made of its items."""

    def __init__(self, path, **values):
        self.path, self.values_by_key = path, values

    def __getitem__(self, key):
        return self.values_by_key[key]

    def __iter__(self):
        return iter(self.values_by_key)

    def __len__(self):
        return len(self.values_by_key)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_containers_in_which_nothing_is_cast_are_passed_on(policy):
    layer = Dtypes(dtype=policy)
    for given in (
        Boxes([1]),
        types.MappingProxyType({"n": 1}),
        os.environ,
        Configuration("path", n=1),
        os.stat_result(range(10)),
    ):
        layer(tf.ones([2]), z=given)
        assert layer.given[2] is given


def test_containers_of_other_classes_are_copied_if_something_is_cast():
    layer = Dtypes(dtype="mixed_float16")
    for make in (Boxes, lambda each: Stubborn(a=each[0]), lambda each: Returned(a=each[0])):
        given = make([tf.ones([2])])
        layer(tf.ones([2]), z=given)
        got = layer.given[2]
        assert isinstance(got, type(given)) or isinstance(given, Returned)
        key = 0 if isinstance(given, list) else "a"
        assert (got[key].dtype, given[key].dtype) == (tf.float16, tf.float32)
    assert Boxes.unit == "cm"


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 copies such containers, and fails, itself.")
def test_a_container_that_cannot_be_copied_says_what_to_do():
    layer = Dtypes(dtype="mixed_float16")
    with pytest.raises(TypeError, match="Name the argument in the `keep_dtype`"):
        layer(tf.ones([2]), z=types.MappingProxyType({"a": tf.ones([2])}))


def test_indexed_slices_are_cast():
    layer = Dtypes(dtype="mixed_float16")
    layer(tf.ones([2]), z=tf.IndexedSlices(tf.ones([1]), tf.constant([0]), tf.constant([2])))
    assert layer.given[2].dtype == tf.float16


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2's weights are tf.Variables.")
@pytest.mark.parametrize("autocast", [False, True])
def test_a_keras_variable_as_an_argument_is_cast(autocast):
    layer = Dtypes(dtype="mixed_float16")
    layer(tf.ones([2]), tf.keras.Variable([1.0], autocast=autocast), z=tf.keras.Variable(1))
    assert layer.given[1].dtype == tf.float16 or (
        not autocast and layer.given[1].dtype == "float16"
    )
    assert layer.given[2].dtype == "int32"


def test_the_callers_structures_stay_as_they_are():
    layer = Dtypes(dtype="mixed_float16")
    x, y, z = tf.ones([2]), [tf.ones([2])], {"k": [tf.ones([2])]}
    layer(x, y, z=z)
    assert dtypes_of((x, y, z)) == ("float32", ["float32"], {"k": ["float32"]})
    layer.given[1].append(1)
    layer.given[2]["new"] = 1
    assert (len(y), list(z)) == (1, ["k"])


class Fills(layers.Layer):
    keep_dtype = ("outputs",)

    def call(self, x, outputs):
        outputs["seen"] = x
        return x


def test_arguments_that_keep_their_dtype_are_the_callers_own():
    layer = Fills(dtype="mixed_float16")
    outputs = {"before": tf.ones([2])}
    layer(tf.ones([2]), outputs=outputs)
    assert dtypes_of(outputs) == {"before": "float32", "seen": "float16"}


@pytest.mark.parametrize("mode", MODES)
def test_keep_dtype(mode):
    class Keeps(layers.Layer):
        keep_dtype = ("targets", "weights")

        def call(self, x, targets, **others):
            return x, targets, others["weights"], others["more"]

    wide = tf.ones([2], tf.float64)
    layer = Keeps(dtype="mixed_float16")
    for args, kwargs in (((wide, wide), {}), ((wide,), {"targets": wide})):
        outputs = run(layer, mode, *args, **kwargs, weights=wide, more=wide)
        assert dtypes_of(outputs) == ("float16", "float64", "float64", "float16")


def test_keep_dtype_behind_a_call_that_forwards_its_arguments():
    class Keeps(layers.Layer):
        keep_dtype = ("t",)

        def call(self, x, t=None, training=None):
            return x, t

    class Forwards(Keeps):
        def call(self, *args, **kwargs):
            return super().call(*args, **kwargs)

    x = tf.ones([2])
    for make in (Keeps, Forwards):
        layer = make(dtype="mixed_float16")
        assert dtypes_of(layer(x, x)) == dtypes_of(layer(x, t=x)) == ("float16", "float32")


@pytest.mark.parametrize("keep_dtype", [["nothing"], "x", ["inputs", "nothing"], ["self"], None, 3])
def test_keep_dtype_must_name_arguments(keep_dtype):
    with pytest.raises(ValueError, match=r"Expected some of \['inputs'\]. Received: Wrong.keep_"):
        type("Wrong", (SimpleDense,), {"keep_dtype": keep_dtype})


def test_autocast_false_casts_no_argument():
    layer = Dtypes(dtype="mixed_float16", autocast=False)
    layer(tf.ones([2], tf.float64), tf.ones([2]), z=tf.ones([2]))
    assert [t.dtype for t in layer.given[:3]] == [tf.float64, tf.float32, tf.float32]
    assert layer.autocast is False
    assert Dtypes().autocast is True


def test_a_list_of_inputs_of_a_functional_model():
    class Adds(layers.Layer):
        def call(self, x, others):
            return x + tf.math.add_n(others)

    first = tf.keras.Input([3])
    others = [tf.keras.Input([3]), tf.keras.Input([3])]
    before = list(others)
    output = Adds(dtype="mixed_float16")(first, others)
    assert all(a is b for a, b in zip(others, before, strict=True))
    model = tf.keras.Model([first, *others], output)
    result = model([tf.ones([2, 3])] * 3)
    assert result.dtype == tf.float16
    np.testing.assert_array_equal(result, 3 * np.ones([2, 3]))
    assert model.outputs[0].dtype == "float16"


def test_masks_survive_the_cast():
    class Wraps(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.supports_masking = True
            self.pool = tf.keras.layers.GlobalAveragePooling1D(dtype=self.dtype_policy)

        def call(self, x):
            return self.pool(x)

    x = tf.constant([[[1.0], [2.0], [0.0], [0.0]]])
    model = tf.keras.Sequential(
        [tf.keras.layers.Masking(dtype="float32"), Wraps(dtype="mixed_float16")]
    )
    np.testing.assert_array_equal(model(x), [[1.5]])


@pytest.mark.parametrize("symbolic", [False, True])
def test_input_specs_are_checked_before_the_cast(symbolic):
    class Specified(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.input_spec = tf.keras.layers.InputSpec(dtype="float32", ndim=2)

        def call(self, x):
            return x

    good = tf.keras.Input([2]) if symbolic else tf.ones([3, 2])
    assert Specified(dtype="mixed_float16")(good).dtype == "float16"
    bad = tf.keras.Input([2], dtype="float16") if symbolic else tf.ones([3, 2], tf.float16)
    layer = Specified(dtype="mixed_float16")
    with pytest.raises(ValueError, match="expected dtype=float32"):
        layer(bad)


def test_a_float32_layer_inside_of_a_mixed_one_computes_in_float32():
    class Inner(layers.Layer):
        def build(self, _):
            third = tf.keras.initializers.Constant(1 / 3)
            self.w = self.add_weight(shape=[2], initializer=third)

        def call(self, x):
            return x * self.w

    class Outer(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.wide = Inner(dtype="float32")
            self.narrow = Inner(dtype=self.dtype_policy)

        def call(self, x):
            return self.narrow(x), self.wide(x), self.wide.call(x), self.narrow(x)

    outputs = Outer(dtype="mixed_float16")(tf.ones([3, 2]))
    assert dtypes_of(outputs) == ("float16", "float32", "float32", "float16")
    for wide in outputs[1:3]:
        np.testing.assert_array_equal(wide, np.full([3, 2], 1 / 3, np.float32))


def test_a_weight_of_another_dtype_in_a_layer_that_is_not_mixed():
    class Wide(layers.Layer):
        def build(self, _):
            self.w = self.add_weight(shape=[2], dtype="float64")

        def call(self, x):
            return x, tf.convert_to_tensor(self.w)

    layer = Wide(dtype="float32")
    assert dtypes_of(layer(tf.ones([2]))) == ("float32", "float64")
    assert dtypes_of(layer.call(tf.ones([2]))) == ("float32", "float64")


def test_integer_layers():
    class Counts(layers.Layer):
        def call(self, x):
            return x + 1

    assert Counts(dtype="int32")(tf.constant([1])).dtype == tf.int32
    assert Counts(dtype="int32")(tf.constant([1.5])).dtype == tf.float32


# How `call` is run.


def test_call_itself_casts_too():
    layer = SimpleDense(dtype="mixed_float16")
    layer.build([None, 10])
    assert layer.call(tf.ones([1, 10])).dtype == tf.float16


def test_call_of_a_mixin_and_of_a_parent():
    class Mixin:
        def call(self, x):
            return x * self.w

    class Layer(Mixin, layers.Layer):
        def build(self, _):
            self.w = self.add_weight(shape=[2], initializer="ones")

    class Child(Layer):
        def call(self, x, bias=None):
            return super().call(x) + (0.0 if bias is None else bias)

    for make in (Layer, Child):
        assert make(dtype="mixed_float16")(tf.ones([2])).dtype == tf.float16
    assert Child(dtype="mixed_float16")(tf.ones([2]), bias=tf.ones([2])).dtype == tf.float16


def test_a_call_that_is_put_in_later_casts_too():
    class Scale(layers.Layer):
        def build(self, _):
            self.w = self.add_weight(shape=[2], initializer="ones")

        def call(self, x):
            return x * self.w

    def thrice(self, x):
        return x * self.w * 3

    x = tf.ones([2])
    layer = Scale(dtype="mixed_float16")
    layer(x)
    layer.call = types.MethodType(thrice, layer)
    np.testing.assert_array_equal(layer(x), [3, 3])
    assert layer(x).dtype == layer.call(x).dtype == tf.float16
    layer.call = tf.function(types.MethodType(Scale.call, layer))
    assert layer(x).dtype == tf.float16
    Scale.call = thrice
    assert Scale(dtype="mixed_float16")(x).dtype == tf.float16


def test_training_and_mask_arguments_still_come_from_keras():
    class Asks(layers.Layer):
        supports_masking = True

        def call(self, x, training=None, mask=None):
            self.asked = training, mask
            return x

    layer = Asks(dtype="mixed_float16")
    model = tf.keras.Sequential([tf.keras.layers.Embedding(5, 2, mask_zero=True), layer])
    model(tf.constant([[1, 0]]), training=True)
    training, mask = layer.asked
    assert training is True
    np.testing.assert_array_equal(mask, [[True, False]])


@pytest.mark.parametrize("in_function", [False, True])
def test_recomputed_layers_read_in_the_compute_dtype(in_function):
    class Block(layers.Layer):
        def build(self, _):
            self.w = self.add_weight(shape=[2, 2], initializer="identity")

        def call(self, x):
            return keras_mp.recompute_grad(lambda x: tf.tanh(x @ self.w))(x)

    block, dense = Block(dtype="mixed_float16"), SimpleDense(dtype="mixed_float16")
    x = tf.Variable(tf.ones([1, 2]))
    y = tf.Variable(tf.ones([1, 10]))
    block(x)
    dense(y)

    def gradients():
        with tf.GradientTape() as tape:
            one = tf.reduce_sum(block(x))
            other = tf.reduce_sum(tf.recompute_grad(dense)(tf.convert_to_tensor(y)))
            third = tf.reduce_sum(tf.recompute_grad(dense.call)(tf.convert_to_tensor(y)))
            total = one + other + third
        return tape.gradient(total, [x, y])

    for gradient in (tf.function(gradients) if in_function else gradients)():
        assert gradient.dtype == tf.float32
        assert np.isfinite(gradient).all()


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no RematScope.")
@pytest.mark.parametrize("in_function", [False, True])
def test_remat_scope_of_keras_3(in_function):
    import keras

    with keras.RematScope(mode="full"):
        layer = SimpleDense(dtype="mixed_float16")
    plain = SimpleDense(dtype="mixed_float16")
    x = tf.random.stateless_normal([2, 10], [1, 2])
    gradients = []
    for each in (layer, plain):
        each(x)
        each.set_weights(layer.get_weights())

        def gradient(each=each):
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(tf.tanh(each(x)))
            return tape.gradient(y, each.trainable_weights)[0]

        gradients.append((tf.function(gradient) if in_function else gradient)())
    assert gradients[0].dtype == tf.float32
    np.testing.assert_array_equal(*gradients)


def test_layers_on_replicas_learn_what_one_device_learns():
    images, labels = digits()
    weights = []
    for strategy in (tf.distribute.get_strategy(), mirrored(2)):
        tf.keras.utils.set_random_seed(0)
        with strategy.scope():
            model = tf.keras.Sequential(
                [tf.keras.Input([64]), Saved(dtype="mixed_bfloat16"), SoftmaxLogits()]
            )
            loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(tf.keras.optimizers.SGD(0.125), loss)
        model.fit(images[:256], labels[:256] % 3, shuffle=False, verbose=0)
        weights.append(model.get_weights()[0])
    # Gradients of half a batch are rounded to bfloat16 before they are added.
    np.testing.assert_allclose(weights[0], weights[1], rtol=0, atol=1e-2)
    assert np.abs(weights[0]).max() > 0.1


class SoftmaxLogits(layers.Layer):
    """Passes logits on in float32."""

    def __init__(self, **kwargs):
        super().__init__(dtype="float32", **kwargs)

    def call(self, x):
        return x


# Bare variables.


def bare_layer():
    class Bare(layers.Layer):
        def __init__(self, make=tf.Variable, **kwargs):
            super().__init__(**kwargs)
            self.gain = make(tf.ones([2]))

        def call(self, x):
            return x * self.gain

    return Bare


def test_a_bare_variable_is_warned_about_once_for_each_class():
    for make in (bare_layer(), bare_layer()):
        with pytest.warns(keras_mp.MixedPrecisionWarning) as caught:
            [make(dtype="mixed_float16") for _ in range(3)]
        (warning,) = caught
        assert "Bare computes in float16, but its attribute `gain`" in str(warning.message)
        assert "self.gain = keras_mp.autocast_variable" in str(warning.message)
        assert warning.filename == __file__


def test_no_warning_where_nothing_is_bare():
    class Fine(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.steps = tf.Variable(0)
            self.half = tf.Variable(tf.ones([2], tf.float16))
            self.own = keras_mp.autocast_variable(tf.Variable(1.0))
            self.stock = tf.keras.layers.Dense(1, dtype="mixed_float16")
            self.stock.build([None, 2])
            self.tied = self.stock.kernel
            self.more = [self.own, {"k": self.own}]
            self.norm = tf.keras.layers.BatchNormalization(dtype="mixed_float16")
            self.norm.build([None, 2])
            self.mean = self.norm.moving_mean
            self.kept = self.add_weight(shape=[2], autocast=False)

    # A warning would be an error.
    Fine(dtype="mixed_float16")
    bare_layer()(dtype="float32")
    bare_layer()(dtype="float64")
    bare_layer()(dtype="mixed_float16", make=lambda x: keras_mp.autocast_variable(tf.Variable(x)))


def test_containers_of_bare_variables_are_warned_about():
    class Lists(layers.Layer):
        def __init__(self, many, **kwargs):
            super().__init__(**kwargs)
            self.many = many

    for many in ([tf.Variable(1.0)], {"a": tf.Variable(1.0)}, {"a": [(tf.Variable(1.0),)]}):
        kind = type("Lists", (Lists,), {})
        with pytest.warns(keras_mp.MixedPrecisionWarning, match="attribute `many`"):
            kind(many, dtype="mixed_float16")


def test_classes_are_not_kept():
    make = bare_layer()
    with pytest.warns(keras_mp.MixedPrecisionWarning):
        make(dtype="mixed_float16")
    assert make in layers._warned_of
    del make
    tf.keras.backend.clear_session()
    gc.collect()


# Errors about dtypes.


def layer_that_calls(function, **attributes):
    class Fails(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            for name, value in attributes.items():
                setattr(self, name, value)

        def call(self, x):
            return function(self, x)

    return Fails


MISTAKES = {
    "random": (
        lambda self, x: x + tf.random.normal([2]),
        r"pass the dtype: `tf.random.normal\(..., dtype=self.compute_dtype\)`",
    ),
    "constant": (
        lambda self, x: x * tf.constant(2.0),
        r"pass the dtype: `tf.constant\(..., dtype=self.compute_dtype\)`",
    ),
    "concat": (
        lambda self, x: tf.concat([x, tf.ones([2])], 0),
        r"pass the dtype: `tf.ones\(..., dtype=self.compute_dtype\)`",
    ),
    "cast": (
        lambda self, x: x - tf.cast(tf.range(2), tf.float32),
        "let `tf.cast` make a tensor of `self.compute_dtype`",
    ),
    "matmul": (
        lambda self, x: tf.matmul(x[tf.newaxis], tf.eye(2)),
        r"pass the dtype: `tf.eye\(..., dtype=self.compute_dtype\)`",
    ),
    "where": (
        lambda self, x: tf.where(x > 0, x, tf.zeros([2])),
        r"pass the dtype: `tf.zeros\(..., dtype=self.compute_dtype\)`",
    ),
    "stack": (
        lambda self, x: tf.stack([x, tf.ones([2])]),
        r"pass the dtype: `tf.ones\(..., dtype=self.compute_dtype\)`",
    ),
    "einsum": (
        lambda self, x: tf.einsum("i,i->", x, tf.ones([2])),
        r"pass the dtype: `tf.ones\(..., dtype=self.compute_dtype\)`",
    ),
    "foreign": (lambda self, x: x / WIDE, "Likely cures: pass `dtype=self.compute_dtype`"),
    "foreign first": (lambda self, x: WIDE / x, "Likely cures: pass `dtype=self.compute_dtype`"),
    "dropout": (lambda self, x: tf.nn.dropout(x, WIDE[0] / 4), "Likely cures: pass"),
    "assign": (lambda self, x: WIDE_VARIABLE.assign(x), "Likely cures: pass"),
    "convert": (
        lambda self, x: tf.convert_to_tensor(x, dtype=tf.float32),
        "let `tf.convert_to_tensor` make a tensor",
    ),
}
WIDE = tf.constant([1.0, 2.0])
WIDE_VARIABLE = tf.Variable([1.0, 2.0])


@pytest.mark.parametrize(
    ("mistake", "mode", "policy"),
    [
        case
        for case in pairs(sorted(MISTAKES), MODES, ["mixed_float16", "mixed_bfloat16"])
        # TensorFlow multiplies bfloat16 with float32.
        if (case[0], case[-1]) != ("matmul", "mixed_bfloat16")
    ],
)
def test_an_error_about_dtypes_names_layer_line_dtypes_and_cure(mistake, mode, policy):
    function, cure = MISTAKES[mistake]
    layer = layer_that_calls(function)(dtype=policy, name="mine")
    call = layer if mode == "eager" else tf.function(layer, jit_compile=mode == "jit")
    with pytest.raises(TypeError, match=cure) as caught:
        call(tf.ones([2]))
    message = str(caught.value)
    compute = layer.compute_dtype
    assert f"Layer 'mine' (of type Fails) computes in {compute}" in message
    assert f"met {compute} and float32" in message or f"met float32 and {compute}" in message
    line = function.__code__.co_firstlineno
    assert f"in line {line} of {__file__}" in message
    assert message.count("computes in") == 1


def changes_in_a_loop(self, x):
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * WIDE), (0, x))


def changes_in_a_loop_of_autograph(self, x):
    for _ in tf.range(3):
        x = tf.cast(x, tf.float32)
    return x


def differs_between_branches(self, x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: WIDE)


def differs_between_branches_of_autograph(self, x):
    if tf.reduce_sum(x) > 0:
        x = WIDE
    return x


def cast_in_a_loop(self, x):
    return tf.while_loop(lambda h: True, lambda h: (tf.cast(h, "float32"),), (x,))


@pytest.mark.parametrize(
    "function",
    [
        changes_in_a_loop,
        changes_in_a_loop_of_autograph,
        differs_between_branches,
        differs_between_branches_of_autograph,
        cast_in_a_loop,
    ],
)
def test_control_flow_that_changes_the_dtype_is_explained(function):
    class Fails(layers.Layer):
        call = function

    if IS_KERAS_3 and "autograph" in function.__name__:
        pytest.skip("Keras 3 does not convert `call`.")
    layer = Fails(dtype="mixed_float16")
    with pytest.raises(TypeError, match="computes in float16, and its `call` met float"):
        tf.function(layer)(tf.ones([2]))


@pytest.mark.parametrize("mode", MODES)
def test_an_error_about_a_bare_variable_names_it(mode):
    make = layer_that_calls(lambda self, x: x * self.gain, gain=tf.Variable([1.0, 2.0]))
    with pytest.warns(keras_mp.MixedPrecisionWarning):
        layer = make(dtype="mixed_float16")
    call = layer if mode == "eager" else tf.function(layer, jit_compile=mode == "jit")
    with pytest.raises(TypeError, match="`self.gain` is a bare tf.Variable; make it with"):
        call(tf.ones([2]))


def test_a_bare_variable_elsewhere_is_not_blamed():
    def call(self, x):
        x = x * tf.cast(self.step, self.compute_dtype)
        return x + WIDE

    make = layer_that_calls(call, step=tf.Variable(0.0))
    with pytest.warns(keras_mp.MixedPrecisionWarning):
        layer = make(dtype="mixed_float16")
    with pytest.raises(TypeError, match="Likely cures: pass"):
        layer(tf.ones([2]))


def test_the_innermost_layer_explains():
    inner = layer_that_calls(MISTAKES["random"][0])(dtype="mixed_float16", name="inner")
    outer = layer_that_calls(lambda self, x: self.inner(x), inner=inner)(dtype="mixed_float16")
    with pytest.raises(TypeError, match="Layer 'inner'") as caught:
        outer(tf.ones([2]))
    assert str(caught.value).count("computes in") == 1


@pytest.mark.parametrize("mode", MODES)
def test_other_errors_stay_what_they_are(mode):
    def wrong_shape(self, x):
        return tf.matmul(x[tf.newaxis], tf.ones([3, 3], self.compute_dtype))

    def own_error(self, x):
        raise ValueError("neither float16 nor float32 has to do with it")

    def wrong_integer(self, x):
        return tf.constant([1]) + tf.constant([1], tf.int64)

    class Inner(tf.keras.layers.Layer):
        def call(self, x, y=None):
            raise ValueError("The mask is not compatible with the input")

    inner = Inner(dtype="float32", autocast=False)

    def inner_error(self, x):
        return inner(x, y=tf.ones([1]))

    def talks_of_types(self, x):
        raise ValueError("`a` and `b` have different types: float16 and float32")

    def talks_of_dtypes(self, x):
        raise ValueError("a float32 file is not compatible with the float16 format")

    expected = {"eager": tf.errors.InvalidArgumentError}.get(mode, ValueError)
    for function, error in (
        (wrong_shape, expected),
        (own_error, ValueError),
        (inner_error, ValueError),
        (talks_of_dtypes, ValueError),
        (talks_of_types, ValueError),
        (wrong_integer, (tf.errors.InvalidArgumentError, TypeError)),
    ):
        layer = layer_that_calls(function)(dtype="mixed_float16")
        call = layer if mode == "eager" else tf.function(layer, jit_compile=mode == "jit")
        with pytest.raises(error) as caught:
            call(tf.ones([2]))
        assert "computes in" not in str(caught.value)


def test_dtypes_in_reads_only_dtypes():
    path = TypeError("/float16/float32/file.py: has type string that does not match type int32")
    assert type_errors.dtypes_in(path) == []


# Models, saving.


def test_a_model_of_such_layers_trains_as_one_with_casts_by_hand():
    class ByHand(tf.keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(64, 10), initializer="zeros", dtype="float32")

        def call(self, x):
            w = tf.convert_to_tensor(self.w)
            return tf.cast(x, "bfloat16") @ tf.cast(w, "bfloat16")

    class Ours(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(64, 10), initializer="zeros")

        def call(self, x):
            return x @ self.w

    images, labels = digits()
    weights = []
    for layer in (ByHand(dtype="float32"), Ours(dtype="mixed_bfloat16")):
        model = tf.keras.Sequential([tf.keras.Input([64]), layer])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
        model.fit(images[:512], labels[:512], epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights()[0])
    np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("saved", ["float32", "mixed_float16"])
@pytest.mark.parametrize("form", ["checkpoint", "weights"])
def test_checkpoints_go_from_float32_to_mixed_and_back(saved, form, tmp_path):
    loaded = {"float32": "mixed_float16", "mixed_float16": "float32"}[saved]
    models = []
    for policy in (saved, loaded):
        models.append(tf.keras.Sequential([tf.keras.Input([10]), SimpleDense(dtype=policy)]))
    path = str(tmp_path / "m.weights.h5")
    if form == "checkpoint":
        path = tf.train.Checkpoint(model=models[0]).write(path)
        status = tf.train.Checkpoint(model=models[1]).read(path)
        status.assert_existing_objects_matched()
    else:
        models[0].save_weights(path)
        models[1].load_weights(path)
    np.testing.assert_array_equal(models[0].get_weights(), models[1].get_weights())


@keras_api.register_serializable
class Saved(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 3), name="w")

    def call(self, x):
        return x @ self.w


def test_models_are_saved_and_loaded(tmp_path):
    model = tf.keras.Sequential([tf.keras.Input([4]), Saved(dtype="mixed_float16")])
    path = str(tmp_path / "m.keras")
    model.save(path)
    loaded = tf.keras.models.load_model(path)
    x = tf.random.stateless_normal([2, 4], [1, 2])
    assert isinstance(loaded.layers[-1], Saved)
    assert loaded.layers[-1].dtype_policy.name == "mixed_float16"
    np.testing.assert_array_equal(loaded(x), model(x))
    np.testing.assert_array_equal(tf.keras.models.clone_model(model)(x).dtype, tf.float16)
    copied = copy.deepcopy(model)
    np.testing.assert_array_equal(copied(x), model(x))
    model.export(str(tmp_path / "e"))
    exported = tf.saved_model.load(str(tmp_path / "e"))
    np.testing.assert_array_equal(exported.serve(x), model(x))


def test_fit_with_a_mixed_policy_wraps_the_optimizer():
    with keras_mp.policy_scope("mixed_float16"):
        model = tf.keras.Sequential([tf.keras.Input([64]), Saved()])
        model.compile("sgd", "mse")
    images, _ = digits()
    model.fit(images[:64], np.zeros([64, 3]), verbose=0)
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    assert np.isfinite(model.get_weights()[0]).all()
    assert IS_KERAS_3 or isinstance(model.weights[0], keras_mp.AutoCastVariable)
