"""Casts between float32 and 16 bits that XLA keeps.

For GPUs, XLA leaves out a cast to 16 bits that is followed by one back to float32. It also adds
casts back to float32 itself, for example around comparisons in bfloat16. Where a program merely
allows less precision, that does no harm. But code that needs the digits that rounding drops, or
asks what has become of a number in 16 bits, would see numbers that were never rounded. Such code
casts with these functions. Where XLA may compile them, they round by integers, or by operations
that XLA keeps. Elsewhere they are `tf.cast`.

This module needs TensorFlow only.
"""

import os

import tensorflow as tf

from keras_mp.support import host
from keras_mp.support.dtypes import is_low


def to_16_bits(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Rounds float32 values to the nearest in 16 bits, ties to even.

    The digits that `tf.cast` drops are really dropped, even if the result is cast back.

    Args:
        value: float32 tensor.
        dtype: float16 or bfloat16.

    Returns:
        tensor of that dtype, with the values of `tf.cast`. Subnormal numbers of bfloat16 are kept,
        even where XLA's instruction for a cast would make them 0.
    """
    if not may_be_compiled_by_xla():
        return tf.cast(value, dtype)
    from keras_mp.support import rounding_by_bits

    return rounding_by_bits.to_16_bits(value, dtype)


def as_float32(value: tf.Tensor) -> tf.Tensor:
    """Casts values to float32; those in 16 bits keep the rounding they had.

    Args:
        value: floating-point tensor.

    Returns:
        float32 tensor.
    """
    if not (is_low(value.dtype) and may_be_compiled_by_xla()):
        return tf.cast(value, tf.float32)
    from keras_mp.support import rounding_by_bits

    return rounding_by_bits.as_float32(value)


def is_finite(value: tf.Tensor) -> tf.Tensor:
    """Whether values are finite in the dtype that they have.

    Those in 16 bits are judged as they were rounded.

    Args:
        value: floating-point tensor.

    Returns:
        bool tensor.
    """
    # There is no kernel for 8 bits.
    if value.dtype.size == 1 or (is_low(value.dtype) and may_be_compiled_by_xla()):
        value = as_float32(value)
    return tf.math.is_finite(value)


def may_be_compiled_by_xla() -> bool:
    """Whether XLA compiles what is traced now, or may do so since the user allows it."""
    if host.is_compiled_by_xla():
        return True
    if tf.executing_eagerly():
        return False
    is_asked_for = "tf_xla_auto_jit" in os.environ.get("TF_XLA_FLAGS", "")
    return is_asked_for or bool(tf.config.optimizer.get_jit())
