import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import layers
from tests.common import IS_KERAS_3, MODES, Subclassed, pairs, placed
from tests.layers.common import POLICIES, SimpleDense


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
    assert placed(mode, layer)(tf.zeros([1])).numpy() == np.float16(third)
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


def test_weights_that_are_cast_once_are_those_of_cast_once():
    layer, x = SimpleDense(dtype="mixed_float16"), tf.ones([1, 10])
    layer(x)
    refused = pytest.raises(RuntimeError, match="inside of `keras_mp.cast_once`")
    with keras_mp.autocast_scope("float16"), layer.weights_cast_once():
        with refused:
            layer.kernel.assign(tf.zeros([10, 10]))
        assert tf.convert_to_tensor(layer.kernel).dtype == tf.float16


# Variables that a layer makes of others are float32 where its policy says so.


L = tf.keras.layers
MIXED = ["mixed_float16", "mixed_bfloat16"]


class Copied(L.Dense):
    """A copy of a weight, and others like it."""

    def build(self, shape):
        super().build(shape)
        self.copy = tf.Variable(self.kernel, name="copy")
        self.like = tf.Variable(lambda: tf.zeros_like(self.kernel), name="like")
        self.later = tf.Variable(lambda: 2.0 * self.kernel, name="later")
        self.weight = self.add_weight(
            name="weight",
            shape=(4,),
            initializer=lambda shape, dtype=None: tf.cast(tf.norm(self.kernel, axis=0), dtype),
            dtype=self.kernel.dtype,
        )
        self.made = [self.copy, self.like, self.later, self.weight]

    def call(self, x):
        return x @ tf.cast(self.copy + self.like + self.later, x.dtype) * self.weight


class Wrapped(L.Wrapper):
    """A wrapper that builds its layer, and reads a weight of it."""

    def build(self, shape):
        self.layer.build(shape)
        self.copy = tf.Variable(self.layer.kernel)
        self.made = [self.copy]
        super().build()

    def call(self, x):
        return self.layer(x)


MAKERS = [lambda: Copied(4), lambda: Wrapped(L.Dense(4)), lambda: Copied(4, dtype="float32")]


class Built(Subclassed):
    """A model that Keras does not call to build it."""

    def build(self, shape):
        self.built = True


def functional(layer):
    inputs = tf.keras.Input((4,))
    return tf.keras.Model(inputs, layer(inputs))


def sequential(layer):
    return tf.keras.Sequential([layer])


X = np.linspace(-1.0, 1.0, 32, dtype="float32").reshape(8, 4)


@pytest.mark.parametrize(
    ("make", "outer", "run", "policy"),
    pairs(
        MAKERS, [Subclassed, Built, functional, sequential], [MODES["eager"], tf.function], MIXED
    ),
)
def test_what_is_made_of_a_weight_is_float32(make, outer, run, policy):
    keras_mp.set_global_policy(policy)
    layer = make()
    model = outer(layer)
    run(model)(tf.constant(X))
    assert [each.dtype for each in layer.made] == ["float32"] * len(layer.made)
    kernel = layer.kernel if hasattr(layer, "kernel") else layer.layer.kernel
    np.testing.assert_array_equal(layer.copy.numpy(), tf.convert_to_tensor(kernel).numpy())


def test_a_dtype_that_a_layer_says_itself_stays():
    class Cache(L.Layer):
        def build(self, shape):
            self.cache = tf.Variable(tf.zeros(shape[1:], "float16"), dtype="float16")
            self.kept = tf.Variable(tf.zeros(shape[1:], "float16"), trainable=False)

        def call(self, x):
            return x + tf.cast(self.cache, x.dtype)

    keras_mp.set_global_policy("mixed_float16")
    layer = Cache()
    Subclassed(layer)(tf.constant(X))
    assert layer.cache.dtype == layer.kept.dtype == tf.float16


# The first values of 16-bit weights.


K = tf.keras
INITIALIZERS = ["glorot_uniform", "he_normal", "random_uniform", "truncated_normal", "orthogonal"]


def values(weight):
    return np.asarray(tf.cast(weight, tf.float32))


def fill(shape, dtype=None, **kwargs):
    return tf.fill(shape, tf.constant(1 / 3, dtype))


@pytest.mark.parametrize(
    ("name", "dtype", "way"), pairs(INITIALIZERS, ["float16", "bfloat16"], ["call", "build", "fit"])
)
@pytest.mark.filterwarnings("ignore:The model .* has 1 layers whose variables are in")
def test_a_model_in_16_bits_begins_where_one_in_float32_does(dtype, name, way):
    def kernel(policy):
        initializer = type(K.initializers.get(name))(seed=3)
        layer = K.layers.Dense(64, kernel_initializer=initializer, dtype=policy)
        if way == "call":
            layer(tf.ones([2, 32]))
        elif way == "build":
            layer.build([None, 32])
        else:
            model = K.Sequential([layer])  # It is built while `fit` traces it.
            model.compile(K.optimizers.SGD(0.0), "mse", run_eagerly=False)
            model.fit(np.ones([2, 32], "f4"), np.ones([2, 64], "f4"), verbose=0)
        return layer.kernel

    found, right = kernel(keras_mp.Policy(dtype)), kernel("float32")
    assert tf.as_dtype(found.dtype) == dtype
    np.testing.assert_array_equal(values(found), values(tf.cast(values(right), dtype)))


@pytest.mark.parametrize("chosen", [None, "ones", fill, K.initializers.Constant(0.1)])
def test_any_initializer(chosen):
    class Own(K.layers.Layer):
        def build(self, shape):
            self.first = self.add_weight(shape=[3, 2], initializer=chosen, name="first")
            self.count = self.add_weight(
                shape=[], initializer="zeros", dtype="int32", trainable=False, name="count"
            )
            self.wide = self.add_weight(shape=[2], initializer=chosen, dtype="float32", name="wide")

        def call(self, x):
            return x @ self.first

    layer = Own(dtype=keras_mp.Policy("bfloat16"))
    layer(tf.ones([1, 3]))
    found = [tf.as_dtype(w.dtype) for w in (layer.first, layer.count, layer.wide)]
    assert found == ["bfloat16", "int32", "float32"]
    if chosen is not None:
        expected = values(layer.wide)
        np.testing.assert_array_equal(values(layer.first)[0], values(tf.cast(expected, "bfloat16")))


def test_positional_arguments():
    class Own(K.layers.Layer):
        def build(self, shape):
            if IS_KERAS_3:
                self.own = self.add_weight([2], "ones", "float16")
            else:
                self.own = self.add_weight("own", [2], "float16", "ones")

    layer = Own(dtype=keras_mp.Policy("float16"))
    layer.build([1])
    assert values(layer.own).tolist() == [1.0, 1.0]
    with pytest.raises((TypeError, ValueError)):
        layer.add_weight("own", [2], name="own")


def test_policies_of_keras_draw_what_they_drew():
    def kernel(policy):
        initializer = K.initializers.GlorotUniform(seed=3)
        layer = K.layers.Dense(64, kernel_initializer=initializer, dtype=policy)
        layer.build([None, 32])
        return values(layer.kernel)

    stock = K.mixed_precision.Policy if not IS_KERAS_3 else K.DTypePolicy
    # At most 128 different numbers.
    assert len(np.unique(kernel(stock("bfloat16")))) <= 128
    assert len(np.unique(kernel(keras_mp.Policy("bfloat16")))) > 500
