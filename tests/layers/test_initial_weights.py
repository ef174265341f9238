"""The first values of 16-bit weights."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, pairs

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
    assert [tf.as_dtype(w.dtype) for w in (layer.first, layer.count, layer.wide)] == [
        tf.bfloat16,
        tf.int32,
        tf.float32,
    ]
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
