import types

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import layers
from tests.common import IS_KERAS_3, Weighs, differentiated, placed
from tests.layers.common import SimpleDense


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
    assert layer(x).dtype == layer.call(x).dtype == tf.float16
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


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_recomputed_layers_read_in_the_compute_dtype(mode):
    dense = SimpleDense(dtype="mixed_float16")
    x = tf.Variable(tf.ones([1, 10]))
    dense(x)

    def recomputed(x, w):
        return tf.recompute_grad(lambda x: tf.matmul(x, w) / tf.norm(x))(x)

    inside = Weighs(recomputed, [10, 10], dtype=keras_mp.Policy("mixed_float16"))

    def all_of_them():
        calls = tf.recompute_grad(dense), tf.recompute_grad(dense.call), inside
        return [call(tf.convert_to_tensor(x)) for call in calls]

    outputs, gradient = placed(mode, lambda: differentiated(all_of_them, x))()
    assert [each.dtype for each in outputs] == [tf.float16] * 3
    assert gradient.dtype == tf.float32
    assert np.isfinite(gradient).all()


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no RematScope.")
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_remat_scope_of_keras_3(mode):
    import keras

    with keras.RematScope(mode="full"):
        layer = SimpleDense(dtype="mixed_float16")
    plain = SimpleDense(dtype="mixed_float16")
    x = tf.random.stateless_normal([2, 10], [1, 2])
    gradients = []
    for each in (layer, plain):
        each(x)
        each.set_weights(layer.get_weights())
        call = lambda: differentiated(lambda: each(x), each.trainable_weights, tf.tanh)  # noqa: E731
        gradients.append(placed(mode, call)()[1][0])
    assert gradients[0].dtype == tf.float32
    np.testing.assert_array_equal(*gradients)


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


def is_traced(call):
    try:
        tf.function(call).get_concrete_function(tf.TensorSpec([2, 3]))
    except (tf.errors.OperatorNotAllowedInGraphError, NotImplementedError):
        return False
    return True


def test_layers_of_keras_are_converted_as_without_keras_mp():
    # AutoGraph converts those of Keras 2 up to TensorFlow 2.16, and never those of Keras 3.
    sign = lambda x: x if tf.reduce_sum(x) > 0 else -x  # noqa: E731
    for policy in ("float32", keras_mp.Policy("mixed_bfloat16")):
        layer = tf.keras.layers.Lambda(sign, dtype=policy)
        without = type(layer).__call__.__wrapped__
        as_before = is_traced(lambda x, layer=layer, call=without: call(layer, x))
        assert is_traced(lambda x, layer=layer: layer(x)) == as_before
