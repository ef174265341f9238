"""The calls of a step scale the loss, and unscale its gradients exactly once.

RFC 293, "LossScaleOptimizer Overview". `OptimizerCalls` are the calls of a `LossScaleOptimizer`,
and `GradScalerCalls` those of a `GradScaler`; both keep a `Record`. Their base classes, for those
that scale nothing, keep the losses. This module has what all calls share. The table in
`tests/step/test_contract.py` tells what follows from which calls.
"""

import abc
import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from keras_mp.step.gradients import Gradient
from keras_mp.step.record import Notebook, Record
from keras_mp.step.stages import Truth
from keras_mp.support import messages

if TYPE_CHECKING:
    from keras_mp.support.host_callback import HostCallback

LossScaleValue = Callable[[], tf.Tensor]


class GradientState(NamedTuple):
    """What is known about the gradients of a step.

    Attributes:
        scaled: bool, or bool scalar tensor. Whether they are still scaled.
        scaled_by: float32 scalar tensor, the factor of the loss. It is the current loss scale if no
            loss was scaled, and None if the optimizer scales no loss.
        is_divided: function that returns whether a call has divided the gradients by that factor, a
            bool or bool scalar tensor.
        losses: the losses of this replica, as far as they are known.
        unclipped: the gradients of this replica as they were when they were unscaled, before the
            user may have clipped them; empty if they are unknown. A step empties the list.
            Otherwise the list would, in eager, keep them in memory while the step is made.
        was_finite: bool scalar tensor. An earlier verdict on gradients of this replica, which may
            have changed since; None if there was none.
        is_allowed: bool scalar tensor, the same on every replica. If it is False, the step is not
            made, whatever its gradients are. None if no call can be wrong.
        refuse: function that reports that the step is not allowed. It is called once for all
            replicas, in the branch that does not make the step.
    """

    scaled: Truth = False
    scaled_by: tf.Tensor | None = None
    is_divided: Callable[[], Truth] = lambda: False
    losses: Sequence[tf.Tensor] = ()
    unclipped: list[Gradient] | tuple[()] = ()
    was_finite: tf.Tensor | None = None
    is_allowed: tf.Tensor | None = None
    refuse: Callable[[], None] = lambda: None

    def divisor(self) -> tf.Tensor | None:
        """Returns the number that unscales the gradients; None if they are unscaled.

        It is a float32 scalar.
        """
        if tf.is_tensor(self.scaled):
            return tf.where(self.scaled, self.scaled_by, 1.0)
        return self.scaled_by if self.scaled else None


class Calls:
    """The calls of a step that scales nothing, and the base of those that scale.

    Attributes:
        scales: bool. Whether these calls scale the loss.
        reports: the `HostCallback` that reports wrong calls in graphs; None if there is none.

    Args:
        loss_scale: function that returns the current loss scale, a float32 scalar tensor.
    """

    scales = False
    reports: "HostCallback | None" = None

    def __init__(self, loss_scale: LossScaleValue) -> None:
        self._loss_scale = loss_scale
        self._record = self._new_record()

    def _new_record(self) -> Notebook:
        return Notebook()

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
        return list(self._record.notes().losses)

    def collect_reports(self) -> None:
        """Gives the warnings of functions that XLA has compiled.

        These cannot call Python.
        """
        if self.reports is not None:
            self.reports.collect()

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Calls":
        return type(self)(copy.deepcopy(self._loss_scale, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._loss_scale,)


class RecordedCalls(Calls, abc.ABC):
    """Calls that scale, and keep a `Record` for functions that run without Python."""

    scales = True
    reports: "HostCallback"
    # Makes the reports. `extensions` sets it, so that the core imports nothing that reports.
    new_reports: "Callable[..., HostCallback]"
    _record: Record
    # How many numbers a report has.
    _report_size = 1

    def __init__(self, loss_scale: LossScaleValue) -> None:
        super().__init__(loss_scale)
        if self._record.has_variables:
            self.reports = self.new_reports(self._report, size=self._report_size)

    @abc.abstractmethod
    def _new_record(self) -> Record: ...

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the record and the buffer of reports."""
        if not self._record.has_variables:
            return {}
        return {**self._record.variables(), **self.reports.variables("call_report")}

    @abc.abstractmethod
    def _report(self, numbers: list[int], line: messages.Line | None) -> None:
        """Warns of a wrong call, given the numbers that were posted."""
