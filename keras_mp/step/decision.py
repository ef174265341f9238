"""The decision on a step, once for all replicas: it is made, skipped, or refused.

RFC 293, "LossScaleOptimizer Overview". Each branch moves only what such a step moves: a good one
has not much to do.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.step import gradients, overflows, state_rollback, workers
from keras_mp.step.optimizer_adapter import OptimizerAdapter
from keras_mp.step.outcomes import OutcomeHandler
from keras_mp.step.overflows import NonFiniteCounts
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

    def divisor(self) -> Any:
        """What the gradients are still to be divided by, a float32 scalar; None if nothing."""
        if tf.is_tensor(self.scaled):
            return tf.where(self.scaled, self.scaled_by, 1.0)
        return self.scaled_by if self.scaled else None


class ReplicaState:
    """The state of a replica that the decision takes.

    Attributes:
        kept: what it has to put back if the step is skipped.
        losses: its losses, as far as they are known.
        unclipped: its gradients as they were when they were unscaled, if they were changed since.
        sent: returns what it gave to be summed; None where nothing was.
        judged: returns the gradients, unscaled, that came of this call.
        totals: returns the gradients that a step would be made of, of which the verdict is.
        to_apply: returns the gradients that are applied.
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
        self.judged: Callable[[], list[gradients.Gradient]] = list
        self.totals: Callable[[], list[gradients.Gradient]] = list
        self.to_apply: Callable[[], list[gradients.Gradient]] = list
        self.variables: list[Any] = []

    def let_go(self) -> None:
        """Says that the step is made. What only a skipped one needs takes memory in eager."""
        self.kept.let_go()
        if tf.executing_eagerly():
            self.unclipped.clear()
            self.totals = list
            self.sent = None

    def looked_at(self) -> overflows.ReplicaValues:
        """What is looked at if the step is skipped."""
        sent = (self.sent or self.judged)()
        return overflows.ReplicaValues(self.losses, self.unclipped, sent)


@dataclasses.dataclass(frozen=True)
class Decision:
    """Carries out what the verdict says.

    Attributes:
        adapter: applies the gradients.
        handler: is told of the outcome; None where no step is skipped.
        guard: keeps the step from being made; None where no call can be wrong.
        names: given variables, returns what users call them, or None where it does not know.
        finite: bool scalar tensor, the verdict; None where no step is skipped.
        is_allowed: bool scalar tensor of the guard, or None.
        states: of all replicas at hand.
        apply: lets each replica apply its gradients.
    """

    adapter: OptimizerAdapter
    handler: OutcomeHandler | None
    guard: Guard | None
    names: overflows.Names | None
    finite: tf.Tensor | None
    is_allowed: tf.Tensor | None
    states: Sequence[ReplicaState]
    apply: Callable[[], Any]

    def carry_out(self) -> tf.Operation | None:
        """Returns the operation that makes or skips the step, in a TensorFlow 1 graph."""
        if self.adapter.unscales_and_skips:
            # It makes or skips the step by itself, which is noted here.
            applied = _operation(self.apply())
            return _operation([applied, self._choose(lambda: None, lambda: None)])
        if self.finite is None or not self.adapter.accumulates():
            return self._choose(self._make, self.adapter.drop_accumulated)
        # Only what is made of all gradients that were accumulated is a step. If some are not
        # finite, it is skipped when it is complete.
        return tf.cond(
            self.adapter.completes_step(),
            lambda: self._choose(self._make, self.adapter.drop_accumulated),
            lambda: self._unless_refused(self._add),
        )

    def _choose(self, make: Callable[[], Any], drop: Callable[[], Any]) -> tf.Operation | None:
        handler = self.handler
        if self.finite is None or handler is None:
            return self._unless_refused(lambda: _operation([make()]))

        def good() -> tf.Operation | None:
            return _operation([make(), *handler.good()])

        def skip() -> tf.Operation | None:
            seen = self._seen()
            drop()
            put_back = self._put_back()
            weights = [weight for mine in self.states for weight in mine.kept.weights]
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
        guard = self.guard
        if self.is_allowed is None or guard is None:
            return step()

        def refuse() -> tf.Operation | None:
            put_back = self._put_back()
            guard.refuse()
            return _operation(put_back)

        return tf.cond(self.is_allowed, step, refuse)

    def _make(self) -> tf.Operation | None:
        if self.handler is not None:
            for mine in self.states:
                mine.let_go()
        return _operation(self.apply())

    def _add(self) -> tf.Operation | None:
        """Lets the optimizer add the gradients to those before; all are judged in the end."""
        operations = [_operation(self.apply())]
        if any(mine.kept for mine in self.states):
            put_back = tf.cond(
                self.finite, lambda: _operation([]), lambda: _operation(self._put_back())
            )
            operations.append(put_back)
        return _operation([*operations, *(self.handler.accumulated() if self.handler else [])])

    def _put_back(self) -> list[tf.Operation]:
        return [operation for mine in self.states for operation in mine.kept.put_back()]

    def _seen(self) -> NonFiniteCounts | None:
        """What was not finite, on all replicas. Called in the branch that skips."""
        if host.in_v1_graph():
            return None
        mine, steps = self.states[0], self.adapter.steps_made()
        has_total = mine.sent is not None or self.adapter.accumulates()
        counts = overflows.count_not_finite(
            [each.looked_at() for each in self.states], mine.totals() if has_total else None
        )
        return NonFiniteCounts(mine.variables, counts, has_total, steps, self.names)


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
