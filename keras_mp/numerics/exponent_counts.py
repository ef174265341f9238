"""Counts exponents on the device, in eager and in functions."""

import tensorflow as tf

from keras_mp.numerics.exponents import COLUMNS, EDGES, ROWS
from keras_mp.support.autograph import do_not_convert

# How many values 16 bits can have.
_PATTERNS = 2**16


@do_not_convert
def count_exponents(tensor: tf.Tensor, scale: tf.Tensor | None = None) -> tf.Tensor:
    """Counts as `Histogram.of` does, on the device.

    Args:
        tensor: float tensor of any shape.
        scale: float32 scalar tensor, by which the values are divided first; None for no such thing.

    Returns:
        int64 tensor, the bins one after the other.
    """
    values = tf.reshape(tensor, [-1])
    if tensor.dtype.size != 2 or (values.shape[0] or _PATTERNS) < _PATTERNS:
        return tf.cast(_bincount(_bins_of(values, scale), ROWS * COLUMNS), tf.int64)
    # There are so few different values that it is quicker to count each, and then to look at them.
    counts = _bincount(tf.cast(tf.bitcast(values, tf.uint16), tf.int32), _PATTERNS)
    every = tf.bitcast(tf.cast(tf.range(_PATTERNS), tf.uint16), tensor.dtype)
    return tf.cast(_bincount(_bins_of(every, scale), ROWS * COLUMNS, counts), tf.int64)


def _bins_of(values: tf.Tensor, scale: tf.Tensor | None) -> tf.Tensor:
    """The bin of each value, an int32 tensor."""
    values = tf.cast(values, tf.float32)
    if scale is not None:
        values *= 1.0 / scale
    # In uint32: GPUs leave arithmetic in int32 to the host.
    bits = tf.bitwise.bitwise_and(tf.bitcast(values, tf.uint32), 0x7FFFFFFF)
    # The exponent of a float32 subnormal is that of its bits, read as a whole number.
    as_number = tf.bitcast(tf.cast(bits, tf.float32), tf.uint32)
    is_normal = bits >= 1 << 23
    bits = tf.where(is_normal, bits, as_number)
    row = tf.bitwise.right_shift(bits, 23) + tf.cast(is_normal, tf.uint32) * (126 + 23)
    row = tf.maximum(row, 126) - 126
    fraction = tf.bitwise.bitwise_and(bits, 0x7FFFFF)
    column = tf.add_n([tf.cast(fraction >= edge, tf.uint32) for edge in EDGES[1:]])
    return tf.cast(row * COLUMNS + column, tf.int32)


def _bincount(places: tf.Tensor, size: int, weights: tf.Tensor | None = None) -> tf.Tensor:
    # `tf.math.bincount` looks at the values for the number of bins first.
    weights = tf.constant([], tf.int32) if weights is None else weights
    return tf.raw_ops.DenseBincount(input=places, size=size, weights=weights, binary_output=False)
