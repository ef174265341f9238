"""Gradients are summed over replicas while they are scaled.

RFC 293, "All-reducing in float16". This module needs TensorFlow only.
"""

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
    sent = gradients.cast(wide, [tf.float32], reduce_dtype)
    sums = gradients.cast_as(replicas.all_reduce(sent, tf.float32), wide)
    return (
        Sums(sums, divisor, lambda sums: unpack(gradients.cast_as(sums, packed))),
        Sums(sent, None, unpack, len(variables)),
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
