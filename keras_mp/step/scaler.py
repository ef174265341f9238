"""The core of loss scaling: a loss scale with its calls, steps and skipped steps.

RFC 293, "LossScaleOptimizer Overview". `LossScaleOptimizer`, `GradScaler` and the optimizer of
TensorFlow 1 have one each.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf

from keras_mp.step import overflows, replicas, workers
from keras_mp.step import reduce_dtype as reduce_dtypes
from keras_mp.step.calls import Calls
from keras_mp.step.gradient_state import GradientState
from keras_mp.step.loss_scales import LossScale
from keras_mp.step.optimizer_adapter import OptimizerAdapter
from keras_mp.step.outcomes import OutcomeHandler
from keras_mp.step.scaled_step import ScaledStep
from keras_mp.step.skipped_steps import SkippedSteps
from keras_mp.support import validation

AnyCalls = TypeVar("AnyCalls", bound=Calls)


class Scaler(Generic[AnyCalls]):
    """Follows the calls that scale and unscale, and makes or skips steps.

    Attributes:
        loss_scale: the `LossScale`.
        calls: the `Calls`, which record each call, and scale and unscale.
        reduce_dtype: DType in which float32 gradients are summed over replicas.
        skipped: the `SkippedSteps`.
        handler: the `OutcomeHandler`; None if no step is ever skipped.

    Args:
        loss_scale: `LossScale`.
        calls: as the attribute.
        skip_nonfinite: bool. Whether steps with gradients that are not finite are skipped with
            every loss scale, not only with one that moves.
        reduce_dtype: str, DType or None, as `reduce_dtype.from_arguments` takes it.
        aggregate_in_float16: bool or None, also as `reduce_dtype.from_arguments` takes it.
        warn_after_skips: int, or None for never.
        at_update: bool. Whether the scale moves when `OutcomeHandler.update` is called. Defaults
            to False: each step moves it.
    """

    def __init__(
        self,
        loss_scale: LossScale,
        calls: AnyCalls,
        *,
        skip_nonfinite: bool = False,
        reduce_dtype: str | tf.DType | None = None,
        aggregate_in_float16: bool | None = None,
        warn_after_skips: int | None,
        at_update: bool = False,
    ) -> None:
        can_skip = skip_nonfinite or loss_scale.moves
        replicas.check_strategy(may_skip=can_skip)
        self.loss_scale, self.calls = loss_scale, calls
        self.reduce_dtype = reduce_dtypes.from_arguments(reduce_dtype, aggregate_in_float16)
        self.skipped = SkippedSteps(
            validation.integer_or_none("warn_after_skips", warn_after_skips), calls.callback()
        )
        self.handler: OutcomeHandler | None = None
        if can_skip:
            self.handler = OutcomeHandler(loss_scale, self.skipped, at_update=at_update)

    def step(
        self,
        adapter: OptimizerAdapter,
        pairs: Sequence[tuple[Any, Any]],
        state: GradientState,
        *,
        aggregate: bool,
        name: str | None = None,
        names: overflows.Names | None = None,
    ) -> tuple[tf.Operation | None, tf.Tensor | None]:
        """Makes a step, as `ScaledStep.make` does.

        Args:
            adapter: the `OptimizerAdapter`, built.
            pairs: sequence of (gradient, variable) pairs.
            state: the `GradientState` of the gradients.
            aggregate: bool. Whether the gradients are to be summed over replicas.
            name: str. Name of the operation.
            names: takes variables and returns the users' names for them, None for unknown ones.
        """
        self.collect_reports()
        # Checked again, since the scaler may have been made outside of the strategy's scope.
        replicas.check_strategy(may_skip=self.handler is not None)
        if workers.are_several():
            workers.meet(
                self,
                [gradient for gradient, _ in pairs],
                loss_scale=f"{type(self.loss_scale).__name__}({self.loss_scale.get_config()})",
                reduce_dtype=self.reduce_dtype.name,
            )
        step = ScaledStep(adapter, state, self.handler, self.reduce_dtype, names)
        return step.make(pairs, aggregate=aggregate, name=name)

    def collect_reports(self) -> None:
        """Gives the warnings of functions that XLA has compiled, which cannot call Python."""
        self.calls.collect_reports()
        self.skipped.collect_reports()

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        of_handler = {} if self.handler is None else self.handler.variables()
        return {**self.skipped.variables(), **self.calls.variables(), **of_handler}
