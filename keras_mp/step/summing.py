"""Gradients are summed over replicas while they are scaled.

RFC 293, "All-reducing in float16". This module needs TensorFlow only.
"""

import itertools
from typing import Any

import tensorflow as tf

from keras_mp.step import gradients, replicas
from keras_mp.step.gradients import Gradient, Sums
from keras_mp.step.optimizer_adapter import OptimizerAdapter


def summed(
    given: Sums,
    variables: list[Any],
    adapter: OptimizerAdapter,
    *,
    scaled_by: tf.Tensor | None,
    reduce_dtype: tf.DType,
    may_skip: bool,
) -> tuple[Sums, Sums | None]:
    """Sums gradients over replicas, and the marks that follow the gradients.

    Args:
        given: the gradients and marks of this replica.
        variables: the variables of the gradients.
        adapter: the adapter of the optimizer, which may sum in its own way.
        scaled_by: float32 scalar tensor, the factor of the loss; None if no loss is scaled.
        reduce_dtype: DType in which float32 gradients are summed.
        may_skip: bool. Whether the step may be skipped.

    Returns:
        tuple of the sums, and of what this replica sent to the others; None if it sent nothing.
    """
    custom = adapter.custom_aggregation()
    if custom:
        return _summed_by(custom, given.unscaled().values, variables)
    if not replicas.are_several():
        return given, None
    divisor = given.divisor
    packed, unpack = gradients.pack(given.values)
    if reduce_dtype == tf.float16:
        if not may_skip or scaled_by is None:
            # Unscaled, small values would vanish; and a sum that overflows is harmless only if the
            # step can be skipped.
            reduce_dtype = tf.float32
        elif divisor is not scaled_by:
            factor = scaled_by if divisor is None else scaled_by / divisor
            packed, divisor = gradients.scale(packed, factor), scaled_by
    wide = packed if may_skip else gradients.cast(packed, [tf.float16], tf.float32)
    wide = _with_scale(wide, scaled_by, divisor)
    sent = gradients.cast(wide, [tf.float32], reduce_dtype)
    sums = gradients.cast_as(replicas.all_reduce(sent, tf.float32), wide)
    sums = _checked(sums, scaled_by)
    count = len(variables)
    return (
        Sums(sums, divisor, lambda sums: unpack(gradients.cast_as(sums, packed))),
        Sums(sent[: len(packed)], None, unpack, count),
    )


def _summed_by(
    custom: Any, values: list[Gradient], variables: list[Any]
) -> tuple[Sums, Sums | None]:
    """Lets a function of the user sum gradients; marks are summed here."""
    grads, marks = values[: len(variables)], values[len(variables) :]
    if replicas.are_several():
        marks = replicas.all_reduce(marks, tf.float32)
    sums = custom(list(zip(grads, variables, strict=True)))
    return Sums([*(g for g, _ in sums), *marks]), Sums(grads)


def _with_scale(
    grads: list[Any], scaled_by: tf.Tensor | None, divisor: tf.Tensor | None
) -> list[Any]:
    """Adds the loss scale to a replica's gradients; `_checked` takes it out again.

    Each replica has a place in a vector that is zero elsewhere. It sends two numbers byte by byte,
    since numbers up to 255 are the same in every dtype in which gradients are sent.

    Args:
        grads: the gradients that are sent.
        scaled_by: float32 scalar tensor, or None where nothing scales a loss.
        divisor: float32 scalar tensor. The number that unscales the sums; None if there is none. It
            is not the scale if the program has scaled no loss.
    """
    if scaled_by is None or replicas.number_of_workers() == 1:
        return grads
    count = tf.distribute.get_strategy().num_replicas_in_sync
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    numbers = tf.stack([scaled_by, tf.constant(1.0) if divisor is None else divisor])
    own = tf.cast(tf.reshape(tf.bitcast(numbers, tf.uint8), [-1]), tf.float32)
    return [*grads, tf.reshape(tf.one_hot(replica, count)[:, tf.newaxis] * own, [-1])]


def _checked(sums: list[Any], scaled_by: tf.Tensor | None) -> list[Any]:
    """Returns the sums of gradients, after checking that all replicas scale alike.

    Args:
        sums: the sums of the gradients of `_with_scale`.
        scaled_by: as in `_with_scale`.

    Raises:
        tf.errors.InvalidArgumentError: the scales differ. It is raised where and when the step
            runs, on all workers.
    """
    if scaled_by is None or replicas.number_of_workers() == 1:
        return sums
    numbers = tf.reshape(tf.cast(tf.cast(sums[-1], tf.int32), tf.uint8), [-1, 2, 4])
    scales = tf.bitcast(numbers, tf.float32)
    are_equal = tf.reduce_all(tf.equal(scales, scales[0]))
    with tf.control_dependencies([tf.debugging.Assert(are_equal, _of_each_worker(scales))]):
        return [gradients.map_values(tf.identity, gradient) for gradient in sums[:-1]]


def _of_each_worker(scales: tf.Tensor) -> list[Any]:
    count = replicas.number_of_workers()
    of_workers = tf.unstack(tf.reshape(scales, [count, -1, 2])[:, 0])
    text = (
        "The workers use different loss scales, so sums of their gradients are wrong. Give all of "
        "them the same loss scale, load the same checkpoint on all, and scale the loss on all or "
        "on none. The loss scales, and the numbers by which the sums of gradients still have to "
        "be divided:"
    )
    named = ((f"worker {i}:", scale) for i, scale in enumerate(of_workers))
    return [text, *itertools.chain.from_iterable(named)]
