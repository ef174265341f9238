"""Keras inside of a region: float32 models, unchanged, on both Kerases."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import distance
from tests.models import digits
from tests.op_autocast.common import is_rounded, normal, region

K = tf.keras


def mlp():
    return [K.layers.Dense(32, "relu"), K.layers.Dropout(0.2), K.layers.Dense(10, "softmax")]


def convolutions():
    return [
        K.layers.Reshape([8, 8, 1]),
        K.layers.Conv2D(8, 3, activation="relu"),
        K.layers.BatchNormalization(),
        K.layers.MaxPooling2D(),
        K.layers.Flatten(),
        K.layers.Dense(10, "softmax"),
    ]


def recurrent():
    return [K.layers.Reshape([4, 16]), K.layers.LSTM(8), K.layers.Dense(10, "softmax")]


def attention():
    x = inputs = K.Input([64])
    x = K.layers.Dense(16)(K.layers.Reshape([8, 8])(x))
    x = K.layers.LayerNormalization()(x + K.layers.MultiHeadAttention(2, 8)(x, x))
    x = K.layers.Dense(16, "gelu")(x)
    return K.Model(inputs, K.layers.Dense(10, "softmax")(K.layers.Flatten()(x)))


def compiled(make, **kwargs):
    K.utils.set_random_seed(0)
    layers = make()
    model = K.Sequential([K.Input([64]), *layers]) if isinstance(layers, list) else layers
    loss = "sparse_categorical_crossentropy"
    model.compile(K.optimizers.Adam(0.01), loss, metrics=["acc"], **kwargs)
    return model


@pytest.mark.parametrize("make", [convolutions, recurrent, attention])
def test_fit(make):
    x, y = (each[:96] for each in digits())
    losses = {}
    for dtype in (None, "bfloat16"):
        model = compiled(make)
        with region(dtype):
            history = model.fit(x, y, 32, 1, shuffle=False, verbose=0)
            predictions = model(x)  # eager, which saves tracing it
        losses[dtype] = history.history["loss"]
        assert predictions.dtype == tf.float32
        assert {tf.as_dtype(weight.dtype) for weight in model.weights} == {tf.float32}
    assert losses["bfloat16"] != losses[None]
    np.testing.assert_allclose(losses["bfloat16"], losses[None], rtol=0.05)
    # What was trained inside predicts in float32 outside.
    assert 0 < distance(predictions, model(x)) < 0.05


def test_within_a_mixed_policy_nothing_changes():
    x, y = (each[:64] for each in digits())
    losses = []
    for dtype in (None, "bfloat16"):
        with keras_mp.policy_scope("mixed_bfloat16"):
            model = compiled(mlp)
            with region(dtype):
                losses.append(model.fit(x, y, 32, 1, shuffle=False, verbose=0).history["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("policy", "of_last"), [("float32", None), (None, "mixed_float16")])
def test_layers_without_a_mixed_policy_are_in_the_region(policy, of_last):
    """Calls of all layers are seen from the first one in 16 bits on."""
    K.layers.Dense(1, dtype=keras_mp.Policy("mixed_float16"))(tf.ones([1, 2]))
    with keras_mp.policy_scope(policy):
        last = K.layers.Dense(2, dtype=of_last and keras_mp.Policy(of_last))
        inputs = K.Input([4])
        hidden = K.layers.Dense(4)(inputs)
        model = K.Model(inputs, [hidden, last(hidden)])
    for call in (model, tf.function(model)):
        with region("bfloat16"):
            hidden, _ = call(normal(3, 4))
        assert is_rounded(hidden)
        assert not is_rounded(call(normal(3, 4))[0])


def test_float16_with_loss_scaling():
    x, y = (each[:256] for each in digits())
    K.utils.set_random_seed(0)
    model = K.Sequential([K.Input([64]), *mlp()])
    optimizer = keras_mp.LossScaleOptimizer(K.optimizers.SGD(0.1))
    with keras_mp.autocast("float16"):
        model.compile(optimizer, "sparse_categorical_crossentropy")
        losses = model.fit(x, y, 32, 3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert float(optimizer.loss_scale.loss_scale) >= 2.0**15


def test_float16_without_loss_scaling_is_warned_about():
    model = K.Sequential([K.Input([64]), *mlp()])
    message = "region of `keras_mp.autocast` with float16, and without loss scaling"
    with keras_mp.autocast("float16"), pytest.warns(keras_mp.MixedPrecisionWarning, match=message):
        model.compile("sgd", "sparse_categorical_crossentropy")
