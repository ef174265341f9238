"""One step with scaled gradients: sum them, judge them, unscale them, apply them or skip the step.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16". An `OutcomeHandler` moves the
scale and counts skipped steps.
"""

import dataclasses
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
from keras_mp.step.gradient_state import GradientState
from keras_mp.step.gradients import Gradient
from keras_mp.step.optimizer_adapter import OptimizerAdapter
from keras_mp.step.outcomes import OutcomeHandler
from keras_mp.support import host


class ScaledStep:
    """A step of a replica.

    Attributes:
        adapter: the `OptimizerAdapter`, which applies the gradients.
        state: the `GradientState` of the gradients.
        handler: the `OutcomeHandler`; None if no step is ever skipped.
        names: takes variables and returns the users' names for them, None for unknown ones.
        kept: the values to restore if the step is skipped.
        unclipped: the gradients as they were when they were unscaled; empty if they were not
            changed since then.
        variables: the variables of the gradients that are tested.
        sent: function that returns the gradients as sent to the all-reduce; without an all-reduce,
            those that are tested.
        totals: function that returns the gradients that are tested; None if these are `sent`.
        to_apply: function that returns the gradients that are applied.
        divisor: float32 scalar tensor, the number that unscales them; None if they are unscaled.
        finite: bool scalar tensor, the verdict; None if no step is ever skipped.

    Args:
        adapter: `OptimizerAdapter`, built.
        state: `GradientState`. Defaults to that of gradients that were never scaled.
        handler: `OutcomeHandler`, or None (the default).
        reduce_dtype: DType in which float32 gradients are summed over replicas. float16 is used
            only if they are scaled and a step may be skipped. Defaults to float32.
        names: as the attribute, or None (the default).
    """

    def __init__(
        self,
        adapter: OptimizerAdapter,
        state: GradientState | None = None,
        handler: OutcomeHandler | None = None,
        reduce_dtype: tf.DType = tf.float32,
        names: overflows.Names | None = None,
    ) -> None:
        self.adapter, self.handler, self.names = adapter, handler, names
        self.state = GradientState() if state is None else state
        self._reduce_dtype = reduce_dtype
        self.unclipped: list[Gradient] = []
        # Functions, since a good step does not call them, and a branch that unpacks gradients
        # itself has fewer inputs. None of them uses `self`, so that in eager nothing outlives
        # the step.
        self.sent: Callable[[], list[Gradient]] | None = None
        self.totals: Callable[[], list[Gradient]] | None = None
        self.to_apply: Callable[[], list[Gradient]] = list
        self.divisor: tf.Tensor | None = None
        self.finite: tf.Tensor | None = None

    def make(
        self,
        pairs: Sequence[tuple[Gradient, Any]],
        *,
        aggregate: bool = True,
        name: str | None = None,
    ) -> tuple[tf.Operation | None, tf.Tensor | None]:
        """Makes the step, once, in a replica context.

        Args:
            pairs: sequence of (gradient, variable) pairs.
            aggregate: bool. Whether the gradients are to be summed over replicas.
            name: str. Name of the operation.

        Returns:
            tuple of the operation that makes the step in a TensorFlow 1 graph, else None, and of
            the verdict, a bool scalar tensor that is the same on every replica; None where no step
            is skipped.
        """
        adapter, state = self.adapter, self.state
        for observe in observers.of_this_thread():
            observe(pairs, state.divisor(), state.scaled_by)
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        self.kept = state_rollback.keep(variables if self.handler else ())
        if state.unclipped:
            self.unclipped = unclipped.changed_since(state.unclipped, grads)
            state.unclipped.clear()
        new_values = self._take_new_values(grads, variables)
        if adapter.takes_float32_gradients:
            grads = adapter.widened(grads)
        # An earlier verdict is one more gradient, a mark, which is summed and tested with them.
        if state.was_finite is not None:
            grads.append(tf.where(state.was_finite, 0.0, float("nan")))
        sums = self._summed(grads, variables, aggregate)
        # A compiled update unscales in its own pass over the gradients.
        update_unscales = adapter.unscales_and_skips or (
            adapter.jit_compile and not (sums.are_packed or new_values or adapter.accumulates())
        )
        if not update_unscales:
            sums = sums.unscaled()
        if new_values or adapter.accumulates():
            sums = _Sums([new_values.get(i, g) for i, g in enumerate(sums.one_by_one())])
        count = len(variables)
        self.to_apply, self.divisor = lambda: sums.one_by_one()[:count], sums.divisor
        self._judge(sums, variables, aggregate)

        def apply(step: ScaledStep) -> Any:
            pairs = list(zip(step.to_apply(), variables, strict=True))
            verdicts = [each for each in (step.finite, step.state.is_allowed) if each is not None]
            return adapter.update(pairs, name, divisor=step.divisor, verdicts=verdicts)

        def decide(*what: Any) -> tf.Operation | None:
            return Decision(*what).carry_out()

        verdicts = self.finite, state.is_allowed
        return replicas.decide_for_all_replicas(decide, verdicts, self, apply), self.finite

    def _take_new_values(self, grads: list[Gradient], variables: list[Any]) -> dict[int, Gradient]:
        """Moves new values of variables, which are not gradients, out of `grads`.

        They were never scaled. If they were divided with the gradients, that is undone.
        """
        values = {}
        for i, variable in enumerate(variables):
            if grads[i] is not None and self.adapter.is_overwritten(variable):
                is_divided = self.state.is_divided()
                values[i], grads[i] = grads[i], None
                if is_divided is not False:
                    factor = tf.where(is_divided, self.state.scaled_by, 1.0)
                    [values[i]] = gradients.scale([values[i]], factor)
        return values

    def _summed(self, grads: list[Gradient], variables: list[Any], aggregate: bool) -> "_Sums":
        """Sums gradients over replicas, and the marks that follow those of the variables."""
        divisor = self.state.divisor()
        as_given = _Sums(grads, divisor)
        count = len(variables)
        has_replicas = tf.distribute.get_strategy().num_replicas_in_sync > 1
        custom = self.adapter.custom_aggregation()
        if aggregate and custom:
            grads = as_given.unscaled().values
            marks = grads[count:]
            if has_replicas:
                marks = replicas.all_reduce(marks, tf.float32)
            sent = grads[:count]
            self.sent = lambda: sent
            summed = custom(list(zip(sent, variables, strict=True)))
            return _Sums([*(g for g, _ in summed), *marks])
        if not aggregate or not has_replicas:
            return as_given
        packed, unpack = gradients.pack(grads)
        scaled_by, reduce_dtype = self.state.scaled_by, self._reduce_dtype
        if reduce_dtype == tf.float16:
            if self.handler is None or scaled_by is None:
                # Small values vanish if they are not scaled, and a sum that overflows is harmless
                # only if the step can be skipped.
                reduce_dtype = tf.float32
            elif divisor is not scaled_by:
                factor = scaled_by if divisor is None else scaled_by / divisor
                packed, divisor = gradients.scale(packed, factor), scaled_by
        given = packed if self.handler else gradients.cast(packed, [tf.float16], tf.float32)
        given = workers.with_scale(given, scaled_by, divisor)
        sent = gradients.cast(given, [tf.float32], reduce_dtype)
        summed = gradients.cast_as(replicas.all_reduce(sent, tf.float32), given)
        summed = workers.checked(summed, scaled_by)
        if self.handler:
            self.sent = lambda: unpack(sent[: len(packed)])[:count]
        # An adapter that unscales gets the sums in their wider dtypes.
        dtypes_of = summed if self.adapter.unscales_and_skips else packed
        return _Sums(summed, divisor, lambda sums: unpack(gradients.cast_as(sums, dtypes_of)))

    def _judge(self, sums: "_Sums", variables: list[Any], aggregate: bool) -> None:
        """Tests whether all gradients and marks are finite, on all replicas."""
        if self.handler is None:
            return
        # Unscaled gradients are finite where scaled ones are, and the other way round.
        count, tested, self.variables = len(variables), sums.values, variables
        if self.sent is None:
            self.sent = self.to_apply
        else:
            self.totals = self.to_apply
        if self.adapter.accumulates():
            pairs = self.adapter.totals(list(zip(tested[:count], variables, strict=True)))
            totals = [total for total, _ in pairs]
            self.variables, self.totals = [variable for _, variable in pairs], lambda: totals
            tested = [*totals, *tested[count:]]
        self.finite = gradients.all_finite(tested)
        if not aggregate and tf.distribute.get_strategy().num_replicas_in_sync > 1:
            self.finite = replicas.agree(self.finite)
        self.handler.watch()

    def release(self) -> None:
        """Releases the values that only a skipped step needs, which take memory in eager."""
        self.kept.release()
        if tf.executing_eagerly():
            self.unclipped.clear()
            self.sent = self.totals = None

    def replica_values(self) -> overflows.ReplicaValues:
        """Returns the values in which a skipped step counts Inf and NaN."""
        sent = [] if self.sent is None else self.sent()
        return overflows.ReplicaValues(self.state.losses, self.unclipped, sent)


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Gradients, summed over replicas where there are several.

    Attributes:
        values: the gradients, packed if there is an `unpack`.
        divisor: float32 scalar tensor, the number that unscales them; None if they are unscaled.
        unpack: function that returns the single gradients; None if they are not packed.
    """

    values: list[Gradient]
    divisor: tf.Tensor | None = None
    unpack: Callable[[list[Gradient]], list[Gradient]] | None = None

    @property
    def are_packed(self) -> bool:
        return self.unpack is not None

    def one_by_one(self) -> list[Gradient]:
        return self.unpack(self.values) if self.unpack else self.values

    def unscaled(self) -> "_Sums":
        if self.divisor is None:
            return self
        # Unscaled while they are packed: one operation for many small gradients.
        return _Sums(gradients.unscale(self.values, self.divisor), None, self.unpack)


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision on a step, once for all replicas: it is made, skipped, or refused.

    Each branch does only its own work, so that a good step has little to do.

    Attributes:
        finite: bool scalar tensor, the verdict; None if no step is ever skipped.
        is_allowed: that of the `GradientState`.
        steps: the `ScaledStep`s of all replicas at hand.
        apply: function that lets each replica apply its gradients.
    """

    finite: tf.Tensor | None
    is_allowed: tf.Tensor | None
    steps: Sequence[ScaledStep]
    apply: Callable[[], Any]

    def carry_out(self) -> tf.Operation | None:
        """Carries out the decision, in a TensorFlow 1 graph as the operation that it returns."""
        adapter = self.steps[0].adapter
        if adapter.unscales_and_skips:
            # The optimizer makes or skips the step itself. Here only the outcome is handled.
            applied = _operation(self.apply())
            return _operation([applied, self._choose(lambda: None, lambda: None)])
        if self.finite is None or not adapter.accumulates():
            return self._choose(self._make, adapter.drop_accumulated)
        # A step is made of all gradients that were accumulated. If some of them are not finite, it
        # is skipped when it is complete.
        return tf.cond(
            adapter.completes_step(),
            lambda: self._choose(self._make, adapter.drop_accumulated),
            lambda: self._unless_refused(self._add),
        )

    def _choose(self, make: Callable[[], Any], drop: Callable[[], None]) -> tf.Operation | None:
        handler = self.steps[0].handler
        if self.finite is None or handler is None:
            return self._unless_refused(lambda: _operation([make()]))

        def good() -> tf.Operation | None:
            return _operation([make(), *handler.good()])

        def skip() -> tf.Operation | None:
            seen = self._seen()
            drop()
            put_back = self._put_back()
            weights = [weight for step in self.steps for weight in step.kept.weights]
            with tf.control_dependencies(put_back):
                noted = handler.bad(seen, weights)
            return _operation([*put_back, *noted])

        if not host.in_v1_graph() and not _replicas_may_meet():
            skip = host.as_one_operation(skip)
        if self.is_allowed is None:
            return tf.cond(self.finite, good, skip)
        # A good step passes one condition only.
        is_good = tf.logical_and(self.finite, self.is_allowed)
        return tf.cond(is_good, good, lambda: self._unless_refused(skip))

    def _unless_refused(self, step: Callable[[], Any]) -> tf.Operation | None:
        if self.is_allowed is None:
            return step()

        def refuse() -> tf.Operation | None:
            put_back = self._put_back()
            self.steps[0].state.refuse()
            return _operation(put_back)

        return tf.cond(self.is_allowed, step, refuse)

    def _make(self) -> tf.Operation | None:
        for step in self.steps:
            if step.handler is not None:
                step.release()
        return _operation(self.apply())

    def _add(self) -> tf.Operation | None:
        """Lets the optimizer accumulate the gradients, which the complete step tests."""
        operations = [_operation(self.apply())]
        if any(step.kept for step in self.steps):
            put_back = tf.cond(
                self.finite, lambda: _operation([]), lambda: _operation(self._put_back())
            )
            operations.append(put_back)
        handler = self.steps[0].handler
        return _operation([*operations, *(handler.accumulated() if handler else [])])

    def _put_back(self) -> list[tf.Operation]:
        return [operation for step in self.steps for operation in step.kept.put_back()]

    def _seen(self) -> overflows.NonFiniteCounts | None:
        """Counts Inf and NaN on all replicas. Called in the branch that skips."""
        if host.in_v1_graph():
            return None
        first = self.steps[0]
        totals = None if first.totals is None else first.totals()
        steps_made = first.adapter.steps_made()
        counts = overflows.count_not_finite([step.replica_values() for step in self.steps], totals)
        return overflows.NonFiniteCounts(
            first.variables, counts, totals is not None, steps_made, first.names
        )


def _replicas_may_meet() -> bool:
    """Whether several replicas or workers run this code, each for itself."""
    if not tf.distribute.has_strategy():
        return False
    return not tf.distribute.in_cross_replica_context() or workers.are_several()


def _operation(result: Any) -> tf.Operation | None:
    """Returns the result of a branch of `tf.cond`: an operation in TensorFlow 1, else None."""
    if not host.in_v1_graph():
        return None
    of_replicas = tf.distribute.get_strategy().experimental_local_results(result)
    return tf.group(*(each for each in tf.nest.flatten(of_replicas) if each is not None))
