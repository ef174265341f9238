"""The calls of a step scale the loss, and unscale its gradients exactly once.

RFC 293, "LossScaleOptimizer Overview". `OptimizerCalls` are the calls of a `LossScaleOptimizer`,
and `GradScalerCalls` those of a `GradScaler`. Their base classes, for those that scale nothing,
keep the losses. The table in `tests/step/test_contract.py` tells what follows from which calls.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.step.gradients import Gradient
from keras_mp.step.record import Notebook, Notes

LossScaleValue = Callable[[], tf.Tensor]


class GradientState(NamedTuple):
    """What is known about the gradients of a step.

    Attributes:
        scaled: bool. Whether they are still scaled.
        scaled_by: float32 scalar tensor, the factor of the loss. It is the current loss scale if no
            loss was scaled, and None if the optimizer scales no loss.
        is_divided: bool. Whether a call has divided the gradients by that factor.
        losses: the losses of this replica, as far as they are known.
        unclipped: the gradients of this replica as they were when they were unscaled, before the
            user may have clipped them; empty if they are unknown. A step empties the list.
            Otherwise the list would, in eager, keep them in memory while the step is made.
        was_finite: bool scalar tensor. An earlier verdict on gradients of this replica, which may
            have changed since; None if there was none.
    """

    scaled: bool = False
    scaled_by: tf.Tensor | None = None
    is_divided: bool = False
    losses: Sequence[tf.Tensor] = ()
    unclipped: list[Gradient] | tuple[()] = ()
    was_finite: tf.Tensor | None = None


class Calls:
    """The calls of a step that scales nothing, and the base of those that scale.

    Attributes:
        scales: bool. Whether these calls scale the loss.

    Args:
        loss_scale: function that returns the current loss scale, a float32 scalar tensor.
    """

    scales = False

    def __init__(self, loss_scale: LossScaleValue) -> None:
        self._loss_scale = loss_scale
        self._record: Notebook[Any] = Notebook(Notes)

    def scale(self, losses: Any, scaled_by: tf.Tensor | None = None) -> Any:
        """Multiplies the loss, or a structure of losses, by the loss scale.

        Args:
            losses: tensor, or structure of tensors.
            scaled_by: float32 scalar tensor. Defaults to the current loss scale.
        """
        flat = tf.nest.flatten(losses)
        self._record.notes().losses = tuple(each for each in flat if tf.is_tensor(each))
        return losses

    def losses(self) -> list[tf.Tensor]:
        """Returns the unscaled losses of this step, as far as they are known here."""
        notes, is_here = self._record.current()
        return list(notes.losses) if is_here else []

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Calls":
        return type(self)(copy.deepcopy(self._loss_scale, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._loss_scale,)
