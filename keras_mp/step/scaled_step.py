"""One step with scaled gradients: sum them, judge them, unscale them, apply them or skip the step.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16". What comes of the verdict
beside the step itself is left to an `OutcomeHandler`.
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
        adapter: applies the gradients.
        state: what is known of the gradients.
        handler: is told of the outcome; None where no step is skipped.
        names: given variables, returns what users call them, or None where it does not know.
        kept: what has to be put back if the step is skipped.
        unclipped: the gradients as they were when they were unscaled, if they were changed since.
        variables: those that a step would be made of.
        sent: returns what the replica gave to be summed; where nothing is, what is judged.
        totals: returns what is judged, where that is something else than `sent`.
        to_apply: returns the gradients that are applied.
        divisor: float32 scalar tensor that they are still to be divided by; None if nothing.
        finite: bool scalar tensor, the verdict; None where no step is skipped.

    Args:
        adapter: `OptimizerAdapter`; what it needs is built.
        state: `GradientState`. Defaults to that of gradients whose loss nothing scales.
        handler: `OutcomeHandler`, or None (the default).
        reduce_dtype: DType. In which float32 gradients are summed over replicas; as float16 only
            where they are scaled and a step may be skipped. Defaults to float32.
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
        # Functions, since a good step needs none of it, and what is packed is unpacked in the
        # branch that needs it: it has fewer inputs then. None takes `self`, so that in eager
        # nothing outlives the step.
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
        # As one more gradient, an earlier verdict is summed and judged with the others.
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
        """Takes out of `grads` what are no gradients, but new values of their variables.

        They never were scaled, so where gradients were divided that is undone for them.
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
        """Sums gradients over replicas, and what comes after those of the variables."""
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
                # only where a step can be skipped.
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
        # An adapter that unscales takes wider sums than it gave.
        dtypes_of = summed if self.adapter.unscales_and_skips else packed
        return _Sums(summed, divisor, lambda sums: unpack(gradients.cast_as(sums, dtypes_of)))

    def _judge(self, sums: "_Sums", variables: list[Any], aggregate: bool) -> None:
        """Asks whether all gradients and marks are finite, on all replicas."""
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
        """Says that the step is made. What only a skipped one needs takes memory in eager."""
        self.kept.release()
        if tf.executing_eagerly():
            self.unclipped.clear()
            self.sent = self.totals = None

    def replica_values(self) -> overflows.ReplicaValues:
        """What is looked at if the step is skipped."""
        sent = [] if self.sent is None else self.sent()
        return overflows.ReplicaValues(self.state.losses, self.unclipped, sent)


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Gradients, summed over replicas where there are several.

    Attributes:
        values: the gradients, as `unpack` takes them.
        divisor: float32 scalar tensor. What they are still to be divided by; None if nothing.
        unpack: returns one gradient for each that was given; None where there is nothing to do.
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
        # As they are packed: one operation for many small gradients.
        return _Sums(gradients.unscale(self.values, self.divisor), None, self.unpack)


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision on a step, once for all replicas: it is made, skipped, or refused.

    Each branch moves only what such a step moves: a good one has not much to do.

    Attributes:
        finite: bool scalar tensor, the verdict; None where no step is skipped.
        is_allowed: as of the `GradientState`.
        steps: the step, of all replicas at hand.
        apply: lets each replica apply its gradients.
    """

    finite: tf.Tensor | None
    is_allowed: tf.Tensor | None
    steps: Sequence[ScaledStep]
    apply: Callable[[], Any]

    def carry_out(self) -> tf.Operation | None:
        """Returns the operation that makes or skips the step, in a TensorFlow 1 graph."""
        adapter = self.steps[0].adapter
        if adapter.unscales_and_skips:
            # It makes or skips the step by itself, which is noted here.
            applied = _operation(self.apply())
            return _operation([applied, self._choose(lambda: None, lambda: None)])
        if self.finite is None or not adapter.accumulates():
            return self._choose(self._make, adapter.drop_accumulated)
        # Only what is made of all gradients that were accumulated is a step. If some are not
        # finite, it is skipped when it is complete.
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
        """Lets the optimizer add the gradients to those before; all are judged in the end."""
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
        """What was not finite, on all replicas. Called in the branch that skips."""
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
    """Whether what comes next is done by several replicas or workers, each for itself."""
    if not tf.distribute.has_strategy():
        return False
    return not tf.distribute.in_cross_replica_context() or workers.are_several()


def _operation(result: Any) -> tf.Operation | None:
    """What both branches of `tf.cond` return: an operation, which only TensorFlow 1 has to run."""
    if not host.in_v1_graph():
        return None
    of_replicas = tf.distribute.get_strategy().experimental_local_results(result)
    return tf.group(*(each for each in tf.nest.flatten(of_replicas) if each is not None))
