"""Counts the values of gradients that are not finite, or 0.

A good step only tests its gradients (`step/finiteness.py`). This module needs TensorFlow only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.step.finiteness import all_finite, tested
from keras_mp.step.gradients import MANY, Gradient, concat, is_small
from keras_mp.support import host, kept_casts
from keras_mp.support.dtypes import LOW_PRECISION

# The dtype of counts, which are exact up to 2**53. GPUs have no kernels that sum up int64 segments,
# or split or reverse int64 tensors, so the host would have to wait for the counts.
COUNTS = tf.float64
# It stands in place of a count where values were only found, not counted.
UNCOUNTED = -1.0
# The number of values to which XLA reduces a small tensor: several vectors of a CPU, and few enough
# that many such results fit into a cache.
_FEW = 64


def count_not_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Counts the values that are not finite in each gradient.

    Args:
        gradients: sequence of gradients.

    Returns:
        `COUNTS` tensor of shape [gradients, 3]: the number of infinite values; the number of NaNs;
        and 1 if every value is finite, but a sum that `all_finite` tests is not, else 0.
    """
    alike: dict[tf.DType, list[int]] = {}
    rows, order = [], []
    for i, gradient in enumerate(gradients):
        if gradient is not None and gradient.dtype.is_floating and is_small(gradient):
            alike.setdefault(gradient.dtype, []).append(i)
    groups = [group for group in alike.values() if len(group) > 1]
    for i in sorted(set(range(len(gradients))).difference(*groups)):
        gradient = gradients[i]
        if gradient is None or gradient.dtype.is_integer:
            rows.append(tf.zeros([1, 3], COUNTS))
        elif isinstance(gradient, tf.IndexedSlices):
            rows.append(_count_one(gradient))
        else:
            rows.append(_as_one_operation(_count_one, gradient.dtype)(gradient))
        order.append(i)
    for group in groups:
        rows.append(_count_group([gradients[i] for i in group]))
        order += group
    counts = tf.concat(rows, 0) if len(rows) > 1 else rows[0]
    return counts if order == sorted(order) else tf.gather(counts, np.argsort(order))


def flag_not_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Marks the gradients that are not finite, without counting their values.

    It is cheap enough for each step.

    Args:
        gradients: sequence of gradients.

    Returns:
        tensor like the result of `count_not_finite`, with `UNCOUNTED` in place of numbers other
        than 0; in scalars, values are counted.
    """
    zero, some = tf.constant(0, COUNTS), tf.constant(UNCOUNTED, COUNTS)
    kinds = [[zero, zero]] * len(gradients)
    flagged: dict[int, Any] = {}
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.Tensor) and gradient.shape.rank == 0:
            kinds[i] = [tf.cast(kind, COUNTS) for kind in _infs_and_nans(gradient)]
        elif gradient is not None and not gradient.dtype.is_integer:
            flagged[i] = gradient
    if flagged:
        marks = tf.where(finite_flags(list(flagged.values())), zero, some)
        for i, mark in zip(flagged, tf.unstack(marks), strict=True):
            kinds[i] = [mark, mark]
    infs, nans = zip(*kinds)
    return tf.stack([tf.stack(infs), tf.stack(nans), tf.zeros([len(kinds)], COUNTS)], 1)


def _count_group(group: list[Any]) -> tf.Tensor:
    """Returns the rows of `count_not_finite` for small tensors of one dtype, together."""
    values = concat(group)
    sizes = [tensor.shape.num_elements() for tensor in group]
    whose = tf.constant(np.repeat(np.arange(len(group)), sizes))
    count = tf.constant(len(group))

    def add(of_each: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(of_each, whose, count)

    infs, nans = (add(tf.cast(kind, COUNTS)) for kind in _infs_and_nans(values))
    sums = tf.zeros([len(group)])
    if values.dtype != tf.float16 and not host.is_compiled_by_xla():
        sums = add(values)
    is_only_sum = tf.equal(infs + nans, 0) & tf.logical_not(tf.math.is_finite(sums))
    return tf.stack([infs, nans, tf.cast(is_only_sum, COUNTS)], 1)


@functools.cache
def _as_one_operation(
    count: Callable[..., tf.Tensor], dtype: tf.DType
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function that counts in tensors of a dtype, in one operation for each."""
    return host.shared_operation(count, [tf.TensorSpec(None, dtype)])  # pyright: ignore[reportArgumentType]


