"""The calls of a step scale the loss, and unscale its gradients exactly once.

RFC 293, "LossScaleOptimizer Overview". `OptimizerCalls` are the calls of a `LossScaleOptimizer`,
and `GradScalerCalls` those of a `GradScaler`. The table in `tests/step/test_contract.py` tells what
follows from which calls.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.step.gradients import Gradient
from keras_mp.step.record import Notebook, Notes
from keras_mp.support import host

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
    """The calls of a step that scales nothing, and the base of those that may scale.

    Args:
        loss_scale: function that returns the current loss scale, a float32 scalar tensor.
        scales: bool. Whether these calls scale the loss. Otherwise they keep the losses, return
            what they are given, and find no call wrong or missing. Defaults to False.
        record: the `Notebook` of the calls. Defaults to one of `Notes`.
    """

    def __init__(
        self, loss_scale: LossScaleValue, scales: bool = False, record: Notebook[Any] | None = None
    ) -> None:
        self._loss_scale, self.scales = loss_scale, scales
        self._record: Notebook[Any] = record or Notebook(Notes)
        # The factor of the losses, for functions that go on with a step that was begun elsewhere.
        # A graph of TensorFlow 1 would save the variable.
        self._scaled_by: Any = None
        if scales and not host.in_v1_graph():
            self._scaled_by = host.local_variable("scaled_by", 1.0, tf.float32)

    def losses(self) -> list[tf.Tensor]:
        """Returns the unscaled losses of this step, as far as they are known here."""
        return list(self._record.current().losses)

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {} if self._scaled_by is None else {"scaled_by": self._scaled_by}

    def _scale_of(self, step: Notes) -> tf.Tensor:
        """Returns the factor by which the losses of a step were multiplied.

        The loss scale may have moved since then, by other steps or by another part of this one.
        """
        if step.scaled_by is not None:
            return step.scaled_by
        if self._scaled_by is None or host.in_v1_graph():
            return self._loss_scale()
        return tf.convert_to_tensor(self._scaled_by)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Calls":
        return type(self)(copy.deepcopy(self._loss_scale, memo), self.scales)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._loss_scale, self.scales)
