"""The values that variables had, which are restored if a step is skipped.

Reading a variable before it is assigned costs no copy: the assignment makes a new buffer, and the
value keeps the old one. This module needs TensorFlow only.
"""

import numpy as np
import tensorflow as tf

# Handles, each with the value that the variable had.
Kept = list[tuple[tf.Tensor, tf.Tensor]]


def read(handle: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the value of a variable in this replica, not cast, in any context."""
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def may_have_changed(kept: Kept) -> bool:
    """Whether a variable may have another value by now. In eager, the value tells.

    NaN, which is not equal to itself, is no other value.
    """
    return any(
        not tf.executing_eagerly()
        or not np.array_equal(read(at, old.dtype), old, equal_nan=old.dtype.is_floating)
        for at, old in kept
    )


def put_back(kept: Kept, unless: bool | tf.Tensor = False) -> None:
    """Restores the values, in any context and also for all replicas.

    Args:
        kept: the values.
        unless: bool, or bool scalar tensor. If it is True, the variables keep the values that they
            have. Defaults to False.
    """
    for handle, old in kept:
        value = old if unless is False else tf.where(unless, read(handle, old.dtype), old)
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
