"""One step with scaled gradients: sum them, judge them, unscale them, apply them or skip the step.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16". What comes of the verdict
beside the step itself is left to an `OutcomeHandler`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from keras_mp.step.decision import Decision, Given, ReplicaState
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
        adapter, given = self.adapter, self.given
        observers.show(pairs, given.divisor, given.scaled_by)
        grads: list[Any] = [g for g, _ in pairs]
        variables = [v for _, v in pairs]
        mine = self._state_before(grads, variables)
        new_values = self._take_new_values(grads, variables)
        if adapter.takes_float32_gradients:
            grads = gradients.to_float32(grads)
        # As one more gradient, an earlier verdict is summed and judged with the others.
        if given.was_finite is not None:
            grads.append(tf.where(given.was_finite, 0.0, float("nan")))
        sums = self._summed(mine, grads, variables, aggregate)
        # One pass over the gradients less, where nothing else has to see them unscaled.
        by_update = adapter.jit_compile and not (
            sums.are_packed or new_values or adapter.accumulates()
        )
        count = len(variables)

        def one_by_one(sums: _Sums) -> list[Any]:
            return [new_values.get(i, g) for i, g in enumerate(sums.one_by_one())]

        unscaled = sums if by_update else sums.unscaled()
        if new_values or adapter.accumulates():
            unscaled = _Sums(one_by_one(unscaled))
        to_apply = sums if adapter.unscales_and_skips else unscaled
        divisor = sums.divisor if by_update or adapter.unscales_and_skips else None
        # What is packed is unpacked in the branch that needs it: it has fewer inputs then.
        mine.to_apply = lambda: one_by_one(to_apply)[:count]
        finite = self._judge(mine, variables, unscaled, aggregate)
        return self._decide(mine, variables, divisor, finite, name), finite

    def _state_before(self, grads: list[Any], variables: list[Any]) -> ReplicaState:
        """What a skipped step puts back, and what the user may have changed since unscaling."""
        given = self.given
        kept = state_rollback.keep(variables if self.handler else ())
        mine = ReplicaState(kept, given.losses, unclipped.changed_since(given.unclipped, grads))
        if given.unclipped:
            given.unclipped.clear()
        return mine

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

    def _summed(
        self, mine: ReplicaState, grads: list[Any], variables: list[Any], aggregate: bool
    ) -> "_Sums":
        """Sums gradients over replicas, and what comes after those of the variables."""
        divisor = self.given.divisor()
        as_given = _Sums(grads, divisor)
        count = len(variables)
        has_replicas = tf.distribute.get_strategy().num_replicas_in_sync > 1
        custom = self.adapter.custom_aggregation()
        if aggregate and custom:
            grads = as_given.unscaled().values
            marks = grads[count:]
            if has_replicas:
                marks = replicas.all_reduce(marks, tf.float32)
            mine.sent = functools.partial(list, grads[:count])
            summed = custom(list(zip(grads[:count], variables, strict=True)))
            return _Sums([*(g for g, _ in summed), *marks])
        if not aggregate or not has_replicas:
            return as_given
        packed, unpack = gradients.pack(grads)
        scaled_by, reduce_dtype = self.given.scaled_by, self.reduce_dtype
        if reduce_dtype == tf.float16:
            if self.handler is None or scaled_by is None:
                # Small values vanish if they are not scaled, and a sum that overflows is harmless
                # only where a step can be skipped.
                reduce_dtype = tf.float32
            elif divisor is not scaled_by:
                factor = scaled_by if divisor is None else scaled_by / divisor
                packed, divisor = gradients.scale(packed, factor), scaled_by
        given = packed if self.handler else gradients.cast_float16_to_float32(packed)
        given = workers.with_scale(given, scaled_by, divisor)
        sent = gradients.cast_float32(given, reduce_dtype)
        summed = gradients.cast_as(replicas.all_reduce(sent, tf.float32), given)
        summed = workers.checked(summed, scaled_by)
        if self.handler:
            mine.sent = lambda: unpack(sent[: len(packed)])[:count]
        # An adapter that unscales takes wider sums than it gave.
        dtypes_of = summed if self.adapter.unscales_and_skips else packed
        return _Sums(summed, divisor, lambda sums: unpack(gradients.cast_as(sums, dtypes_of)))

    def _judge(
        self, mine: ReplicaState, variables: list[Any], sums: "_Sums", aggregate: bool
    ) -> tf.Tensor | None:
        """Whether all gradients and marks are finite, on all replicas; None if it is not asked."""
        if self.handler is None:
            return None
        # Unscaled gradients are finite where scaled ones are, and the other way round.
        count, tested = len(variables), sums.values
        mine.variables, mine.judged = variables, lambda: sums.one_by_one()[:count]
        mine.totals = mine.judged
        if self.adapter.accumulates():
            pairs = self.adapter.totals(list(zip(tested[:count], variables, strict=True)))
            totals = [total for total, _ in pairs]
            mine.variables, mine.totals = [variable for _, variable in pairs], lambda: totals
            tested = [*totals, *tested[count:]]
        finite = gradients.all_finite(tested)
        if not aggregate and tf.distribute.get_strategy().num_replicas_in_sync > 1:
            finite = replicas.agree(finite)
        self.handler.watch()
        return finite

    def _decide(
        self,
        mine: ReplicaState,
        variables: list[Any],
        divisor: tf.Tensor | None,
        finite: tf.Tensor | None,
        name: str | None,
    ) -> tf.Operation | None:
        """Makes, skips or refuses the step; gradients are still to be divided by `divisor`."""
        adapter, guard = self.adapter, self.given.guard
        is_allowed = guard and guard.is_allowed

        def apply(mine: ReplicaState) -> Any:
            pairs = list(zip(mine.to_apply(), variables, strict=True))
            if not adapter.unscales_and_skips:
                return adapter.update(pairs, name, scaled_by=divisor)
            verdicts = [each for each in (finite, is_allowed) if each is not None]
            verdict = functools.reduce(tf.logical_and, verdicts or [tf.constant(True)])
            loss_scale = tf.constant(1.0) if divisor is None else divisor
            return adapter.apply_scaled(pairs, loss_scale, verdict)

        def decide(*what: Any) -> tf.Operation | None:
            return Decision(adapter, self.handler, guard, self.names, *what).carry_out()

        return replicas.decide_for_all_replicas(decide, (finite, is_allowed), mine, apply)


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Gradients, summed over replicas where there are several.

    Attributes:
        values: the gradients, as `unpack` takes them.
        divisor: float32 scalar tensor. What they are still to be divided by; None if nothing.
        unpack: returns one gradient for each that was given; None where there is nothing to do.
    """

    values: list[Any]
    divisor: tf.Tensor | None = None
    unpack: Callable[[list[Any]], list[Any]] | None = None

    @property
    def are_packed(self) -> bool:
        return self.unpack is not None

    def one_by_one(self) -> list[Any]:
        return self.unpack(self.values) if self.unpack else self.values

    def unscaled(self) -> "_Sums":
        if self.divisor is None:
            return self
        # As they are packed: one operation for many small gradients.
        return _Sums(gradients.unscale(self.values, self.divisor), None, self.unpack)
