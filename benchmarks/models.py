"""The models of which `step` measures a step of training, and their sizes."""

from typing import Any, NamedTuple

import tensorflow as tf


class Sizes(NamedTuple):
    """How large a model and its batch are.

    Attributes:
        blocks: how many blocks, or layers.
        width: of a layer; of a ResNet, its filters in the first third of its blocks.
        batch: examples in a batch.
        steps: length of a sequence; of a ResNet, the size of an image.
        classes: what the head tells apart, and how many words there are.
    """

    blocks: int
    width: int
    batch: int
    steps: int = 1
    classes: int = 10


SIZES = {
    "full": {
        "MLP": Sizes(6, 1024, 512),
        "ResNet": Sizes(6, 32, 32, 32),
        "transformer": Sizes(4, 512, 16, 128, 1000),
        "language model": Sizes(3, 768, 8, 256, 4000),
        "LSTM": Sizes(2, 512, 64, 64),
    },
    "small": {
        "MLP": Sizes(4, 512, 128),
        "ResNet": Sizes(3, 16, 8, 32),
        "transformer": Sizes(1, 256, 8, 64, 500),
        "language model": Sizes(1, 256, 4, 64, 1000),
        "LSTM": Sizes(1, 128, 16, 16),
    },
}
HEAD_WIDTH = 64  # of an attention


def make(name: str, sizes: Sizes, head: str | None = "float32") -> tuple[Any, Any, Any]:
    """Makes a model of the current Keras under its current policy, and a batch of data.

    Args:
        name: str. A key of `SIZES["full"]`.
        sizes: Sizes.
        head: str. The dtype of the last layer; None for the current policy.

    Returns:
        The model, whose outputs are logits in float32, its inputs and labels.
    """
    layers, (blocks, width, batch, steps, classes) = tf.keras.layers, sizes
    words = name in ("transformer", "language model")
    shape = {
        "MLP": [width],
        "ResNet": [steps, steps, 3],
        "LSTM": [steps, width],
    }.get(name, [steps])
    x = inputs = tf.keras.Input(shape, dtype="int32" if words else "float32")
    if name == "MLP":
        for _ in range(blocks):
            x = layers.Dense(width, activation="relu")(x)
    elif name == "LSTM":
        for i in range(blocks):
            x = layers.LSTM(width, return_sequences=i < blocks - 1)(x)
    elif name == "ResNet":
        x = layers.Activation("relu")(_convolved(layers, x, width, 3, 1))
        for filters, strides in resnet_blocks(blocks, width):
            x = _residual(layers, x, filters, strides)
        x = layers.GlobalAveragePooling2D()(x)
    else:
        x = layers.Embedding(classes, width)(x)
        for _ in range(blocks):
            y = layers.LayerNormalization()(x)
            attention = layers.MultiHeadAttention(width // HEAD_WIDTH, HEAD_WIDTH)
            x = layers.Add()([x, attention(y, y, use_causal_mask=name == "language model")])
            y = layers.LayerNormalization()(x)
            y = layers.Dense(4 * width, activation="gelu")(y)
            x = layers.Add()([x, layers.Dense(width)(y)])
        x = layers.LayerNormalization()(x)
        if name == "transformer":
            x = layers.GlobalAveragePooling1D()(x)
    outputs = layers.Dense(classes, dtype=head)(x)
    of_labels = [batch, steps] if name == "language model" else [batch]
    x = tf.random.normal([batch, *shape])
    if words:
        x = tf.random.uniform([batch, *shape], maxval=classes, dtype=tf.int32)
    y = tf.random.uniform(of_labels, maxval=classes, dtype=tf.int32)
    return tf.keras.Model(inputs, outputs), x, y


def resnet_blocks(blocks: int, width: int) -> list[tuple[int, int]]:
    """The filters and the strides of each block: twice the filters after each third of them."""
    thirds = [3 * i // blocks for i in range(blocks)]
    return [
        (width * 2**third, 2 if i and third > thirds[i - 1] else 1)
        for i, third in enumerate(thirds)
    ]


def _convolved(layers: Any, x: Any, filters: int, size: int, strides: int) -> Any:
    x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
    return layers.BatchNormalization()(x)


def _residual(layers: Any, x: Any, filters: int, strides: int) -> Any:
    y = layers.Activation("relu")(_convolved(layers, x, filters, 3, strides))
    y = _convolved(layers, y, filters, 3, 1)
    shortcut = x if strides == 1 else _convolved(layers, x, filters, 1, strides)
    return layers.Activation("relu")(layers.Add()([y, shortcut]))
