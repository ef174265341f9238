"""The models that the check trains, under the policy that is in force."""

from collections.abc import Callable

import tensorflow as tf

_CLASSES, _WORDS = 10, 1000


def convolutional() -> tf.keras.Model:
    """A small network with two convolutions for images of 16x16.

    Its outputs are float32.
    """
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input([16, 16, 3]),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Conv2D(8, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, dtype="float32"),
        ]
    )


def make(name: str, size: int) -> tuple[tf.keras.Model, tf.Tensor, tf.Tensor]:
    """Makes one of `MODELS`.

    Args:
        name: str.
        size: int. The number of units, filters, or the width.

    Returns:
        The model, whose outputs are logits in float32, a batch of inputs, and their labels.
    """
    layers_of, batch, shape = MODELS[name]
    inputs = tf.keras.Input(shape, dtype="int32" if name == "transformer" else "float32")
    outputs = tf.keras.layers.Dense(_CLASSES, dtype="float32")(layers_of(inputs, size))
    shape, seed = [batch, *shape], (1, 2)
    if name == "transformer":
        x = tf.random.stateless_uniform(shape, seed, maxval=_WORDS, dtype=tf.int32)
    else:
        x = tf.random.stateless_normal(shape, seed)
    y = tf.random.stateless_uniform([batch], seed, maxval=_CLASSES, dtype=tf.int32)
    return tf.keras.Model(inputs, outputs), x, y


def _dense(x: tf.Tensor, units: int) -> tf.Tensor:
    for _ in range(4):
        x = tf.keras.layers.Dense(units, activation="relu")(x)
    return x


def _residual(x: tf.Tensor, filters: int) -> tf.Tensor:
    layers = tf.keras.layers

    def convolve(x: tf.Tensor) -> tf.Tensor:
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        return layers.Activation("relu")(layers.BatchNormalization()(x))

    x = convolve(x)
    for _ in range(3):
        x = layers.Add()([x, convolve(convolve(x))])
    return layers.GlobalAveragePooling2D()(x)


def _transformer(x: tf.Tensor, width: int) -> tf.Tensor:
    layers = tf.keras.layers
    x = layers.Embedding(_WORDS, width)(x)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, width // 4)(y, y)])
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    return layers.GlobalAveragePooling1D()(x)


# Layers between inputs and logits, examples in a batch, and the shape of one.
MODELS: dict[str, tuple[Callable[[tf.Tensor, int], tf.Tensor], int, list[int]]] = {
    "dense": (_dense, 256, [512]),
    "residual": (_residual, 32, [32, 32, 3]),
    "transformer": (_transformer, 32, [64]),
}