def _count_one(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Returns the row of `count_not_finite` for one gradient, of shape [1, 3]."""
    if not isinstance(gradient, tf.IndexedSlices):
        # In one dimension, since for a tensor of unknown rank TensorFlow would compute the axes.
        gradient = tf.reshape(gradient, [-1])
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    counts = [tf.reduce_sum(tf.cast(kind, COUNTS)) for kind in _infs_and_nans(values)]
    is_only_sum = tf.logical_not(all_finite([gradient])) & tf.equal(tf.add_n(counts), 0)
    return tf.stack([[*counts, tf.cast(is_only_sum, COUNTS)]])


def _infs_and_nans(values: tf.Tensor) -> list[tf.Tensor]:
    """Returns two bool tensors: where values are infinite, and where they are NaN."""
    if values.dtype.is_complex:
        parts = [_infs_and_nans(part) for part in (tf.math.real(values), tf.math.imag(values))]
        infs, nans = (tf.logical_or(*kinds) for kinds in zip(*parts))
        return [tf.logical_and(infs, tf.logical_not(nans)), nans]
    if values.dtype in LOW_PRECISION:
        values = kept_casts.as_float32(values)
    return [tf.math.is_inf(values), tf.math.is_nan(values)]


def finite_flags(gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
    """Returns whether each gradient is finite, for XLA.

    XLA makes one loop for each gradient.

    Args:
        gradients: sequence of floating-point gradients, at least one.

    Returns:
        bool tensor of shape [gradients].
    """
    alike: dict[Any, dict[int, tf.Tensor]] = {}
    for i, gradient in enumerate(gradients):
        values = tested(gradient)
        # A sum in float32 would miss values that are infinite in 16 bits: XLA leaves out a cast to
        # 16 bits that is followed by a cast back.
        if values.dtype in LOW_PRECISION:
            columns = _by_columns(tf.reduce_all, kept_casts.is_finite(values))
        else:
            columns = tf.math.is_finite(_by_columns(tf.reduce_sum, values))
        alike.setdefault(tuple(columns.shape), {})[i] = columns
    flags: dict[int, tf.Tensor] = {}
    for shape, group in alike.items():
        if shape == (_FEW,):
            flags.update(zip(group, tf.unstack(tf.reduce_all(tf.stack(list(group.values())), 1))))
        else:
            flags.update({i: tf.reduce_all(columns) for i, columns in group.items()})
    return tf.stack([flags[i] for i in range(len(flags))])


def is_any_at_least(values: tf.Tensor, limit: float) -> tf.Tensor:
    """Whether the magnitude of any value is at least a limit, for XLA.

    If a value is NaN, the result may be either.

    Args:
        values: floating-point tensor.
        limit: float, which may be infinite.
    """
    is_large = tf.abs(values) >= tf.cast(limit, values.dtype)
    return tf.reduce_any(_by_columns(tf.reduce_any, is_large))


def _by_columns(reduce: Callable[..., tf.Tensor], values: tf.Tensor) -> tf.Tensor:
    """Reduces values to a few.

    On CPUs, XLA does not use vector units to reduce to a single value.
    """
    size = values.shape.num_elements()
    if size is None or size < 2 * MANY:
        if not size or size % _FEW:
            return reduce(values)
        return reduce(tf.reshape(values, [-1, _FEW]), 0)
    values, whole = tf.reshape(values, [-1]), size // MANY * MANY
    columns = reduce(tf.reshape(values[:whole], [-1, MANY]), 0)
    return columns if whole == size else tf.concat([columns, [reduce(values[whole:])]], 0)


def zeros_in_a_thousand(grads: Sequence[Gradient]) -> tf.Tensor:
    """Returns how many in a thousand gradient values are 0, an int64 scalar tensor."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
    if not values:
        return tf.zeros([], tf.int64)
    alike: dict[Any, list[tf.Tensor]] = {}
    for each in values:
        alike.setdefault(each.dtype if is_small(each) else id(each), []).append(each)
    joined = [concat(group) if len(group) > 1 else group[0] for group in alike.values()]
    nonzeros = tf.add_n([_as_one_operation(_nonzeros, each.dtype)(each) for each in joined])
    size = tf.maximum(tf.add_n([tf.size(each, tf.int64) for each in joined]), 1)
    return 1000 - tf.cast(tf.round(1000 * nonzeros / size), tf.int64)


def _nonzeros(values: tf.Tensor) -> tf.Tensor:
    return tf.math.count_nonzero(tf.reshape(values, [-1]))
