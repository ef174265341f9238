"""How Keras 3 resizes images in 16 bits."""

import functools
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import image as _image

from keras_mp.kernels import slow
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import LOW_PRECISION


def replace_resize() -> None:
    """Spares bilinear images the search for values that 16 bits cannot hold.

    TensorFlow returns float32, and Keras clips that to the range of the images' dtype before it
    casts. Means of values are in the range of these values.
    """
    own = _image.resize

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
        dtype = tf.as_dtype(images.dtype)
        if interpolation == "bilinear" and dtype in LOW_PRECISION and slow.is_enabled():
            return tf.cast(resized, dtype)
        return resized

    _image.resize = resize
