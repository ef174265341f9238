"""`Policy(..., output_dtype="float32")`: what float32 computes, with gradients in 16 bits."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import inside
from tests.common import IS_KERAS_3, MODES, differentiated, made, mirrored, pairs
from tests.kernels.stock_layers import LAYERS

L = tf.keras.layers
DTYPES = ["bfloat16", "float16"]
# How far a product is off whose operands and result are rounded: three times half a digit, and
# what the sums of some 50 products add.
ROUNDED = {"bfloat16": 4 * 2**-9, "float16": 4 * 2**-12}
WITH_PRODUCTS = [
    *("Dense", "Dense of a sequence", "EinsumDense", "Conv1D", "Conv2D", "Conv2DTranspose"),
    *("DepthwiseConv2D", "LSTM"),
]


def policy_of(dtype):
    return keras_mp.Policy(f"mixed_{dtype}", output_dtype="float32")


def outputs_and_gradients(name, mode, dtype):
    x = tf.random.stateless_normal(LAYERS[name][1], [1, 2])
    layer = made(lambda: LAYERS[name][0](dtype=dtype))
    layer(x)

    @MODES[mode]
    def run(x):
        sources = [x, *layer.trainable_variables]
        return differentiated(lambda: layer(x), sources, lambda y: tf.reduce_sum(y * tf.sin(y)))

    return run(x)


@pytest.mark.parametrize(("name", "mode", "dtype"), pairs(WITH_PRODUCTS, MODES, DTYPES))
def test_outputs_are_those_of_float32_and_gradients_those_of_16_bits(name, mode, dtype):
    # XLA adds up in another order anyway.
    own_mode = "eager" if mode == "jit" else mode
    expected, exact = outputs_and_gradients(name, own_mode, "float32")
    found, gradients = outputs_and_gradients(name, mode, policy_of(dtype))
    assert found.dtype == tf.float32
    np.testing.assert_allclose(
        found, expected, rtol=1e-5 * (mode == "jit"), atol=1e-6 * (mode == "jit")
    )
    errors = [float(tf.norm(a - b) / tf.norm(b)) for a, b in zip(gradients, exact)]
    assert all(gradient.dtype == tf.float32 for gradient in gradients)
    # Older XLAs do without casts to 16 bits and back.
    assert max(errors) > 0 or mode == "jit"
    assert max(errors) < ROUNDED[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_slow_and_wrong_kernels_are_avoided_in_eager_gradients_too(dtype, monkeypatch):
    inside.set_slow(monkeypatch)
    (_, eager), (_, graph) = (
        outputs_and_gradients("Conv2D", mode, policy_of(dtype)) for mode in ("eager", "function")
    )
    for one, other in zip(eager, graph):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_the_gradient_is_that_of_a_product_in_16_bits():
    x = tf.constant(np.random.RandomState(0).normal(size=(4, 8)), tf.float32)
    layer = L.Dense(3, use_bias=False, dtype=policy_of("bfloat16"))
    layer.build([None, 8])
    y, found = differentiated(lambda: layer(x), layer.trainable_variables[0], tf.square)
    low = [tf.cast(each, tf.bfloat16) for each in (x, 2 * y)]
    expected = tf.cast(tf.matmul(*low, transpose_a=True), tf.float32)
    np.testing.assert_array_equal(found, expected)


def test_second_derivatives():
    layer = L.Dense(1, use_bias=False, kernel_initializer="ones", dtype=policy_of("bfloat16"))
    x = tf.Variable([[2.0, 3.0]])
    first, second = differentiated(lambda: differentiated(lambda: layer(x) ** 3, x)[1], x)
    np.testing.assert_array_equal(first, [[75.0, 75.0]])
    np.testing.assert_array_equal(second, [[60.0, 60.0]])


def test_it_is_a_policy_of_its_own():
    policy = policy_of("bfloat16")
    plain = keras_mp.Policy("mixed_bfloat16")
    assert repr(policy) == '<Policy "mixed_bfloat16", output_dtype="float32">'
    assert (policy.name, policy.compute_dtype) == ("mixed_bfloat16", "float32")
    assert (policy.variable_dtype, policy.output_dtype) == ("float32", "float32")
    assert policy.low_precision_dtype == tf.bfloat16
    assert policy != plain
    assert plain.output_dtype is None
    assert keras_mp.Policy("mixed_bfloat16", output_dtype="bfloat16") == plain
    assert keras_mp.Policy("float32", output_dtype=tf.float32) == keras_mp.Policy("float32")
    scaled = keras_mp.Policy("mixed_float16", 8, output_dtype="float32")
    assert "FixedLossScale" in repr(scaled)
    assert repr(scaled).endswith(', output_dtype="float32">')


@pytest.mark.parametrize(
    ("name", "output_dtype", "error"),
    [
        ("mixed_bfloat16", "float16", ValueError),
        ("mixed_bfloat16", "float64", ValueError),
        ("mixed_float16", tf.int32, ValueError),
        ("float32", "bfloat16", ValueError),
        ("bfloat16", "float32", ValueError),
        ("mixed_bfloat16", "half a byte", TypeError),
        ("mixed_bfloat16", {}, TypeError),
    ],
)
def test_bad_output_dtypes(name, output_dtype, error):
    with pytest.raises(error, match=r"output.dtype.*Received: output_dtype="):
        keras_mp.Policy(name, output_dtype=output_dtype)


X = np.random.RandomState(0).normal(size=[64, 6]).astype("float32")


def test_conversion_keeps_it():
    policy = policy_of("bfloat16")
    model = tf.keras.Sequential([tf.keras.Input([6]), L.Dense(3, dtype=policy)])
    converted = keras_mp.convert(model, "float32")
    assert converted.layers[-1].dtype_policy.name == "float32"
    assert keras_mp.convert(converted, policy).layers[-1].dtype_policy == policy


def test_on_replicas_and_inside_of_regions():
    policy = policy_of("bfloat16")

    def gradient_of(layer):
        return differentiated(lambda: layer(X), layer.trainable_variables[0], tf.sin)[1]

    strategy = mirrored(2)
    with strategy.scope():
        layer = L.Dense(3, kernel_initializer="ones", dtype=policy)
        layer.build([None, 6])
    on_replicas = strategy.run(tf.function(lambda: gradient_of(layer)))
    alone = gradient_of(layer)
    with keras_mp.autocast("float16"):
        in_region = layer(X)
        other = gradient_of(layer)
    for found in (*strategy.experimental_local_results(on_replicas), other):
        np.testing.assert_array_equal(found, alone)
    np.testing.assert_array_equal(in_region, layer(X))
    exact = L.Dense(3, kernel_initializer="ones")
    exact.build([None, 6])
    assert not np.array_equal(alone, gradient_of(exact))


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 reads the config of any policy.")
def test_layers_made_of_a_name_are_as_before():
    policy_of("bfloat16")
    assert type(L.Dense(1, dtype="mixed_bfloat16").dtype_policy) is tf.keras.DTypePolicy
