"""Convolutions whose strides make TensorFlow's bfloat16 kernels go wrong.

Seen with TensorFlow 2.21 on a CPU with bfloat16 units: where a window fits into the width of an
image only once, and the stride is larger than 1, the result is off by its own size. Such a
convolution is computed in float32, and rounded once.

This module needs TensorFlow only.
"""

import math
from typing import Any

import tensorflow as tf

from keras_mp.kernels.trials import Kernel, Table, shape_of


def _fits_once(
    input: object,
    filter: object,
    strides: Any,
    padding: Any,
    explicit_paddings: Any = (),
    data_format: Any = "",
    dilations: Any = None,
    **others: object,
) -> bool:
    """Whether the window fits into the width of an image only once, and has a stride."""
    del others
    rank, image, window = len(strides), shape_of(input), shape_of(filter)
    width = rank - 1 if tf.compat.as_str(data_format or "").startswith("NC") else rank - 2
    stride = strides[width]
    if rank != image.rank or rank != window.rank or stride == 1:
        return False
    size, length = image[width], window[rank - 3]
    if size is None or length is None:
        return False
    if tf.compat.as_str(padding) == "SAME":
        return bool(size <= stride)
    around = sum((explicit_paddings or [0] * 2 * rank)[2 * width : 2 * width + 2])
    covered = (length - 1) * (dilations or [1] * rank)[width] + 1
    # Strides may be numbers of NumPy, whose False is not Python's.
    return bool(size + around < covered + stride)


def _kernel(*image: int) -> Kernel:
    """Returns the kernel of a convolution.

    Args:
        *image: ints. The shape of an image for which it is wrong, if it is, without the batch.
    """
    size = image[-2]

    def example(dtype: tf.DType, _: bool) -> dict[str, Any]:
        # Each number says where along the width it is, so that mixing them up is noticed.
        along = tf.range(size, dtype=tf.float32)[:, tf.newaxis]
        input = tf.cast(tf.broadcast_to(along, image), dtype)
        return {
            "input": input[tf.newaxis],
            "filter": tf.tile(input[..., tf.newaxis], [1] * len(image) + [8]),
            "strides": [1, *[size] * (len(image) - 1), 1],
            "padding": "VALID",
        }

    squares = sum(i**2 for i in range(size)) * math.prod(image) / size
    return Kernel(example, squares, _fits_once, (True,))


KERNELS = {
    "Conv2D": _kernel(8, 8, 16),
    "Conv3D": _kernel(4, 4, 4, 16),
}

TABLE = Table(KERNELS)
