"""Python functions of TensorFlow and Keras that need float32 as a whole.

What the table of operations says (`kernels/door.py`) is enough for nearly all of them. These decide
by the dtype of their inputs in Python, or refuse 16 bits there; or they multiply matrices, or
subtract products, where rounded products are not good enough. Their results are rounded once, and
have faces that are exact.

This module needs TensorFlow only.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from keras_mp.hooks import Everywhere, Replacement, faces, reach
from keras_mp.hooks.faces import EXACT
from keras_mp.variables import scope

# They refuse 16 bits, `range` on TensorFlow 2.16.
_REFUSING = ("range", "signal.rfft", "signal.rfft2d", "signal.rfft3d")
# They multiply matrices, or images by a few numbers.
_MULTIPLYING = (
    *("linalg.expm", "linalg.lstsq", "linalg.pinv", "image.ssim", "image.ssim_multiscale"),
    *("image.rgb_to_grayscale", "image.rgb_to_yuv", "image.yuv_to_rgb", "image.rgb_to_yiq"),
    "image.yiq_to_rgb",
)
NAMES = (*_REFUSING, *_MULTIPLYING)
# They return float32, whatever the dtype of their inputs.
_OF_FLOAT32 = ("image.ssim", "image.ssim_multiscale")


def replacements() -> tuple[Replacement, ...]:
    """Returns the rows of TensorFlow's functions."""
    return tuple(
        Replacement(
            Everywhere(operator.attrgetter(name)(tf), (name.rpartition(".")[2],)),
            functools.partial(in_float32, rounds=name not in _OF_FLOAT32),
        )
        for name in NAMES
    )


def rows(functions: Iterable[Any]) -> list[Replacement]:
    """Returns the rows of other functions, such as Keras's.

    Args:
        functions: functions of tensors.
    """
    return [Replacement(Everywhere(each), in_float32) for each in functions]


def in_float32(original: Callable[..., Any], rounds: bool = True) -> Callable[..., Any]:
    """Returns a function that computes in float32 in layers of 16 bits and in regions.

    Args:
        original: function of tensors.
        rounds: bool. Whether its results are in the dtype of its inputs. Defaults to True.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        # TensorFlow casts a variable only when it reads it.
        args, kwargs = tf.nest.map_structure(scope.read, (args, kwargs))
        leaves = tf.nest.flatten((args, kwargs))
        low = next((each.dtype for each in leaves if faces.is_low_tensor(each)), None)
        with reach.without_region():
            if low is None:
                return original(*args, **kwargs)
            args, kwargs = tf.nest.map_structure(faces.widened, (args, kwargs))
            with reach.decided():
                result = original(*args, **kwargs)
        if not rounds:
            return result
        return tf.nest.map_structure(lambda each: faces.rounded(each, low, EXACT), result)

    return call
