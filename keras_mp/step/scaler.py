"""A `Scaler`: a loss scale with its calls, and with the outcomes of steps.

RFC 293, "LossScaleOptimizer Overview". `LossScaleOptimizer`, `GradScaler` and the optimizer of
TensorFlow 1 have one each.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf

from keras_mp.hooks import observers
from keras_mp.step import replicas, under_way
from keras_mp.step.calls import Calls
from keras_mp.step.gradients import Gradient
from keras_mp.step.loss_scales import LossScale
from keras_mp.step.outcomes import OutcomeHandler, SkippedSteps
from keras_mp.support import validation

C = TypeVar("C", bound=Calls)


class Scaler(Generic[C]):
    """The scale and the calls of a step, and what counts its outcomes.

    Attributes:
        loss_scale: the `LossScale`.
        calls: the `Calls`, which record each call, and scale and unscale.
        reduce_dtype: DType in which float32 gradients are summed over replicas.
        skipped: the `SkippedSteps`.
        handler: the `OutcomeHandler`; None if no step is ever skipped.

    Args:
        loss_scale: `LossScale`.
        calls: as the attribute.
        skip_nonfinite: bool. Whether steps with gradients that are not finite are always skipped,
            not only with a loss scale that moves.
        reduce_dtype: str, DType or None, as `replicas.reduce_dtype_of` takes it.
        aggregate_in_float16: bool or None, also as `replicas.reduce_dtype_of` takes it.
        warn_after_skips: int, or None for never.
        raise_after_skips: int, or None for never (the default).
    """

    new_handler: type[OutcomeHandler] = OutcomeHandler

    def __init__(
        self,
        loss_scale: LossScale,
        calls: C,
        *,
        skip_nonfinite: bool = False,
        reduce_dtype: str | tf.DType | None = None,
        aggregate_in_float16: bool | None = None,
        warn_after_skips: int | None,
        raise_after_skips: int | None = None,
    ) -> None:
        can_skip = skip_nonfinite or loss_scale.moves
        replicas.check_strategy(may_skip=can_skip)
        self.loss_scale, self.calls = loss_scale, calls
        self.reduce_dtype = replicas.reduce_dtype_of(reduce_dtype, aggregate_in_float16)
        self.skipped = SkippedSteps(
            loss_scale,
            validation.integer_or_none("warn_after_skips", warn_after_skips),
            validation.integer_or_none("raise_after_skips", raise_after_skips),
            calls.reports,
        )
        self.handler: OutcomeHandler | None = None
        if can_skip:
            self.handler = self.new_handler(loss_scale, self.skipped)

    def begin_step(self, grads: Sequence[Gradient], scaled: Any) -> None:
        """Begins a step.

        Args:
            grads: the gradients of this replica.
            scaled: bool, or bool scalar tensor. Whether they are still scaled.
        """
        observers.tell(observers.Observer.step_begins)
        self.collect_reports()
        # Checked again, since the scaler may have been made outside of the strategy's scope.
        replicas.check_strategy(may_skip=self.handler is not None)
        if replicas.number_of_workers() > 1:
            with tf.init_scope():
                scale = repr(self.loss_scale)
            facts = {
                "loss_scale": scale,
                "reduce_dtype": self.reduce_dtype.name,
                "gradients are still scaled": scaled if isinstance(scaled, bool) else "not known",
            }
            observers.tell(observers.Observer.workers_meet, self, grads, facts)

    def end_step(self) -> None:
        """Ends a step that was made or skipped."""
        under_way.thread.step.begin()

    def collect_reports(self) -> None:
        """Issues the warnings of what XLA has compiled, which cannot call Python."""
        self.calls.collect_reports()
        self.skipped.report.collect()

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        of_handler = {} if self.handler is None else self.handler.variables()
        return {**self.skipped.report.variables(), **self.calls.variables(), **of_handler}
