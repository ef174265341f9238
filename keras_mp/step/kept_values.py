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
        is_eager = tf.executing_eagerly()
        return any(not is_eager or _differ(read(at, old.dtype), old) for at, old in self._old)

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


def _differ(new: tf.Tensor, old: tf.Tensor) -> bool | tf.Tensor:
    """Whether any number of two eager tensors differs, or their shape.

    NaN, which is not equal to itself, does not.
    """
    if new.shape != old.shape:
        return True
    return tf.reduce_any(tf.where(tf.equal(old, old), tf.not_equal(new, old), tf.equal(new, new)))
