"""The state in which the calls of a step have left its gradients: scaled or not, and by what."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_mp.step.gradients import Gradient


class GradientState(NamedTuple):
    """The state of the gradients that a step is made of, as far as it is known.

    Attributes:
        scaled: bool, or bool scalar tensor. Whether they are still scaled.
        scaled_by: float32 scalar tensor, what the loss was multiplied by, or would be; None where
            nothing scales a loss.
        is_divided: tells whether they were divided by it, a bool or bool scalar tensor.
        losses: the losses of this replica, as far as they are known.
        unclipped: the gradients of this replica as they were when they were unscaled, before the
            user may have clipped them; empty where that is not known. A step empties it: in eager,
            it would keep them in memory while the step is made.
        was_finite: bool scalar tensor. An earlier verdict on gradients of this replica, which may
            have been changed since; None if there was none.
        is_allowed: bool scalar tensor, the same on every replica. False keeps the step from being
            made, whatever its gradients; None where no call can be wrong.
        refuse: called in the branch that is taken if it is False, once for all replicas.
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
        """What the gradients are still to be divided by, a float32 scalar; None if nothing."""
        if tf.is_tensor(self.scaled):
            return tf.where(self.scaled, self.scaled_by, 1.0)
        return self.scaled_by if self.scaled else None
