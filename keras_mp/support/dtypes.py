"""Dtypes of low precision, and all floating-point dtypes."""

import tensorflow as tf

LOW_PRECISION_NAMES = ("float16", "bfloat16")
LOW_PRECISION = tuple(map(tf.as_dtype, LOW_PRECISION_NAMES))
FLOATING = (*LOW_PRECISION, tf.float32, tf.float64)


def is_low(dtype: object) -> bool:
    """Whether an object is one of `LOW_PRECISION`.

    It is asked so often that comparing dtypes would take too long. TensorFlow has one object for
    each dtype.
    """
    return dtype is tf.bfloat16 or dtype is tf.float16


def parse(value: object) -> tf.DType | None:
    """Returns the dtype that `tf.as_dtype` makes of a value, or None if it makes none."""
    if value is None or isinstance(value, tf.DType):
        return value  # An error takes long.
    try:
        return tf.as_dtype(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None
