"""The values that variables had, which are restored if a step is skipped.

Reading a variable before it is assigned costs no copy: the assignment makes a new buffer, and the
value keeps the old one. This module needs TensorFlow only.
"""

from collections.abc import Iterable

import tensorflow as tf


def read(handle: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the value of a variable in this replica, not cast, in any context."""
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


class KeptValues:
    """The values that a replica restores if the step is skipped.

    Args:
        old: iterable of handles, each with the value that the variable had. Defaults to none.
    """

    def __init__(self, old: Iterable[tuple[tf.Tensor, tf.Tensor]] = ()) -> None:
        self._old = list(old)

    def __bool__(self) -> bool:
        return bool(self._old)

    def may_have_changed(self) -> bool:
        """Whether the step has written to a weight.

        In eager, the value of the weight tells.
        """
        if not tf.executing_eagerly():
            return bool(self)
        return any(_differ(read(handle, old.dtype), old) for handle, old in self._old)

    def put_back(self, unless: tf.Tensor | None = None) -> None:
        """Restores the values, in any context and also for all replicas.

        Args:
            unless: bool scalar tensor. If it is True, the variables keep the values that they have.
                Defaults to None, for False.
        """
        for handle, old in self._old:
            value = old if unless is None else tf.where(unless, read(handle, old.dtype), old)
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    def release(self) -> None:
        """Releases the values in eager, where an update copies each value that is held."""
        if tf.executing_eagerly():
            self._old.clear()


def _differ(value: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """Whether any number of two tensors differs.

    NaN, which is not equal to itself, does not.
    """
    are_nan = tf.not_equal(value, value) & tf.not_equal(old, old)
    return tf.reduce_any(tf.not_equal(value, old) & tf.logical_not(are_nan))
