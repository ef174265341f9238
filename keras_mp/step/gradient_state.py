"""The state of gradients after the calls of a step: whether they are scaled, and by what."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_mp.step.gradients import Gradient


class GradientState(NamedTuple):
    """The known state of the gradients of a step.

    Attributes:
        scaled: bool, or bool scalar tensor. Whether they are still scaled.
        scaled_by: float32 scalar tensor, the factor of the loss, even if it was not scaled; None if
            the optimizer scales no loss.
        is_divided: function that returns whether a call has divided them by it, a bool or bool
            scalar tensor.
        losses: the losses of this replica, as far as they are known.
        unclipped: the gradients of this replica as they were when they were unscaled, before the
            user may have clipped them; empty if they are unknown. A step empties the list, which
            in eager would keep them in memory while the step is made.
        was_finite: bool scalar tensor. An earlier verdict on gradients of this replica, which may
            have been changed since; None if there was none.
        is_allowed: bool scalar tensor, the same on every replica. If it is False, the step is not
            made, whatever its gradients are; None if no call can be wrong.
        refuse: function that reports this. It is called once for all replicas, in the branch that
            does not make the step.
    """

    scaled: bool | tf.Tensor = False
    scaled_by: tf.Tensor | None = None
    is_divided: Callable[[], bool | tf.Tensor] = lambda: False
    losses: Sequence[tf.Tensor] = ()
    unclipped: list[Gradient] | tuple[()] = ()
    was_finite: tf.Tensor | None = None
    is_allowed: tf.Tensor | None = None
    refuse: Callable[[], None] = lambda: None

    def divisor(self) -> tf.Tensor | None:
        """Returns the number that unscales the gradients, a float32 scalar; None if unscaled."""
        if tf.is_tensor(self.scaled):
            return tf.where(self.scaled, self.scaled_by, 1.0)
        return self.scaled_by if self.scaled else None
