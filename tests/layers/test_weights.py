import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import layers
from tests.common import MODES, placed
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
