"""Casts between float32 and 16 bits in operations that XLA keeps.

`kept_casts` says where they are needed. This module needs TensorFlow only.
"""

import tensorflow as tf

_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
# The exponents of float16: of the smallest normal number, of the largest, and of the last of 11
# digits.
_SMALLEST, _LARGEST, _DIGITS = -14, 15, -10
_FLOAT16_MAX = 65504.0


def to_16_bits(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Rounds float32 values to the nearest in 16 bits, ties to even."""
    if dtype == tf.bfloat16:
        return _nearest_bfloat16(tf.bitcast(value, tf.uint32))
    # Its input is a number that float16 holds. If XLA leaves the cast out, the number stays the
    # same.
    return tf.cast(_nearest_float16(value), tf.float16)


def _nearest_bfloat16(bits: tf.Tensor) -> tf.Tensor:
    to_even = tf.bitwise.right_shift(bits, 16) & 1
    upper = tf.bitwise.right_shift(bits + (0x7FFF + to_even), 16)
    # Without this, the sum may carry a NaN over into the sign.
    is_nan = (bits & _MAGNITUDE) > _INFINITY
    upper = tf.where(is_nan, tf.bitwise.right_shift(bits, 16) | 0x40, upper)
    return tf.bitcast(tf.cast(upper, tf.uint16), tf.bfloat16)


def _nearest_float16(value: tf.Tensor) -> tf.Tensor:
    """Returns the float16 values nearest to float32 ones, in float32."""
    power, inverse = float16_binade(value)
    digits = tf.round(value * (inverse * 2.0**-_DIGITS))
    rounded = digits * (power * 2.0**_DIGITS)
    return tf.where(tf.abs(rounded) > _FLOAT16_MAX, rounded * float("inf"), rounded)


def float16_binade(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the powers of two at or below magnitudes, and their inverses.

    Both are exact, and so are products with them, whereas GPUs may approximate a quotient.

    Args:
        value: float32 tensor.

    Returns:
        tuple of float32 tensors. The powers lie between those of float16's smallest normal number
        and of its largest.
    """
    # In uint32, since TensorFlow computes int32 in the host's memory on GPUs.
    bits = tf.bitcast(value, tf.uint32) & _INFINITY
    bits = tf.clip_by_value(bits, (127 + _SMALLEST) << 23, (127 + _LARGEST) << 23)
    inverse = tf.constant(254 << 23, tf.uint32) - bits
    return tf.bitcast(bits, tf.float32), tf.bitcast(inverse, tf.float32)


def as_float32(value: tf.Tensor) -> tf.Tensor:
    """Casts values in 16 bits to float32."""
    bits = tf.cast(tf.bitcast(value, tf.uint16), tf.uint32)
    if value.dtype == tf.bfloat16:
        return tf.bitcast(tf.bitwise.left_shift(bits, 16), tf.float32)
    magnitude, sign = bits & 0x7FFF, tf.bitwise.left_shift(bits & 0x8000, 16)
    # The exponents differ by 112; those of infinities and NaN by twice as much.
    apart = tf.where(magnitude < 0x7C00, tf.constant(112 << 23, tf.uint32), 224 << 23)
    normal = tf.bitcast(tf.bitwise.left_shift(magnitude, 13) + apart, tf.float32)
    subnormal = tf.cast(magnitude, tf.float32) * 2.0 ** (_SMALLEST + _DIGITS)
    widened = tf.bitcast(tf.where(magnitude < 0x400, subnormal, normal), tf.uint32)
    return tf.bitcast(widened | sign, tf.float32)
