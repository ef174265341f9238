"""One step with scaled gradients: sum them, judge them, unscale them, apply them or skip the step.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16". What comes of the verdict
beside the step itself is left to an `OutcomeHandler`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.step import gradients, observers, overflows, state_rollback
from keras_mp.step.optimizer_adapter import OptimizerAdapter
from keras_mp.step.outcomes import OutcomeHandler
from keras_mp.step.overflows import Seen
from keras_mp.support import host


class Guard(NamedTuple):
    """Keeps a step from being made, whatever its gradients.

    Attributes:
        is_allowed: bool scalar tensor, the same on every replica.
        refuse: called in the branch that is taken if it is False, once for all replicas.
    """

    is_allowed: tf.Tensor
    refuse: Callable[[], None]


class Given(NamedTuple):
    """The gradients that a step is made of, as far as they are known.

    Attributes:
        scaled: bool, or bool scalar tensor. Whether they are still scaled.
        scaled_by: float32 scalar tensor, what the loss was multiplied by, or would be; None where
            nothing scales a loss.
        is_divided: tells whether they were divided by it, a bool or bool scalar tensor.
        losses: the losses of this replica, as far as they are known.
        unclipped: the gradients of this replica as they were when they were unscaled, before the
            user may have clipped them; empty where that is not known. `ScaledStep.make` empties it:
            in eager, it would keep them in memory while the step is made.
        was_finite: bool scalar tensor. An earlier verdict on gradients of this replica, which may
            have been changed since; None if there was none.
        guard: keeps the step from being made; None where no call can be wrong.
    """

    scaled: bool | tf.Tensor = False
    scaled_by: tf.Tensor | None = None
    is_divided: Callable[[], bool | tf.Tensor] = lambda: False
    losses: Sequence[tf.Tensor] = ()
    unclipped: Any = ()
    was_finite: tf.Tensor | None = None
    guard: Guard | None = None


class _ReplicaState:
    """The state of a replica that the decision takes.

    Attributes:
        kept: what it has to put back if the step is skipped.
        losses: its losses, as far as they are known.
        unclipped: its gradients as they were when they were unscaled, if they were changed since.
        sent: returns what it gave to be summed; None where nothing was.
        judged: (gradient, variable) pairs, unscaled, of which the verdict is.
        to_apply: the gradients that are applied.
        variables: those that a step would be made of.
    """

    def __init__(
        self,
        kept: state_rollback.Kept,
        losses: Sequence[tf.Tensor],
        unclipped: list[gradients.Gradient],
    ) -> None:
        self.kept, self.losses, self.unclipped = kept, list(losses), unclipped
        self.sent: Callable[[], list[gradients.Gradient]] | None = None
        self.judged: list[tuple[Any, Any]] = []
        self.to_apply: list[gradients.Gradient] = []
        self.variables: list[Any] = []

    def let_go(self) -> None:
        """Says that the step is made. What only a skipped one needs takes memory in eager."""
        self.kept.let_go()
        if tf.executing_eagerly():
            self.unclipped.clear()
            self.sent = None


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
        given, scaled, scaled_by = self.given, self.given.scaled, self.given.scaled_by
        observers.show(pairs, scaled, scaled_by)
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        kept = state_rollback.keep(variables if self.handler else ())
        mine = _ReplicaState(kept, given.losses, overflows.changed_since(given.unclipped, grads))
        if given.unclipped:
            given.unclipped.clear()
        new_values = self._take_new_values(grads, variables)
        # As one more gradient, an earlier verdict is summed and judged with the others.
        marks = [] if given.was_finite is None else [tf.where(given.was_finite, 0.0, float("nan"))]
        if tf.is_tensor(scaled):
            grads = gradients.unscale(grads, tf.where(scaled, scaled_by, 1.0))
            scaled = False
        grads, marks, scaled = self._reduced(
            mine, grads, marks, variables, scaled, scaled_by, aggregate
        )
        safe = self.adapter.is_scaling_safe
        unscaled = gradients.unscale(grads, scaled_by) if scaled else grads
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
                finite = gradients.agree(finite)
            self.handler.watch()
        loss_scale = scaled_by if scaled else tf.constant(1.0)
        is_allowed = given.guard and given.guard.is_allowed

        def apply(mine: _ReplicaState) -> Any:
            pairs = list(zip(mine.to_apply, variables, strict=True))
            if safe:
                verdicts = [each for each in (finite, is_allowed) if each is not None]
                verdict = functools.reduce(tf.logical_and, verdicts or [tf.constant(True)])
                return self.adapter.apply_scaled(pairs, loss_scale, verdict)
            return self.adapter.apply(pairs, name, aggregate=False)

        decide = self._let_it_skip if safe else self._apply_or_skip
        operation = gradients.decide_for_all_replicas(
            decide, (finite, is_allowed), mine, apply, self._look
        )
        return operation, finite

    def _reduced(
        self,
        mine: _ReplicaState,
        grads: list[Any],
        marks: list[tf.Tensor],
        variables: list[Any],
        scaled: bool,
        scaled_by: tf.Tensor,
        aggregate: bool,
    ) -> tuple[list[Any], list[tf.Tensor], bool]:
        """Sums gradients, and marks beside them; also tells whether the sums are scaled."""
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        custom = self.adapter.custom_aggregation()
        if aggregate and custom:
            if scaled:
                grads = gradients.unscale(grads, scaled_by)
            if replicas > 1:
                marks = gradients.all_reduce(marks, tf.float32)
            mine.sent = functools.partial(list, grads)
            grads = [g for g, _ in custom(list(zip(grads, variables, strict=True)))]
            return grads, marks, False
        if not aggregate or replicas == 1:
            return grads, marks, scaled
        packed, unpack = gradients.pack([*grads, *marks])
        packed, scaled, sent = self._sum_over_replicas(packed, scaled, scaled_by)
        mine.sent = lambda: unpack(sent)[: len(grads)]
        if scaled and not self.adapter.is_scaling_safe:
            packed, scaled = gradients.unscale(packed, scaled_by), False
        summed = unpack(packed)
        return summed[: len(grads)], summed[len(grads) :], scaled

    def _sum_over_replicas(
        self, grads: list[Any], scaled: bool, scaled_by: tf.Tensor
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
                grads, scaled = gradients.scale(grads, scaled_by), True
            sent = gradients.narrow(grads, reduce_dtype)
            summed = gradients.all_reduce(sent, tf.float32)
            return gradients.cast_as(summed, grads), scaled, sent
        summed = gradients.all_reduce(gradients.widen(grads), reduce_dtype)
        if self.adapter.is_scaling_safe:
            return summed, scaled, []
        if scaled:
            summed = gradients.unscale(summed, scaled_by)
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

    def _apply_or_skip(
        self,
        finite: tf.Tensor | None,
        is_allowed: tf.Tensor | None,
        states: Sequence[_ReplicaState],
        apply: Callable[[], Any],
        look: Callable[[], Any],
    ) -> tf.Operation | None:
        """Applies gradients if they are finite. Once for all replicas."""
        kept = [mine.kept for mine in states]

        # Each branch moves only what such a step moves: a good one has not much to do.
        def make() -> Any:
            for mine in states:
                mine.let_go()
            applied = _operation(apply())
            return _operation([applied, *self.handler.good()])

        def skip() -> Any:
            seen = self._seen(states, look)
            self.adapter.drop_accumulated()
            return self._note_skip(seen, kept)

        def add() -> Any:
            applied = _operation(apply())
            if any(kept):
                put_back = lambda: _operation(_put_back(kept))  # noqa: E731
                kept_or_not = tf.cond(finite, lambda: _operation([]), put_back)
                applied = _operation([applied, kept_or_not])
            return _operation([applied, *self.handler.accumulated()])

        if finite is None:
            return self._unless_refused(is_allowed, kept, lambda: _operation(apply()))
        if not self.adapter.accumulates():
            return self._choose(finite, is_allowed, kept, make, skip)
        # Only what is made of all gradients that were accumulated is a step. If some are not
        # finite, it is skipped when it is complete.
        return tf.cond(
            self.adapter.completes_step(),
            lambda: self._choose(finite, is_allowed, kept, make, skip),
            lambda: self._unless_refused(is_allowed, kept, add),
        )

    def _let_it_skip(
        self,
        finite: tf.Tensor | None,
        is_allowed: tf.Tensor | None,
        states: Sequence[_ReplicaState],
        apply: Callable[[], Any],
        look: Callable[[], Any],
    ) -> tf.Operation | None:
        """Lets what is scaling-safe make or skip the step, which is noted here."""
        kept = [mine.kept for mine in states]
        applied = _operation(apply())
        if finite is None:
            noted = self._unless_refused(is_allowed, kept, lambda: _operation([]))
        else:
            good = lambda: _operation(self.handler.good())  # noqa: E731
            skip = lambda: self._note_skip(self._seen(states, look), kept)  # noqa: E731
            noted = self._choose(finite, is_allowed, kept, good, skip)
        return _operation([applied, noted])

    def _choose(
        self,
        finite: tf.Tensor,
        is_allowed: tf.Tensor | None,
        kept: Sequence[state_rollback.Kept],
        make: Callable[[], Any],
        skip: Callable[[], Any],
    ) -> Any:
        if not host.in_v1_graph() and not tf.distribute.has_strategy():
            # Under a strategy replicas may meet in it, or its variables be on several machines.
            skip = host.as_one_operation(skip)
        if is_allowed is None:
            return tf.cond(finite, make, skip)
        # A good step passes one condition only.
        rest = lambda: self._unless_refused(is_allowed, kept, skip)  # noqa: E731
        return tf.cond(tf.logical_and(finite, is_allowed), make, rest)

    def _unless_refused(
        self,
        is_allowed: tf.Tensor | None,
        kept: Sequence[state_rollback.Kept],
        step: Callable[[], Any],
    ) -> Any:
        def refuse() -> Any:
            put_back = _put_back(kept)
            self.given.guard.refuse()
            return _operation(put_back)

        return step() if is_allowed is None else tf.cond(is_allowed, step, refuse)

    def _note_skip(
        self, seen: Seen | None, kept: Sequence[state_rollback.Kept]
    ) -> tf.Operation | None:
        put_back = _put_back(kept)
        weights = [weight for each in kept for weight in each.weights]
        with tf.control_dependencies(put_back):
            noted = self.handler.bad(seen, weights)
        return _operation([*put_back, *noted])

    def _seen(self, states: Sequence[_ReplicaState], look: Callable[[], Any]) -> Seen | None:
        """What was not finite, on all replicas. Called in the branch that skips."""
        if host.in_v1_graph():
            return None
        counts, *_ = tf.distribute.get_strategy().experimental_local_results(look())
        has_total = self._has_total(states[0])
        return Seen(states[0].variables, counts, has_total, self.adapter.steps_made(), self.names)

    def _look(self, mine: _ReplicaState) -> tf.Tensor:
        """The counts of `Seen`. Called on each replica, which tells them to all others."""
        judged = [gradient for gradient, _ in mine.judged]
        totals = None
        if self._has_total(mine):
            totals = [total for total, _ in self.adapter.totals(mine.judged)]
        sent = mine.sent() if mine.sent else judged
        return overflows.look(mine.losses, mine.unclipped, sent, totals)

    def _has_total(self, mine: _ReplicaState) -> bool:
        """Whether something else is judged than what this replica has computed."""
        return mine.sent is not None or self.adapter.accumulates()


def _put_back(kept: Sequence[state_rollback.Kept]) -> list[tf.Operation]:
    return [operation for each in kept for operation in each.put_back()]


def _operation(result: Any) -> tf.Operation | None:
    """What both branches of `tf.cond` return: an operation, which only TensorFlow 1 has to run."""
    if not host.in_v1_graph():
        return None
    of_replicas = tf.distribute.get_strategy().experimental_local_results(result)
    return tf.group(*(each for each in tf.nest.flatten(of_replicas) if each is not None))
