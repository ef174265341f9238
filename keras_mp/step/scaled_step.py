"""One step with scaled gradients: sum them, judge them, unscale them, apply them or skip the step.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16". What becomes of the verdict is
the business of a `Verdicts`: here it is that of one optimizer, which moves the scale at once.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.step import gradients, observers, overflows, state_rollback
from keras_mp.step.loss_scale import Schedule
from keras_mp.step.optimizer_adapter import UpdateRule
from keras_mp.step.overflows import Seen
from keras_mp.step.skipped_steps import SkippedSteps
from keras_mp.support import host


class Verdicts(abc.ABC):
    """What the verdict on a step leads to, beside the step itself.

    Each method is called in the branch that such a step takes, once for all replicas of a process,
    and returns the operations that it makes.
    """

    @abc.abstractmethod
    def watch(self) -> None:
        """Prepares for the others, outside of any branch."""

    @abc.abstractmethod
    def good(self) -> list[Any]:
        """The gradients were finite."""

    @abc.abstractmethod
    def bad(self, seen: Seen | None, weights: Sequence[state_rollback.Weight]) -> list[Any]:
        """They were not.

        Args:
            seen: what was not finite, on all replicas; None in a graph of TensorFlow 1.
            weights: the weights of the model, from every replica at hand, as far as they are known.
        """

    def accumulated(self) -> list[Any]:
        """The gradients were added to those of the calls before, and no step was made yet."""
        return []


@dataclasses.dataclass(frozen=True)
class MovedAtOnce(Verdicts):
    """One optimizer has the scale to itself: each verdict moves it.

    Attributes:
        schedule: is moved.
        skipped: is told of steps that are skipped.
    """

    schedule: Schedule
    skipped: SkippedSteps

    def watch(self) -> None:
        """Prepares for the others, outside of any branch."""
        self.skipped.watch()

    def good(self) -> list[Any]:
        """The gradients were finite."""
        return self.schedule.move(True)[0]

    def bad(self, seen: Seen | None, weights: Sequence[state_rollback.Weight]) -> list[Any]:
        """They were not."""
        goes_on = tf.convert_to_tensor(self.schedule.num_bad_steps) > 0
        counted = self.skipped.skip(goes_on, self.schedule(), seen, weights, is_of_one=True)
        moved, in_a_row = self.schedule.move(False)
        self.skipped.in_a_row(in_a_row)
        return [*moved, *counted]


class Guard(NamedTuple):
    """Keeps a step from being made, whatever its gradients.

    Attributes:
        is_allowed: bool scalar tensor, the same on every replica.
        refuse: called in the branch that is taken if it is False, once for all replicas.
    """

    is_allowed: tf.Tensor
    refuse: Callable[[], None]


class _Share:
    """What a replica brings to the decision.

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
        rule: applies the gradients; what it needs is built.
        verdicts: is told of the verdict; None where no step is skipped.
        reduce_dtype: DType. In which float32 gradients are summed over replicas; as float16 only
            where a step may be skipped.
        guard: keeps the step from being made; not in a TensorFlow 1 graph.
        names: given variables, returns what users call them, or None where it does not know.
    """

    rule: UpdateRule
    verdicts: Verdicts | None
    reduce_dtype: tf.DType
    guard: Guard | None = None
    names: overflows.Names | None = None

    def make(
        self,
        pairs: Sequence[tuple[Any, Any]],
        *,
        scaled: bool | tf.Tensor,
        scaled_by: tf.Tensor,
        losses: Sequence[tf.Tensor] = (),
        unclipped: list[Any] | None = None,
        aggregate: bool = True,
        name: str | None = None,
        was_finite: tf.Tensor | None = None,
    ) -> tuple[tf.Operation | None, tf.Tensor | None]:
        """Makes the step.

        Args:
            pairs: sequence of (gradient, variable) pairs.
            scaled: bool, or bool scalar tensor. Are the gradients still scaled?
            scaled_by: float32 scalar tensor, what the loss was multiplied by.
            losses: the losses of this replica, as far as they are known.
            unclipped: the gradients of this replica as they were when they were unscaled, before
                the user may have clipped them; None, or empty, where that is not known. Is emptied:
                in eager, who calls this would keep them in memory while the step is made.
            aggregate: bool. Are the gradients to be summed over replicas?
            name: str. Name of the operation.
            was_finite: bool scalar tensor. An earlier verdict on gradients of this replica, which
                may have been changed since.

        Returns:
            tuple of the operation that makes the step in a TensorFlow 1 graph, else None, and of
            the verdict, a bool scalar tensor that is the same on every replica; None where no step
            is skipped.
        """
        observers.show(pairs, scaled, scaled_by)
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        kept = state_rollback.keep(variables if self.verdicts else ())
        share = _Share(kept, losses, overflows.changed_since(unclipped or (), grads))
        if unclipped:
            unclipped.clear()
        new_values = self._take_new_values(grads, variables, scaled, scaled_by)
        if self.rule.takes_float32_gradients:
            grads = gradients.to_float32(grads)
        # As one more gradient, an earlier verdict is summed and judged with the others.
        marks = [] if was_finite is None else [tf.where(was_finite, 0.0, float("nan"))]
        if tf.is_tensor(scaled):
            grads = gradients.unscale(grads, tf.where(scaled, scaled_by, 1.0))
            scaled = False
        grads, marks, scaled = self._reduced(
            share, grads, marks, variables, scaled, scaled_by, aggregate
        )
        safe = self.rule.is_scaling_safe
        unscaled = gradients.unscale(grads, scaled_by) if scaled else grads
        unscaled, share.to_apply = (
            [new_values.get(i, g) for i, g in enumerate(each)]
            for each in (unscaled, grads if safe else unscaled)
        )
        share.judged = list(zip(unscaled, variables, strict=True))
        finite = None
        if self.verdicts:
            # Unscaled gradients are finite where scaled ones are, and the other way round.
            totals = self.rule.totals(share.judged)
            share.variables = [variable for _, variable in totals]
            finite = gradients.all_finite([*(total for total, _ in totals), *marks])
            if not aggregate and tf.distribute.get_strategy().num_replicas_in_sync > 1:
                finite = gradients.agree(finite)
            self.verdicts.watch()
        loss_scale = scaled_by if scaled else tf.constant(1.0)
        is_allowed = self.guard and self.guard.is_allowed

        def apply(share: _Share) -> Any:
            pairs = list(zip(share.to_apply, variables, strict=True))
            if safe:
                verdicts = [each for each in (finite, is_allowed) if each is not None]
                verdict = functools.reduce(tf.logical_and, verdicts or [tf.constant(True)])
                return self.rule.apply_scaled(pairs, loss_scale, verdict)
            return self.rule.apply(pairs, name, aggregate=False)

        decide = self._let_it_skip if safe else self._apply_or_skip
        operation = gradients.decide_for_all_replicas(
            decide, (finite, is_allowed), share, apply, self._look
        )
        return operation, finite

    def _reduced(
        self,
        share: _Share,
        grads: list[Any],
        marks: list[tf.Tensor],
        variables: list[Any],
        scaled: bool,
        scaled_by: tf.Tensor,
        aggregate: bool,
    ) -> tuple[list[Any], list[tf.Tensor], bool]:
        """Sums gradients, and marks beside them; also tells whether the sums are scaled."""
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        custom = self.rule.custom_aggregation()
        if aggregate and custom:
            if scaled:
                grads = gradients.unscale(grads, scaled_by)
            if replicas > 1:
                marks = gradients.all_reduce(marks, tf.float32)
            share.sent = functools.partial(list, grads)
            grads = [g for g, _ in custom(list(zip(grads, variables, strict=True)))]
            return grads, marks, False
        if not aggregate or replicas == 1:
            return grads, marks, scaled
        packed, unpack = gradients.pack([*grads, *marks])
        packed, scaled, sent = self._sum_over_replicas(packed, scaled, scaled_by)
        share.sent = lambda: unpack(sent)[: len(grads)]
        if scaled and not self.rule.is_scaling_safe:
            packed, scaled = gradients.unscale(packed, scaled_by), False
        summed = unpack(packed)
        return summed[: len(grads)], summed[len(grads) :], scaled

    def _sum_over_replicas(
        self, grads: list[Any], scaled: bool, scaled_by: tf.Tensor
    ) -> tuple[list[Any], bool, list[Any]]:
        """Sums gradients over replicas; tells whether the sums are scaled, and what was sent."""
        in_float16 = self.reduce_dtype == tf.float16
        if self.verdicts:
            if in_float16 and not scaled:
                grads, scaled = gradients.scale(grads, scaled_by), True
            sent = gradients.narrow(grads, self.reduce_dtype)
            summed = gradients.all_reduce(sent, tf.float32)
            return gradients.cast_as(summed, grads), scaled, sent
        # What overflows in float16 is harmless only where a step can be skipped.
        reduce_dtype = tf.float32 if in_float16 else self.reduce_dtype
        summed = gradients.all_reduce(gradients.widen(grads), reduce_dtype)
        if self.rule.is_scaling_safe:
            return summed, scaled, []
        if scaled:
            summed = gradients.unscale(summed, scaled_by)
        return gradients.cast_as(summed, grads), False, []

    def _take_new_values(
        self,
        grads: list[Any],
        variables: list[Any],
        scaled: bool | tf.Tensor,
        scaled_by: tf.Tensor,
    ) -> dict[int, Any]:
        """Takes out of `grads` what are no gradients, but new values of their variables.

        They never were scaled, so where gradients were unscaled that is undone for them.
        """
        values = {}
        for i, variable in enumerate(variables):
            if grads[i] is not None and self.rule.is_overwritten(variable):
                divided_by = tf.where(scaled, 1.0, scaled_by)
                [values[i]] = gradients.scale([grads[i]], divided_by)
                grads[i] = None
        return values

    def _apply_or_skip(
        self,
        finite: tf.Tensor | None,
        is_allowed: tf.Tensor | None,
        shares: Sequence[_Share],
        apply: Callable[[], Any],
        look: Callable[[], Any],
    ) -> tf.Operation | None:
        """Applies gradients if they are finite. Once for all replicas."""
        kept = [share.kept for share in shares]

        # Each branch moves only what such a step moves: a good one has not much to do.
        def make() -> Any:
            for share in shares:
                share.let_go()
            applied = _operation(apply())
            return _operation([applied, *self.verdicts.good()])

        def skip() -> Any:
            seen = self._seen(shares, look)
            self.rule.drop_accumulated()
            return self._note_skip(seen, kept)

        def add() -> Any:
            applied = _operation(apply())
            if any(kept):
                put_back = lambda: _operation(_put_back(kept))  # noqa: E731
                kept_or_not = tf.cond(finite, lambda: _operation([]), put_back)
                applied = _operation([applied, kept_or_not])
            return _operation([applied, *self.verdicts.accumulated()])

        if finite is None:
            return self._unless_refused(is_allowed, kept, lambda: _operation(apply()))
        if not self.rule.accumulates():
            return self._choose(finite, is_allowed, kept, make, skip)
        # Only what is made of all gradients that were accumulated is a step. If some are not
        # finite, it is skipped when it is complete.
        return tf.cond(
            self.rule.completes_step(),
            lambda: self._choose(finite, is_allowed, kept, make, skip),
            lambda: self._unless_refused(is_allowed, kept, add),
        )

    def _let_it_skip(
        self,
        finite: tf.Tensor | None,
        is_allowed: tf.Tensor | None,
        shares: Sequence[_Share],
        apply: Callable[[], Any],
        look: Callable[[], Any],
    ) -> tf.Operation | None:
        """Lets what is scaling-safe make or skip the step, which is noted here."""
        kept = [share.kept for share in shares]
        applied = _operation(apply())
        if finite is None:
            noted = self._unless_refused(is_allowed, kept, lambda: _operation([]))
        else:
            good = lambda: _operation(self.verdicts.good())  # noqa: E731
            skip = lambda: self._note_skip(self._seen(shares, look), kept)  # noqa: E731
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
            self.guard.refuse()
            return _operation(put_back)

        return step() if is_allowed is None else tf.cond(is_allowed, step, refuse)

    def _note_skip(
        self, seen: Seen | None, kept: Sequence[state_rollback.Kept]
    ) -> tf.Operation | None:
        put_back = _put_back(kept)
        weights = [weight for each in kept for weight in each.weights]
        with tf.control_dependencies(put_back):
            noted = self.verdicts.bad(seen, weights)
        return _operation([*put_back, *noted])

    def _seen(self, shares: Sequence[_Share], look: Callable[[], Any]) -> Seen | None:
        """What was not finite, on all replicas. Called in the branch that skips."""
        if host.in_v1_graph():
            return None
        counts, *_ = tf.distribute.get_strategy().experimental_local_results(look())
        has_total = self._has_total(shares[0])
        return Seen(shares[0].variables, counts, has_total, self.rule.steps_made(), self.names)

    def _look(self, share: _Share) -> tf.Tensor:
        """The counts of `Seen`. Called on each replica, which tells them to all others."""
        judged = [gradient for gradient, _ in share.judged]
        totals = None
        if self._has_total(share):
            totals = [total for total, _ in self.rule.totals(share.judged)]
        sent = share.sent() if share.sent else judged
        return overflows.look(share.losses, share.unclipped, sent, totals)

    def _has_total(self, share: _Share) -> bool:
        """Is something else judged than what this replica has computed?"""
        return share.sent is not None or self.rule.accumulates()


def _put_back(kept: Sequence[state_rollback.Kept]) -> list[tf.Operation]:
    return [operation for each in kept for operation in each.put_back()]


def _operation(result: Any) -> tf.Operation | None:
    """What both branches of `tf.cond` return: an operation, which only TensorFlow 1 has to run."""
    if not host.in_v1_graph():
        return None
    of_replicas = tf.distribute.get_strategy().experimental_local_results(result)
    return tf.group(*(each for each in tf.nest.flatten(of_replicas) if each is not None))
