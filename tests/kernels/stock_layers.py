"""Layers of Keras, with the shapes of their inputs, and functions that sum; without keras_mp.

What they add up is more than 16 bits count.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

L = tf.keras.layers
ROWS = 10_000

LAYERS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "Dense": (lambda **kw: L.Dense(2, "gelu", **kw), (ROWS, 2)),
    "Dense of a sequence": (lambda **kw: L.Dense(4, "silu", **kw), (2, 300, 4)),
    "Conv1D": (lambda **kw: L.Conv1D(4, 3, activation="elu", **kw), (2, 600, 3)),
    "Conv2D": (lambda **kw: L.Conv2D(4, 3, activation="selu", **kw), (2, 24, 24, 3)),
    "Conv2D of one place": (lambda **kw: L.Conv2D(4, 8, 8, **kw), (2, 8, 8, 16)),
    "Conv2DTranspose": (lambda **kw: L.Conv2DTranspose(4, 3, **kw), (2, 8, 8, 3)),
    "Conv3D": (lambda **kw: L.Conv3D(4, 2, activation="tanh", **kw), (2, 6, 6, 6, 3)),
    "DepthwiseConv2D": (lambda **kw: L.DepthwiseConv2D(2, **kw), (ROWS // 4, 3, 3, 2)),
    "EinsumDense": (
        lambda **kw: L.EinsumDense("abc,cd->abd", [None, 2], bias_axes="d", **kw),
        (20, 200, 2),
    ),
    "Embedding": (lambda **kw: L.Embedding(2, 3, **kw), (40, 100)),
    "LSTM": (lambda **kw: L.LSTM(3, **kw), (4, 6, 2)),
    "GRU": (lambda **kw: L.GRU(3, **kw), (4, 6, 2)),
    "Bidirectional": (lambda **kw: L.Bidirectional(L.LSTM(3, **kw), **kw), (4, 6, 2)),
    "BatchNormalization": (L.BatchNormalization, (64, 8, 8, 4)),
    "LayerNormalization": (L.LayerNormalization, (64, 16)),
    "MultiHeadAttention": (lambda **kw: L.MultiHeadAttention(2, 4, **kw), (2, 32, 8)),
    "UpSampling2D": (lambda **kw: L.UpSampling2D(2, interpolation="bilinear", **kw), (1, 8, 8, 2)),
    "AveragePooling2D": (lambda **kw: L.AveragePooling2D(8, **kw), (2, 16, 16, 4)),
    "MaxPooling2D": (lambda **kw: L.MaxPooling2D(2, **kw), (2, 16, 16, 4)),
    "Softmax": (L.Softmax, (16, 40)),
}


def inputs_of(name: str) -> list[tf.Tensor]:
    """What a layer is called with, between 0.5 and 1.5."""
    shape = LAYERS[name][1]
    x = tf.random.stateless_uniform(shape, [1, 2], 0.5, 1.5)
    other = tf.identity(x)  # which has gradients of its own
    return {"MultiHeadAttention": [x, other], "Embedding": [tf.zeros(shape, tf.int32)]}.get(
        name, [x]
    )


def results_and_gradients(
    call: Callable[..., Any],
    *inputs: tf.Tensor,
    weights: Any = (),
    wrap: Callable[[Any], Any] = lambda function: function,
) -> list[np.ndarray]:
    """What a call returns, and the gradients of its inputs and of weights, in float64.

    Every result matters for them, and each number in its own way.
    """

    def step(*inputs: tf.Tensor) -> list[Any]:
        of_these = [each for each in inputs if each.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(of_these)
            results = tf.nest.flatten(call(*inputs))
            loss = tf.add_n([_of_all_numbers(tf.cast(each, tf.float64)) for each in results])
        return [*results, *tape.gradient(loss, [*of_these, *weights])]

    return [tf.cast(tf.convert_to_tensor(x), tf.float64).numpy() for x in wrap(step)(*inputs)]


def _of_all_numbers(y: tf.Tensor) -> tf.Tensor:
    factors = tf.cos(tf.cast(tf.range(tf.size(y)), tf.float64))
    return tf.reduce_sum(y * (1.5 + tf.reshape(factors, tf.shape(y))))


def of_zeros(function: Callable[..., Any], shape: list[int], upstream: tf.Tensor) -> tf.Tensor:
    """The gradient of a function of zeros."""
    argument = tf.zeros(shape, upstream.dtype)
    with tf.GradientTape() as tape:
        tape.watch(argument)
        y = function(argument)
    return tf.convert_to_tensor(tape.gradient(y, argument, upstream))


IDS = np.zeros(ROWS, "int32")
# Sums of the first column of a tensor of `ROWS` by 3.
SUMS: dict[str, Callable[[tf.Tensor], Any]] = {
    "sum": lambda x: tf.reduce_sum(x, 0)[0],
    "mean": lambda x: tf.reduce_mean(x, 0)[0] * 64,
    "euclidean norm": lambda x: tf.math.reduce_euclidean_norm(x, 0)[0] * 32,
    "cumsum": lambda x: tf.cumsum(x)[-1, 0],
    "segment_sum": lambda x: tf.math.segment_sum(x, IDS)[0, 0],
    "segment_mean": lambda x: tf.math.segment_mean(x, IDS)[0, 0] * 64,
    "unsorted_segment_sum": lambda x: tf.math.unsorted_segment_sum(x, IDS, 2)[0, 0],
    "scatter_nd": lambda x: tf.scatter_nd(IDS[:, None], x, [2, 3])[0, 0],
    "tensor_scatter_nd_add": lambda x: tf.tensor_scatter_nd_add(
        tf.zeros([2, 3], x.dtype), IDS[:, None], x
    )[0, 0],
    "IndexedSlices": lambda x: tf.convert_to_tensor(tf.IndexedSlices(x, tf.constant(IDS), [2, 3]))[
        0, 0
    ],
    "gather": lambda x: of_zeros(lambda table: tf.gather(table, IDS), [2, 3], x)[0, 0],
    "broadcast": lambda x: of_zeros(lambda offset: x + offset, [3], x)[0],
    "scale": lambda x: of_zeros(lambda scale: tf.ones_like(x) * scale, [3], x)[0],
    "tile": lambda x: of_zeros(lambda offset: tf.tile(offset, [ROWS, 1]), [1, 3], x)[0, 0],
    "bias, channels first": lambda x: of_zeros(
        lambda bias: tf.nn.bias_add(x[..., None], bias, data_format="NCHW"), [3], x[..., None]
    )[0],
    "upsampling": lambda x: of_zeros(
        lambda image: tf.image.resize(image, [100, 100], "nearest"),
        [1, 1, 1, 3],
        tf.reshape(x, [1, 100, 100, 3]),
    )[0, 0, 0, 0],
    # Of one box: TensorFlow adds up those of several in threads, in float32 too.
    "crop": lambda x: of_zeros(
        lambda image: tf.cast(
            tf.image.crop_and_resize(image, [[0.0, 0.0, 1.0, 1.0]], [0], [100, 100]), image.dtype
        ),
        [1, 1, 1, 3],
        tf.reshape(x, [1, 100, 100, 3]),
    )[0, 0, 0, 0],
}
