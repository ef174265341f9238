"""Resizing of images in 16 bits in Keras 3."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Replacement
from keras_mp.keras_api.keras3_names import IMAGES, resize_images
from keras_mp.kernels import slow
from keras_mp.support.dtypes import LOW_PRECISION


def replace_resize() -> None:
    """Casts bilinear images back to 16 bits without clipping them first.

    TensorFlow returns float32, and Keras clips that to the range of the images' dtype before it
    casts. Means of values are in the range of these values.
    """
    hooks.install([Replacement(resize_images, _rounding, feature=IMAGES)])


def _rounding(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    def resize(
        images: tf.Tensor,
        size: tuple[int, int],
        interpolation: str = "bilinear",
        *args: Any,
        **kwargs: Any,
    ) -> tf.Tensor:
        resized = original(images, size, interpolation, *args, **kwargs)
        dtype = tf.as_dtype(images.dtype)
        if interpolation == "bilinear" and dtype in LOW_PRECISION and slow.is_enabled():
            return tf.cast(resized, dtype)
        return resized

    return resize
