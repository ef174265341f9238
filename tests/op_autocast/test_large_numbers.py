"""A number that is finite in float32 only is computed with in float32: -1e9 in float16."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import MODES, Mixes, Subclassed, differentiated, eager_and_graph, once, placed

X = np.array([[1.0, 3.0, 2.5], [0.5, 4.0, 0.25]], "float32")
NUMBERS = {"float16": [-1e9, -1e36, tf.float32.min], "bfloat16": [float(tf.float32.min)]}


def mask(x):
    return tf.cast(x > 2, x.dtype)


def made_before(number):
    """An eager tensor, such as an attribute that a constructor has made."""
    with tf.init_scope():
        return tf.constant(number)


OPERATIONS = {
    "*": lambda x, number: x + mask(x) * number,
    "* reversed": lambda x, number: x + number * mask(x),
    "*, inverted": lambda x, number: x + (1.0 - mask(x)) * number,
    "+": lambda x, number: x + number,
    "-": lambda x, number: x - number,
    "/": lambda x, number: number / x,
    ">": lambda x, number: tf.where(x > number, x, 2 * x),
    "multiply": lambda x, number: x + tf.multiply(number, mask(x)),
    "subtract": lambda x, number: tf.subtract(number, x),
    "maximum": lambda x, number: tf.maximum(x, number) - x,
    "minimum": lambda x, number: tf.minimum(number, x),
    "where": lambda x, number: tf.where(x > 2, x, number),
    "where reversed": lambda x, number: tf.where(x > 2, number, x),
    "fill": lambda x, number: tf.where(x > 2, x, tf.fill([2, 3], number)),
    "fill of a cast": lambda x, number: mask(x) * tf.fill([2, 3], tf.cast(number, x.dtype)),
    "zeros_like": lambda x, number: mask(x) * (tf.zeros_like(x) + number),
    "constant": lambda x, number: mask(x) * tf.constant(number, x.dtype),
    "float32 constant": lambda x, number: mask(x) * tf.constant(number, tf.float32),
    "convert_to_tensor": lambda x, number: mask(x) * tf.convert_to_tensor(number, x.dtype),
    "cast": lambda x, number: mask(x) * tf.cast(number, x.dtype),
    "cast of an eager tensor": lambda x, number: mask(x) * tf.cast(made_before(number), x.dtype),
    "a number of NumPy": lambda x, number: mask(x) * np.float32(number),
    "an array": lambda x, number: mask(x) * np.full([2, 3], number, "float32"),
    "a list": lambda x, number: mask(x) * [number, number, 0.0],
    "stack": lambda x, number: tf.stack([x[0, 0], number]),
    "pad": lambda x, number: tf.pad(x, [[0, 0], [1, 1]], constant_values=number),
    "one_hot": lambda x, number: tf.one_hot([1, 0], 3, off_value=number, dtype=x.dtype),
    "scatter": lambda x, number: tf.tensor_scatter_nd_update(x, [[0, 0]], [number]),
    "softmax": lambda x, number: tf.nn.softmax(x + (1.0 - mask(x)) * number),
    "raw_ops": lambda x, number: tf.raw_ops.Mul(x=mask(x), y=number),
    "cond": lambda x, number: tf.cond(x[0, 0] > 0, lambda: x + number, lambda: x),
    "backend.constant": lambda x, number: mask(x) * tf.keras.backend.constant(number, x.dtype),
}


@pytest.mark.parametrize(("name", "mode", "dtype"), eager_and_graph(OPERATIONS))
def test_the_result_is_that_of_float32(name, mode, dtype):
    for number in NUMBERS[dtype]:
        function = functools.partial(OPERATIONS[name], number=number)
        layer = Mixes(function, dtype=keras_mp.Policy(f"mixed_{dtype}"))
        model = Subclassed(layer, dtype=layer.dtype_policy)
        found = placed(mode, model)(tf.constant(X))
        expected = function(tf.constant(X))
        assert found.dtype == tf.float32
        np.testing.assert_allclose(found, expected, rtol=2**-7)


@pytest.mark.parametrize("mode", MODES)
def test_gradients(mode):
    layer = Mixes(lambda x: x + mask(x) * -1e36, dtype=keras_mp.Policy("mixed_float16"))

    def differentiate(x):
        return differentiated(lambda: tf.nn.softmax(layer(x))[:, 0], x)[1]

    p = 1 / (1 + np.exp(-0.5))
    found = placed(mode, differentiate)(tf.constant([[1.0, 0.5, 4.0]]))
    assert found.dtype == tf.float32
    np.testing.assert_allclose(found, [[p * (1 - p), -p * (1 - p), 0]], rtol=2e-3)


@once
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("mode", MODES)
def test_what_16_bits_hold_and_infinity_stay_in_16_bits(mode):
    for number in (65504.0, -65504, 0.5, float("inf"), np.float32("nan"), 1e39):
        function = functools.partial(
            lambda x, number: tf.maximum(x, number) * number, number=number
        )
        layer = Mixes(function, dtype=keras_mp.Policy("mixed_float16"))
        assert placed(mode, layer)(tf.constant(X)).dtype == tf.float16
    layer = Mixes(lambda x: x * -1e9, dtype=keras_mp.Policy("mixed_bfloat16"))
    assert placed(mode, layer)(tf.constant(X)).dtype == tf.bfloat16


@once
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("mode", MODES)
def test_elsewhere_numbers_are_those_of_tensorflow(mode):
    Mixes(lambda x: x * -1e9, dtype=keras_mp.Policy("mixed_float16"))(X)
    low = tf.constant(X, tf.float16)
    for function in (
        lambda: low * -1e9,
        lambda: tf.constant(-1e9, tf.float16),
        lambda: tf.cast(-1e9, tf.float16),
        lambda: tf.convert_to_tensor(-1e9, tf.float16),
    ):
        found = placed(mode, function)()
        assert found.dtype == tf.float16
        assert np.isinf(found).all()


@once
def test_a_strict_layer_is_left_alone():
    layer = keras_mp.layers.Layer(strict_dtypes=True, dtype=keras_mp.Policy("mixed_float16"))
    layer.call = lambda x: x * -1e9
    assert np.isinf(layer(tf.constant(X))).all()
