"""Variables that a layer makes of others are float32 where its policy says so."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import Subclassed, pairs

L = tf.keras.layers
POLICIES = ["mixed_float16", "mixed_bfloat16"]


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


def in_function(model):
    return lambda x: tf.function(model)(x)


@pytest.mark.parametrize(
    ("make", "outer", "run", "policy"),
    pairs(
        MAKERS,
        [Subclassed, Built, functional, sequential],
        [lambda model: model, in_function],
        POLICIES,
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
