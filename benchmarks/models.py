"""The models that are trained: an MLP, a small ResNet, a transformer and an LSTM."""

from typing import Any

CLASSES = 10
VOCABULARY = 1000


def make(name: str, batch: int | None = None) -> tuple[Any, Any, Any]:
    """Makes a model of the current Keras, under its current policy, and a batch of data.

    Args:
        name: str. One of `MODELS`.
        batch: int. How many examples; defaults to what is measured.

    Returns:
        The model, whose outputs are logits in float32, its inputs and labels.
    """
    import tensorflow as tf

    features, default_batch, shape = MODELS[name]
    inputs = tf.keras.Input(shape)
    logits = tf.keras.layers.Dense(CLASSES, dtype="float32")(features(tf.keras.layers, inputs))
    shape = [batch or default_batch, *shape]
    if name == "transformer":
        x = tf.random.uniform(shape, maxval=VOCABULARY, dtype=tf.int32)
    else:
        x = tf.random.normal(shape)
    y = tf.random.uniform(shape[:1], maxval=CLASSES, dtype=tf.int32)
    return tf.keras.Model(inputs, logits), x, y


def _mlp(layers, x):
    for _ in range(3):
        x = layers.Dense(2048, activation="relu")(x)
    return x


def _resnet(layers, x):
    def convolve(x, filters, size, strides=1):
        x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    x = layers.Activation("relu")(convolve(x, 32, 3))
    for filters, strides in ((32, 1), (64, 2), (128, 2)):
        y = layers.Activation("relu")(convolve(x, filters, 3, strides))
        y = convolve(y, filters, 3)
        shortcut = x if strides == 1 else convolve(x, filters, 1, strides)
        x = layers.Activation("relu")(layers.Add()([y, shortcut]))
    return layers.GlobalAveragePooling2D()(x)


def _transformer(layers, x):
    width, heads = 256, 4
    x = layers.Embedding(VOCABULARY, width)(x)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(heads, width // heads)(y, y)])
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    return layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))


def _lstm(layers, x):
    return layers.LSTM(512)(x)


# Layers between inputs and logits, examples in a batch, shape of an example.
MODELS = {
    "MLP": (_mlp, 1024, [2048]),
    "ResNet": (_resnet, 64, [32, 32, 3]),
    "transformer": (_transformer, 32, [64]),
    "LSTM": (_lstm, 64, [32, 128]),
}
