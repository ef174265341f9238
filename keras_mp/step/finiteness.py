"""Tests whether gradients are finite.

RFC 293, "LossScaleOptimizer Overview". This module needs TensorFlow only.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step.gradients import MANY, Gradient, is_small
from keras_mp.support import host, kept_casts


def all_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Whether every value of every gradient is finite.

    Where possible it tests sums of gradients, which takes a fraction of the time of testing each
    value: if a value is not finite, neither is a sum over it. A sum of finite unscaled gradients
    that overflows float32 counts as non-finite, too; such gradients are useless anyway. XLA forms
    fewer sums, and may let such gradients pass.

    Args:
        gradients: sequence of gradients, unscaled. In a sparse one, the sums over equal indices
            have to be finite too, since an optimizer adds these values up.

    Returns:
        bool scalar tensor; True if there is nothing to test.
    """
    if host.is_compiled_by_xla():
        return _all_finite_in_xla(gradients)
    all_axes = functools.cache(lambda rank: tf.constant(list(range(rank)), tf.int32))
    alike: dict[Any, list[tf.Tensor]] = {}
    for values in _tested_values(gradients):
        together = values.shape.is_fully_defined() and is_small(values)
        kind = values.dtype, tuple(values.shape.as_list()) if together else id(values)
        alike.setdefault(kind, []).append(values)
    verdicts = []
    totals: dict[tf.DType, list[tf.Tensor]] = {}
    for (dtype, _), values in alike.items():
        if dtype == tf.float16:  # Sums of float16 may pass 65504.
            verdicts += [tf.reduce_all(tf.math.is_finite(v)) for v in values]
        else:
            total = _add(values)
            axes = None if total.shape.rank is None else all_axes(total.shape.rank)
            totals.setdefault(dtype, []).append(tf.reduce_sum(total, axes))
    verdicts += [tf.math.is_finite(_add(of_dtype)) for of_dtype in totals.values()]
    if len(verdicts) == 1:
        return verdicts[0]
    return tf.reduce_all(tf.stack(verdicts)) if verdicts else tf.constant(True)


def _tested_values(gradients: Sequence[Gradient]) -> Iterator[tf.Tensor]:
    """Yields real numbers that are finite where the gradients are.

    Whole numbers always are.
    """
    for gradient in gradients:
        if gradient is None or gradient.dtype.is_integer:
            continue
        values = gradient if isinstance(gradient, tf.Tensor) else _magnitudes_of_sums(gradient)
        yield tf.math.real(values) + tf.math.imag(values) if values.dtype.is_complex else values


def _all_finite_in_xla(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Does the same as `all_finite` for XLA, by few sums.

    XLA computes what is cheap again in each loop that needs it, so the verdict is computed again in
    the update of each variable. With a flag for each gradient, the size of the code would grow with
    the square of their number.
    """
    alike: dict[Any, list[tf.Tensor]] = {}
    for values in _tested_values(gradients):
        if values.dtype != tf.float32:
            # Sums of float16 may pass 65504, and sums of float64 the range of float32. Values in 16
            # bits that are summed in float32 would be summed before they are rounded.
            values = tf.where(kept_casts.is_finite(values), 0.0, float("nan"))
        values = tf.cast(values, tf.float32)
        size = values.shape.num_elements()
        if size is None:
            values = tf.reduce_sum(values)
        elif size >= 2 * MANY:
            rest = size % MANY
            values = tf.reshape(values, [-1])
            if rest:
                alike.setdefault((MANY,), []).append(tf.pad(values[-rest:], [[0, MANY - rest]]))
            values = tf.reduce_sum(tf.reshape(values[: size - rest], [-1, MANY]), 0)
        alike.setdefault(tuple(values.shape), []).append(values)
    # On CPUs, XLA uses vector units to reduce bools to one, but not floats.
    verdicts = [tf.reduce_all(tf.math.is_finite(_add(values))) for values in alike.values()]
    return tf.reduce_all(tf.stack(verdicts)) if verdicts else tf.constant(True)


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
    is_new = tf.concat(
        [tf.zeros_like(indices[:1]), tf.cast(indices[1:] != indices[:-1], indices.dtype)], 0
    )
    sums = tf.math.unsorted_segment_sum(
        tf.cast(tf.gather(magnitudes, order), tf.float32), tf.cumsum(is_new), tf.size(indices)
    )
    return kept_casts.to_16_bits(sums, tf.float16)


def _add(tensors: list[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(tensors) if len(tensors) > 1 else tensors[0]
