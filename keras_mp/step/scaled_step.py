"""One step with scaled gradients: sum them, judge them, unscale them, apply them or skip the step.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16". What comes of the verdict
beside the step itself is left to an `OutcomeHandler`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import (
    gradients,
    observers,
    overflows,
    replicas,
    state_rollback,
    unclipped,
    workers,
)
from keras_mp.step.decision import Decision, Given, ReplicaState, has_total
from keras_mp.step.optimizer_adapter import OptimizerAdapter
from keras_mp.step.outcomes import OutcomeHandler


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """Makes a step; to be called in a replica context.

    Attributes:
        adapter: applies the gradients; what it needs is built.
        handler: is told of the outcome; None where no step is skipped.
        reduce_dtype: DType. In which float32 gradients are summed over replicas; as float16 only
            where they are scaled and a step may be skipped.
        given: what is known of the gradients.
        names: given variables, returns what users call them, or None where it does not know.
    """

    adapter: OptimizerAdapter
    handler: OutcomeHandler | None
    reduce_dtype: tf.DType
    given: Given
    names: overflows.Names | None = None

    def make(
        self,
        pairs: Sequence[tuple[Any, Any]],
        *,
        aggregate: bool = True,
        name: str | None = None,
    ) -> tuple[tf.Operation | None, tf.Tensor | None]:
        """Makes the step.

        Args:
            pairs: sequence of (gradient, variable) pairs.
            aggregate: bool. Whether the gradients are to be summed over replicas.
            name: str. Name of the operation.

        Returns:
            tuple of the operation that makes the step in a TensorFlow 1 graph, else None, and of
            the verdict, a bool scalar tensor that is the same on every replica; None where no step
            is skipped.
        """
        given, scaled = self.given, self.given.scaled
        scaled_by: Any = given.scaled_by
        observers.show(pairs, scaled, scaled_by)
        grads: list[Any] = [g for g, _ in pairs]
        variables = [v for _, v in pairs]
        kept = state_rollback.keep(variables if self.handler else ())
        mine = ReplicaState(kept, given.losses, unclipped.changed_since(given.unclipped, grads))
        if given.unclipped:
            given.unclipped.clear()
        new_values = self._take_new_values(grads, variables)
        if self.adapter.takes_float32_gradients:
            grads = gradients.to_float32(grads)
        # As one more gradient, an earlier verdict is summed and judged with the others.
        marks: list[Any] = (
            [] if given.was_finite is None else [tf.where(given.was_finite, 0.0, float("nan"))]
        )
        if tf.is_tensor(scaled):
            grads = gradients.unscale(grads, tf.where(scaled, scaled_by, 1.0))
            scaled = False
        grads, marks, scaled = self._reduced(
            mine, grads, marks, variables, scaled, scaled_by, aggregate
        )
        safe = self.adapter.unscales_and_skips
        # One pass over the gradients less, where nothing else has to see them unscaled.
        unscales = self.adapter.jit_compile and not (new_values or self.adapter.accumulates())
        unscaled = gradients.unscale(grads, scaled_by) if scaled and not unscales else grads
        unscaled, mine.to_apply = (
            [new_values.get(i, g) for i, g in enumerate(each)]
            for each in (unscaled, grads if safe else unscaled)
        )
        mine.judged = list(zip(unscaled, variables, strict=True))
        finite = None
        if self.handler:
            # Unscaled gradients are finite where scaled ones are, and the other way round.
            totals = self.adapter.totals(mine.judged)
            mine.variables = [variable for _, variable in totals]
            finite = gradients.all_finite([*(total for total, _ in totals), *marks])
            if not aggregate and tf.distribute.get_strategy().num_replicas_in_sync > 1:
                finite = replicas.agree(finite)
            self.handler.watch()
        loss_scale = scaled_by if scaled else tf.constant(1.0)
        is_allowed = given.guard and given.guard.is_allowed

        def apply(mine: ReplicaState) -> Any:
            pairs = list(zip(mine.to_apply, variables, strict=True))
            if safe:
                verdicts = [each for each in (finite, is_allowed) if each is not None]
                verdict = functools.reduce(tf.logical_and, verdicts or [tf.constant(True)])
                return self.adapter.apply_scaled(pairs, loss_scale, verdict)
            left = scaled_by if scaled and unscales else None
            return self.adapter.update(pairs, name, scaled_by=left)

        def decide(*what: Any) -> tf.Operation | None:
            return Decision(self.adapter, self.handler, given.guard, self.names, *what).carry_out()

        operation = replicas.decide_for_all_replicas(
            decide, (finite, is_allowed), mine, apply, self._look
        )
        return operation, finite

    def _reduced(
        self,
        mine: ReplicaState,
        grads: list[Any],
        marks: list[Any],
        variables: list[Any],
        scaled: Any,
        scaled_by: Any,
        aggregate: bool,
    ) -> tuple[list[Any], list[Any], bool]:
        """Sums gradients, and marks beside them; also tells whether the sums are scaled."""
        num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
        custom = self.adapter.custom_aggregation()
        if aggregate and custom:
            if scaled:
                grads = gradients.unscale(grads, scaled_by)
            if num_replicas > 1:
                marks = replicas.all_reduce(marks, tf.float32)
            mine.sent = functools.partial(list, grads)
            grads = [g for g, _ in custom(list(zip(grads, variables, strict=True)))]
            return grads, marks, False
        if not aggregate or num_replicas == 1:
            return grads, marks, scaled
        packed, unpack = gradients.pack([*grads, *marks])
        packed, scaled, sent = self._sum_over_replicas(packed, scaled, scaled_by)
        mine.sent = lambda: unpack(sent)[: len(grads)]
        if scaled and not self.adapter.unscales_and_skips:
            packed, scaled = gradients.unscale(packed, scaled_by), False
        summed = unpack(packed)
        return summed[: len(grads)], summed[len(grads) :], scaled

    def _sum_over_replicas(
        self, grads: list[Any], scaled: bool, scaled_by: Any
    ) -> tuple[list[Any], bool, list[Any]]:
        """Sums gradients over replicas; tells whether the sums are scaled, and what was sent."""
        in_float16 = self.reduce_dtype == tf.float16 and scaled_by is not None
        reduce_dtype = self.reduce_dtype
        if reduce_dtype == tf.float16 and not (self.handler and in_float16):
            # Small values vanish if they are not scaled, and a sum that overflows is harmless only
            # where a step can be skipped.
            reduce_dtype = tf.float32
        if self.handler:
            if in_float16 and not scaled:
                grads, scaled = gradients.scale(grads, scaled_by), True  # pyright: ignore
            given = workers.with_scale(grads, scaled_by)
            sent = gradients.cast_float32(given, reduce_dtype)
            summed = gradients.cast_as(replicas.all_reduce(sent, tf.float32), given)
            return workers.checked(summed, scaled_by), scaled, sent[: len(grads)]
        given = workers.with_scale(gradients.cast_float16_to_float32(grads), scaled_by)
        summed = workers.checked(replicas.all_reduce(given, reduce_dtype), scaled_by)
        if self.adapter.unscales_and_skips:
            return summed, scaled, []
        if scaled:
            summed = gradients.unscale(summed, scaled_by)  # pyright: ignore
        return gradients.cast_as(summed, grads), False, []

    def _take_new_values(self, grads: list[Any], variables: list[Any]) -> dict[int, Any]:
        """Takes out of `grads` what are no gradients, but new values of their variables.

        They never were scaled, so where gradients were divided that is undone for them.
        """
        values = {}
        for i, variable in enumerate(variables):
            if grads[i] is not None and self.adapter.is_overwritten(variable):
                is_divided = self.given.is_divided()
                values[i], grads[i] = grads[i], None
                if is_divided is not False:
                    factor = tf.where(is_divided, self.given.scaled_by, 1.0)
                    [values[i]] = gradients.scale([values[i]], factor)
        return values

    def _look(self, mine: ReplicaState) -> tf.Tensor:
        """Counts what was not finite. Called on each replica, which tells all others."""
        judged = [gradient for gradient, _ in mine.judged]
        totals = None
        if has_total(self.adapter, mine):
            totals = [total for total, _ in self.adapter.totals(mine.judged)]
        sent = mine.sent() if mine.sent else judged
        return overflows.look(mine.losses, mine.unclipped, sent, totals)
