"""What programs call of keras_mp, after which `controls` looks at what is not ours."""

import threading
from typing import Any

import tensorflow as tf

import keras_mp
from tests.kernels.stock_layers import ROWS

K = tf.keras
L = K.layers


def noise(*shape: int) -> tf.Tensor:
    return tf.random.stateless_uniform(shape, [1, 2], -1, 1)


def rows(dtype: str = "float32") -> tf.Tensor:
    return tf.cast(tf.random.stateless_uniform([ROWS, 2], [1, 2], 0.5, 1.5), dtype)


def imported() -> None:
    pass


def policy() -> None:
    keras_mp.Policy("mixed_bfloat16")
    keras_mp.set_global_policy("mixed_bfloat16")


def model_of(dtype: str) -> Any:
    with keras_mp.policy_scope(f"mixed_{dtype}"):
        layers = [L.Conv2D(4, 3, activation="gelu"), L.BatchNormalization(), L.MaxPooling2D(2)]
        layers += [L.Reshape([5, 20]), L.LSTM(4), L.Dense(2, dtype="float32")]
        return K.Sequential([K.Input([12, 12, 2]), *layers])


def train(model: Any) -> None:
    model.compile(keras_mp.LossScaleOptimizer(K.optimizers.SGD(0.01)), "mse")
    model.fit(noise(8, 12, 12, 2), noise(8, 2), verbose=0)


def fit() -> None:
    train(model_of("bfloat16"))


def own_loop(dtype: str = "bfloat16") -> None:
    layer = L.Dense(2, "gelu", dtype=keras_mp.Policy(f"mixed_{dtype}"))
    scaler = keras_mp.GradScaler()
    x = rows()
    for step in (lambda: layer(x), tf.function(lambda: layer(x))):
        with tf.GradientTape() as tape:
            loss = scaler.scale(keras_mp.losses.MeanSquaredError()(tf.zeros([ROWS, 2]), step()))
        scaler.unscale(tape.gradient(loss, layer.trainable_variables))


def another_dtype() -> None:
    own_loop("float16")


def autocast() -> None:
    with keras_mp.autocast("bfloat16"), tf.GradientTape() as tape:
        x = rows()
        tape.watch(x)
        y = tf.nn.gelu(x @ noise(2, 2))
    tape.gradient(y, x)


def autocast_scope() -> None:
    with keras_mp.autocast_scope("float16"), tf.GradientTape() as tape:
        x = rows("float16")
        tape.watch(x)
        y = tf.reduce_sum(tf.nn.gelu(x), 0)
    tape.gradient(y, x)


def tools() -> None:
    keras_mp.summary(model_of("float16"), len)
    keras_mp.numerics.check(model_of("bfloat16"), noise(4, 12, 12, 2).numpy())
    keras_mp.enable_float32_sums()


# After each of these groups, controls are looked at.
CALLS = ((imported, policy, own_loop), (another_dtype, fit, autocast, autocast_scope, tools))


def keep_training(is_over: threading.Event) -> None:
    """Goes on until somebody says so."""
    model = model_of("bfloat16")
    while not is_over.is_set():
        train(model)
        another_dtype()
        autocast()
