"""Resizing of images in 16 bits in Keras 3."""

import functools
from typing import Any

import tensorflow as tf

from keras_mp.keras_api.keras3_names import IMAGES, resize_images
from keras_mp.kernels import slow
from keras_mp.support import features, reach
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import LOW_PRECISION


def replace_resize() -> None:
    """Casts bilinear images back to 16 bits without clipping them first.

    TensorFlow returns float32, and Keras clips that to the range of the images' dtype before it
    casts. Means of values are in the range of these values.
    """
    if not features.is_on(IMAGES):
        return
    own = resize_images.get()

    @functools.wraps(own)
    @do_not_convert
    def resize(
        images: tf.Tensor,
        size: tuple[int, int],
        interpolation: str = "bilinear",
        *args: Any,
        **kwargs: Any,
    ) -> tf.Tensor:
        resized = own(images, size, interpolation, *args, **kwargs)
        if reach.current() is None:
            return resized
        dtype = tf.as_dtype(images.dtype)
        if interpolation == "bilinear" and dtype in LOW_PRECISION and slow.is_enabled():
            return tf.cast(resized, dtype)
        return resized

    resize_images.set(resize)
