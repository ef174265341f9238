import collections
import os
import types

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import layers
from tests.common import IS_KERAS_3, MODES, differentiated
from tests.layers.common import SimpleDense, run


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
    ragged, sparse = tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.from_dense([[0.0, 1.0]])
    slices = tf.IndexedSlices(tf.ones([1]), tf.constant([0]), tf.constant([2]))
    arrays = {dtype: np.ones([2], dtype) for dtype in ("float16", "float32", "float64")}
    others = {dtype: np.ones([2], dtype) for dtype in ("int64", "bool")}
    layer(
        floats,
        {"a": tf.ones([2]), "b": (tf.constant([1]), [tf.constant([True])])},
        z=[ragged, sparse, slices],
        arrays={**arrays, **others},
        w=tf.constant(["text"]),
        c=tf.constant([1j]),
    )
    x, y, z, others = layer.given
    assert dtypes_of(list(x)) == ["float16"] * 4
    assert dtypes_of(y) == {"a": "float16", "b": ("int32", ["bool"])}
    assert [type(each) for each in z] == [tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices]
    assert [each.dtype for each in z] == [tf.float16] * 3
    assert ragged.dtype == sparse.dtype == tf.float32
    found = {name: each.dtype.name for name, each in others["arrays"].items()}
    assert found == {**dict.fromkeys(arrays, "float16"), "int64": "int64", "bool": "bool"}
    assert (others["w"].dtype, others["c"].dtype) == (tf.string, tf.complex128)
    layer(np.ones([2]))
    assert layer.given[0].dtype == tf.float16


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
    assert differentiated(lambda: layer(bare), bare)[1].dtype == tf.float32


class Boxes(list):
    """A list of a class of its own."""


class Stubborn(collections.OrderedDict):
    """A dict that refuses to be changed as a whole, as some libraries have it."""

    def update(self, *args, **kwargs):
        raise TypeError("no update")


class Returned(dict):
    """A dict that calls itself its copy."""

    def __copy__(self):
        return self


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_containers_in_which_nothing_is_cast_are_passed_on(policy):
    layer = Dtypes(dtype=policy)
    for given in (
        Boxes([1]),
        types.MappingProxyType({"n": 1}),
        os.environ,
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


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 copies such containers, and fails, itself.")
def test_a_container_that_cannot_be_copied_says_what_to_do():
    layer = Dtypes(dtype="mixed_float16")
    with pytest.raises(TypeError, match="Name the argument in the `keep_dtype`"):
        layer(tf.ones([2]), z=types.MappingProxyType({"a": tf.ones([2])}))


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

    class Forwards(Keeps):
        def call(self, *args, **kwargs):
            return super().call(*args, **kwargs)

    wide = tf.ones([2], tf.float64)
    for layer in (Keeps(dtype="mixed_float16"), Forwards(dtype="mixed_float16")):
        for args, kwargs in (((wide, wide), {}), ((wide,), {"targets": wide})):
            outputs = run(layer, mode, *args, **kwargs, weights=wide, more=wide)
            assert dtypes_of(outputs) == ("float16", "float64", "float64", "float16")


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
