"""Tests whether gradients are finite, and counts what is not in a skipped step.

RFC 293, "LossScaleOptimizer Overview". A good step only tests its gradients. This module needs
TensorFlow only.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.step import replicas
from keras_mp.step.gradients import MANY, Gradient, concat, is_small
from keras_mp.support import host, kept_casts
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import LOW_PRECISION

# The dtype of counts, which are exact up to 2**53. GPUs have no kernels that sum up int64 segments,
# so the host would have to wait for the counts.
COUNTS = tf.float64
# They stand in place of counts: of values that were only found, not counted; of a loss that is not
# known; and of one of a replica without examples.
UNCOUNTED, UNKNOWN, NO_EXAMPLES = -1.0, -1e6, -2e6


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
    for values in _tested_values(gradients):
        for part in _in_rows(values) if in_xla else [values]:
            is_alike = part.shape.is_fully_defined() and (in_xla or is_small(part))
            kind = tuple(part.shape.as_list()) if is_alike else id(part)
            alike.setdefault(kind, []).append(part)
    totals = [tf.add_n(parts) if len(parts) > 1 else parts[0] for parts in alike.values()]
    if not totals:
        return tf.constant(True)
    if in_xla:
        # On CPUs, XLA uses vector units to reduce bools to one, but not floats.
        return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(each)) for each in totals]))
    # One constant for each rank instead of each gradient makes graphs smaller.
    axes = functools.cache(lambda n: None if n is None else tf.constant([*range(n)], tf.int32))
    return tf.math.is_finite(tf.add_n([tf.reduce_sum(t, axes(t.shape.rank)) for t in totals]))


def _tested_values(gradients: Sequence[Gradient]) -> Iterator[tf.Tensor]:
    """Yields float32 numbers that are finite where the gradients are.

    Whole numbers always are.
    """
    for gradient in gradients:
        if gradient is None or gradient.dtype.is_integer:
            continue
        values = _real(
            gradient if isinstance(gradient, tf.Tensor) else _magnitudes_of_sums(gradient)
        )
        if values.dtype != tf.float32:
            # Sums of float16 may pass 65504, and sums of float64 the range of float32. Values in 16
            # bits that are summed in float32 would be summed before they are rounded.
            values = tf.where(kept_casts.is_finite(values), 0.0, float("nan"))
        yield values


def _real(values: tf.Tensor) -> tf.Tensor:
    """Returns real numbers that are finite where values are."""
    return tf.math.real(values) + tf.math.imag(values) if values.dtype.is_complex else values


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
    is_new = tf.concat(
        [
            tf.zeros_like(indices[:1]),
            tf.cast(tf.not_equal(indices[1:], indices[:-1]), indices.dtype),
        ],
        0,
    )
    sums = tf.math.unsorted_segment_sum(
        tf.cast(tf.gather(magnitudes, order), tf.float32), tf.cumsum(is_new), tf.size(indices)
    )
    return kept_casts.to_16_bits(sums, tf.float16)


def count_of_replicas(
    of_replicas: Sequence[tuple[Sequence[tf.Tensor], Sequence[Gradient], tf.Tensor | None]],
    totals: Sequence[Gradient] | None,
    count: int,
) -> tf.Tensor:
    """Counts infinite values and NaNs on all replicas.

    Args:
        of_replicas: for all replicas of this process, or only for the one that calls this: its
            losses, its gradients, and a bool scalar tensor that tells whether it has examples, or
            None. The counts of other replicas are added.
        totals: the gradients that were tested, if these are others. They are the same on all
            replicas.
        count: int. The number of gradients that are counted; those that a replica lacks count as
            finite.

    Returns:
        `COUNTS` tensor of shape [rows, 1 + count, 2], the same on every replica. Each replica has a
        row, which begins with its losses; with `totals`, a last row is for them.
    """
    strategy, rows = tf.distribute.get_strategy(), []
    for i, (losses, grads, has_examples) in enumerate(of_replicas):
        device = strategy.extended.worker_devices[i] if len(of_replicas) > 1 else None
        with tf.device(device):
            lacking = [None] * (count - len(grads))
            rows.append(_row(list(losses), [*grads, *lacking], has_examples))
    if len(rows) == strategy.num_replicas_in_sync:
        counts = tf.stack(rows)
    else:
        gather = do_not_convert(lambda: replicas.gather(rows[replicas.local_id() % len(rows)]))
        if tf.distribute.in_cross_replica_context():
            gather = functools.partial(strategy.extended.call_for_each_replica, gather)
        counts, *_ = strategy.experimental_local_results(gather())
    return counts if totals is None else tf.concat([counts, [_row([], list(totals), None)]], 0)


@host.shared_operation
def _row(
    losses: Sequence[tf.Tensor], gradients: Sequence[Gradient], has_examples: tf.Tensor | None
) -> tf.Tensor:
    counts = count_not_finite([*losses, *gradients])
    loss = tf.fill([1, 2], tf.constant(UNKNOWN, COUNTS))
    if losses:
        loss = tf.reduce_sum(counts[: len(losses)], 0, keepdims=True)
    if has_examples is not None:
        loss = tf.where(has_examples, loss, tf.constant(NO_EXAMPLES, COUNTS))
    return tf.concat([loss, counts[len(losses) :]], 0)


def count_not_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Counts infinite values, and NaNs: a row of two numbers for each gradient.

    Where XLA compiles, every step does so: values are only found, but for scalars.
    """
    rows: dict[int, Any] = dict.fromkeys(range(len(gradients)), tf.zeros([2], COUNTS))
    alike: dict[tf.DType, list[int]] = {}
    for i, gradient in enumerate(gradients):
        if gradient is None or gradient.dtype.is_integer:
            continue
        if host.is_compiled_by_xla() and gradient.shape.rank != 0:
            # The sums that the verdict needs anyway: XLA reads the gradient once for both.
            is_finite = all_finite([gradient])
            rows[i] = tf.fill([2], tf.where(is_finite, tf.constant(0, COUNTS), UNCOUNTED))
        elif gradient.dtype.is_floating and is_small(gradient):
            alike.setdefault(gradient.dtype, []).append(i)
        else:
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            kinds = _infs_and_nans(tf.reshape(values, [-1]))
            rows[i] = tf.stack([tf.reduce_sum(tf.cast(kind, COUNTS)) for kind in kinds])
    for group in alike.values():
        small: list[Any] = [gradients[i] for i in group]
        whose = np.repeat(np.arange(len(group)), [each.shape.num_elements() for each in small])
        kinds = tf.cast(tf.stack(_infs_and_nans(concat(small)), 1), COUNTS)
        counts = tf.math.unsorted_segment_sum(kinds, tf.constant(whose), tf.constant(len(group)))
        rows.update(zip(group, tf.unstack(counts)))
    return tf.stack(list(rows.values())) if rows else tf.zeros([0, 2], COUNTS)


def _infs_and_nans(values: tf.Tensor) -> list[tf.Tensor]:
    """Returns whether values are infinite, and whether they are NaN."""
    values = _real(values)
    if values.dtype in LOW_PRECISION:
        values = kept_casts.as_float32(values)
    return [tf.math.is_inf(values), tf.math.is_nan(values)]
