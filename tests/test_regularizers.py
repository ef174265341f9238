"""Activity regularizers that do not overflow in float16."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import regularizers
from tests.common import Mixes, differentiated
from tests.models import compiled_model

K = tf.keras
X = np.full([4, 8], 200.0, "float32")  # the sum of the squares is 1,280,000


def penalty(layer, compiled=True, **kwargs):
    model = K.Sequential([K.Input([8]), layer])
    if compiled:
        model.compile(K.optimizers.SGD(0.0), "mse", **kwargs)
    target = model(X)
    return model.evaluate(X, target, verbose=0) if compiled else float(sum(model.losses))


def own_penalty(x):
    return 1e-3 * tf.reduce_sum(tf.square(x))


@pytest.mark.parametrize(
    ("regularizer", "eager"),
    [("l2", False), ("l1", True), (K.regularizers.L1L2(0.1, 0.1), True), (own_penalty, True)],
)
def test_they_compute_in_float32(regularizer, eager):
    results = {}
    for policy in ("mixed_float16", "mixed_bfloat16", "float32"):
        keras_mp.set_global_policy(policy)
        layer = K.layers.Activation("linear", activity_regularizer=regularizer)
        results[policy] = penalty(layer, run_eagerly=eager)
    assert results["float32"] > 10
    assert results["mixed_float16"] == pytest.approx(results["float32"])
    assert results["mixed_bfloat16"] == pytest.approx(results["float32"], rel=1e-2)


def test_without_it_stock_overflows():
    def of_layer(regularizer="l2", **kwargs):
        layer = K.layers.Activation("linear", activity_regularizer=regularizer, **kwargs)
        return penalty(layer, compiled=False)

    assert np.isinf(of_layer(dtype=K.mixed_precision.Policy("mixed_float16")))
    keras_mp.set_global_policy("mixed_float16")
    assert np.isfinite(of_layer())
    assert np.isfinite(of_layer(keras_mp.losses.as_float32(K.regularizers.get("l2"))))


def test_no_regularizer_is_replaced():
    keras_mp.set_global_policy("mixed_float16")
    l2 = K.regularizers.L2()
    dense = K.layers.Dense(8, activity_regularizer=l2, kernel_regularizer=l2)
    model = compiled_model(dense, inputs=8)
    model.fit(X / 200, X / 200, verbose=0)
    assert dense.activity_regularizer is l2
    assert dense.kernel_regularizer is l2


def bidirectional(_):
    return K.layers.Bidirectional(
        K.layers.LSTM(3, activity_regularizer="l2", return_sequences=True)
    )


@pytest.mark.parametrize("wrap", [K.layers.TimeDistributed, bidirectional])
def test_wrapped_layers(wrap):
    x = 100 * np.ones([2, 5, 4], "float32")
    results = {}
    for policy in ("mixed_float16", "float32"):
        keras_mp.set_global_policy(policy)
        K.utils.set_random_seed(0)
        wrapped = wrap(K.layers.Dense(3, kernel_initializer="ones", activity_regularizer="l2"))
        model = K.Sequential([K.Input([5, 4]), wrapped])
        model.compile("sgd", "mse")
        results[policy] = model.evaluate(x, np.zeros(model(x).shape), verbose=0)
    assert results["mixed_float16"] == pytest.approx(results["float32"], rel=1e-2)


def test_config_repr_and_bad_input():
    wide = regularizers.Float32Regularizer(K.regularizers.L1(0.5))
    again = regularizers.Float32Regularizer.from_config(wide.get_config())
    assert float(again(tf.constant([-2], "float16"))) == 1
    assert repr(wide).startswith("<Float32Regularizer(regularizer=")
    with pytest.raises(ValueError, match="Expected a regularizer.*Received: regularizer=None"):
        regularizers.Float32Regularizer(None)
    with pytest.raises(ValueError, match="nonsense"):
        regularizers.Float32Regularizer("nonsense")


WEIGHTS = np.array([[300.0, 400.0], [1e-4, 2e-4], [3.0, 4.0], [60000.0, 65000.0]], "float32")
MANY = np.full([700, 100], 0.02, "float32")
C, R = K.constraints, K.regularizers


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("function", "x"),
    [
        (C.MaxNorm(1.0), WEIGHTS),
        (C.MinMaxNorm(0.5, 1.0), WEIGHTS),
        (C.UnitNorm(), WEIGHTS),
        (R.L1(0.01), WEIGHTS),
        (R.L2(0.01), MANY * 3e3),
        (R.L1L2(0.01, 0.01), MANY * 3e3),
        (R.OrthogonalRegularizer(mode="rows"), MANY),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_layer_calls_them_on_its_outputs(function, x, dtype):
    def first(y):  # Of what is of one length the sum has no gradient to speak of.
        return tf.cast(y[..., 0] if y.shape.rank else y, tf.float32)

    layer = Mixes(function, dtype=keras_mp.Policy(f"mixed_{dtype}", model_outputs=None))
    rounded = tf.cast(tf.cast(x, dtype), tf.float32)
    right = differentiated(lambda: function(rounded), rounded, first)
    for run in (layer, tf.function(layer), tf.function(layer, jit_compile=True)):
        for found, exact in zip(differentiated(lambda: run(rounded), rounded, first), right):
            rtol = 2.0 ** (-10 if dtype == "float16" else -7)
            exact = tf.cast(tf.cast(exact, found.dtype), tf.float32)
            np.testing.assert_allclose(tf.cast(found, tf.float32), exact, rtol=rtol, atol=1e-6)
