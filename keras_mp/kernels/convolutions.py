"""Convolutions whose strides make TensorFlow's bfloat16 kernels go wrong.

Seen with TensorFlow 2.21 on a CPU with bfloat16 units: where a window fits into the width of an
image only once, and the stride is larger than 1, the result is off by its own size. Such a
convolution is computed in float32, and rounded once.

This module needs TensorFlow only.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.kernels.trials import Kernel, Table, shape_of


class _Axis(NamedTuple):
    """One axis of an image, as a convolution goes along it.

    Attributes:
        size: int. The size of the image.
        window: int. How much of it the filter covers.
        stride: int.
        padding: tuple of two ints, before and behind.
    """

    size: int
    window: int
    stride: int
    padding: tuple[int, int]

    @property
    def is_one_place(self) -> bool:
        """Whether the window fits in only once."""
        return self.size + sum(self.padding) < self.window + self.stride


def _axes(arguments: Mapping[str, Any]) -> dict[int, _Axis]:
    """The axes of the image by their numbers, the width last.

    There are none where sizes are not known.
    """
    strides, padding = arguments["strides"], tf.compat.as_str(arguments["padding"])
    rank = len(strides)
    image, filter = shape_of(arguments["input"]), shape_of(arguments["filter"])
    if rank != image.rank or rank != filter.rank:
        return {}
    data_format = tf.compat.as_str(arguments.get("data_format") or "")
    first = 2 if data_format.startswith("NC") else 1
    axes = {}
    for i, length in zip(range(first, first + rank - 2), filter):
        size, stride = image[i], strides[i]
        if size is None or length is None:
            return {}
        window = (length - 1) * (arguments.get("dilations") or [1] * rank)[i] + 1
        around = 0, 0
        if padding == "SAME":
            missing = max((-(-size // stride) - 1) * stride + window - size, 0)
            around = missing // 2, missing - missing // 2
        elif padding == "EXPLICIT":
            around = tuple(arguments["explicit_paddings"][2 * i : 2 * i + 2])
        axes[i] = _Axis(size, window, stride, around)
    return axes


def _kernel(op: Callable[..., tf.Tensor], *image: int) -> Kernel:
    """Returns the kernel of a convolution.

    Args:
        op: the raw operation.
        *image: ints. The shape of an image for which it is wrong, if it is, without the batch.
    """
    parameters = tuple(inspect.signature(op).parameters)
    size = image[-2]

    def never_moves(*args: Any, **kwargs: Any) -> bool:
        *_, width = (None, *_axes({**dict(zip(parameters, args)), **kwargs}).values())
        # Strides may be numbers of NumPy, whose False is not Python's.
        return bool(width is not None and width.stride > 1 and width.is_one_place)

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
    return Kernel(example, squares, never_moves, (True,))


KERNELS = {
    "Conv2D": _kernel(tf.raw_ops.Conv2D, 8, 8, 16),
    "Conv3D": _kernel(tf.raw_ops.Conv3D, 4, 4, 4, 16),
}

TABLE = Table(KERNELS)
