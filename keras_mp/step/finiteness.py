"""Tests whether gradients are finite.

A skipped step counts what is not (`skip_report`). RFC 293, "LossScaleOptimizer Overview". This
module needs TensorFlow only.
"""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step.gradients import MANY, Gradient
from keras_mp.support import host, kept_casts


def all_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Whether every value of every gradient is finite.

    Where possible it tests sums of gradients, which takes a fraction of the time of testing each
    value: if a value is not finite, neither is a sum over it. A sum of finite unscaled gradients
    that overflows float32 counts as non-finite, too; such gradients are useless anyway. XLA forms
    fewer sums, and may let such gradients pass.

    XLA computes what is cheap again in each loop that needs it, so the verdict is computed again in
    the update of each variable. With a flag for each gradient, the size of the code would grow with
    the square of their number.

    Args:
        gradients: sequence of gradients, unscaled. In a sparse one, the sums over equal indices
            have to be finite too, since an optimizer adds these values up.

    Returns:
        bool scalar tensor; True if there is nothing to test.
    """
    in_xla, alike = host.is_compiled_by_xla(), dict[Any, list[tf.Tensor]]()
    for gradient in gradients:
        if gradient is None or gradient.dtype.is_integer:  # Whole numbers are finite.
            continue
        values = gradient if isinstance(gradient, tf.Tensor) else _magnitudes_of_sums(gradient)
        values = tf.abs(values) if values.dtype.is_complex else values
        if values.dtype != tf.float32:
            # Sums of float16 may pass 65504, and sums of float64 the range of float32. Values in 16
            # bits that are summed in float32 would be summed before they are rounded.
            values = tf.where(kept_casts.is_finite(values), 0.0, float("nan"))
        for part in _in_rows(values) if in_xla else [values]:
            size = part.shape.num_elements()
            is_alike = size is not None and (in_xla or size < MANY)
            alike.setdefault(part.shape if is_alike else id(part), []).append(part)
    totals = [tf.add_n(parts) if len(parts) > 1 else parts[0] for parts in alike.values()]
    if not totals:
        return tf.constant(True)
    if in_xla:
        # On CPUs, XLA uses vector units to reduce bools to one, but not floats.
        return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(each)) for each in totals]))
    # One constant for each rank instead of each gradient makes graphs smaller.
    axes = functools.cache(lambda n: None if n is None else tf.constant([*range(n)], tf.int32))
    return tf.math.is_finite(tf.add_n([tf.reduce_sum(t, axes(t.shape.rank)) for t in totals]))


def _in_rows(values: tf.Tensor) -> list[tf.Tensor]:
    """Sums large values to rows of one length, for XLA."""
    size = values.shape.num_elements()
    if size is None:
        return [tf.reduce_sum(values)]
    if size < 2 * MANY:
        return [values]
    rest, flat = size % MANY, tf.reshape(values, [-1])
    rows = tf.reduce_sum(tf.reshape(flat[: size - rest], [-1, MANY]), 0)
    return [rows, *([tf.pad(flat[-rest:], [[0, MANY - rest]])] if rest else [])]


def _magnitudes_of_sums(gradient: tf.IndexedSlices) -> tf.Tensor:
    """Returns bounds of the sums over equal indices.

    They are infinite where such a sum could overflow.
    """
    magnitudes = tf.abs(gradient.values)
    if gradient.dtype != tf.float16:
        # All rows are summed together: no sound gradient comes near the largest float32.
        return tf.reduce_sum(magnitudes, axis=0)
    # float16 ends at 65504. All rows together may well pass that while no sum over equal indices
    # does.
    order = tf.argsort(gradient.indices)
    indices = tf.gather(gradient.indices, order)
    is_new = tf.cast(tf.not_equal(indices[1:], indices[:-1]), indices.dtype)
    numbers = tf.cumsum(tf.concat([tf.zeros_like(indices[:1]), is_new], 0))
    rows = tf.cast(tf.gather(magnitudes, order), tf.float32)
    sums = tf.math.unsorted_segment_sum(rows, numbers, tf.size(indices))
    return kept_casts.to_16_bits(sums, tf.float16)
