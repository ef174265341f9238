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

from keras_mp.step import forward_writes, gradients
from keras_mp.step.loss_scale import Schedule
from keras_mp.step.optimizer_family import UpdateRule
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
    def bad(
        self, losses: Sequence[tf.Tensor], weights: Sequence[forward_writes.Weight]
    ) -> list[Any]:
        """They were not.

        Args:
            losses: the losses of this step, from every replica at hand; empty where unknown.
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

    def bad(
        self, losses: Sequence[tf.Tensor], weights: Sequence[forward_writes.Weight]
    ) -> list[Any]:
        """They were not."""
        goes_on = tf.convert_to_tensor(self.schedule.num_bad_steps) > 0
        moved, in_a_row = self.schedule.move(False)
        counted = self.skipped.skip(goes_on, losses, weights)
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


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """Makes a step; to be called in a replica context.

    Attributes:
        rule: applies the gradients; what it needs is built.
        verdicts: is told of the verdict; None where no step is skipped.
        reduce_dtype: DType. In which float32 gradients are summed over replicas; as float16 only
            where a step may be skipped.
        guard: keeps the step from being made; not in a TensorFlow 1 graph.
    """

    rule: UpdateRule
    verdicts: Verdicts | None
    reduce_dtype: tf.DType
    guard: Guard | None = None

    def make(
        self,
        pairs: Sequence[tuple[Any, Any]],
        *,
        scaled: bool | tf.Tensor,
        scaled_by: tf.Tensor,
        losses: Sequence[tf.Tensor] = (),
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
            aggregate: bool. Are the gradients to be summed over replicas?
            name: str. Name of the operation.
            was_finite: bool scalar tensor. An earlier verdict on gradients of this replica, which
                may have been changed since.

        Returns:
            tuple of the operation that makes the step in a TensorFlow 1 graph, else None, and of
            the verdict, a bool scalar tensor that is the same on every replica; None where no step
            is skipped.
        """
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        kept = forward_writes.keep(variables if self.verdicts else ())
        new_values = self._take_new_values(grads, variables, scaled, scaled_by)
        # As one more gradient, an earlier verdict is summed and judged with the others.
        marks = [] if was_finite is None else [tf.where(was_finite, 0.0, float("nan"))]
        if tf.is_tensor(scaled):
            grads = gradients.unscale(grads, tf.where(scaled, scaled_by, 1.0))
            scaled = False
        grads, marks, scaled = self._reduced(grads, marks, variables, scaled, scaled_by, aggregate)
        safe = self.rule.is_scaling_safe
        unscaled = gradients.unscale(grads, scaled_by) if scaled else grads
        unscaled, grads = (
            [new_values.get(i, g) for i, g in enumerate(each)]
            for each in (unscaled, grads if safe else unscaled)
        )
        finite = None
        if self.verdicts:
            # Unscaled gradients are finite where scaled ones are, and the other way round.
            finite = gradients.all_finite([*self.rule.totals(unscaled, variables), *marks])
            if not aggregate and tf.distribute.get_strategy().num_replicas_in_sync > 1:
                finite = gradients.agree(finite)
            self.verdicts.watch()
        loss_scale = scaled_by if scaled else tf.constant(1.0)
        is_allowed = self.guard and self.guard.is_allowed

        def apply(grads: list[Any]) -> Any:
            pairs = list(zip(grads, variables, strict=True))
            if safe:
                verdicts = [each for each in (finite, is_allowed) if each is not None]
                verdict = functools.reduce(tf.logical_and, verdicts or [tf.constant(True)])
                return self.rule.apply_scaled(pairs, loss_scale, verdict)
            return self.rule.apply(pairs, name, aggregate=False)

        operation = gradients.decide_for_all_replicas(
            self._let_it_skip if safe else self._apply_or_skip,
            apply,
            grads,
            (finite, is_allowed),
            losses,
            kept,
        )
        return operation, finite

    def _reduced(
        self,
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
            grads = [g for g, _ in custom(list(zip(grads, variables, strict=True)))]
            return grads, marks, False
        if not aggregate or replicas == 1:
            return grads, marks, scaled
        packed, unpack = gradients.pack([*grads, *marks])
        packed, scaled = self._sum_over_replicas(packed, scaled, scaled_by)
        if scaled and not self.rule.is_scaling_safe:
            packed, scaled = gradients.unscale(packed, scaled_by), False
        summed = unpack(packed)
        return summed[: len(grads)], summed[len(grads) :], scaled

    def _sum_over_replicas(
        self, grads: list[Any], scaled: bool, scaled_by: tf.Tensor
    ) -> tuple[list[Any], bool]:
        """Sums gradients over replicas; also tells whether the sums are scaled."""
        in_float16 = self.reduce_dtype == tf.float16
        if self.verdicts:
            if in_float16 and not scaled:
                grads, scaled = gradients.scale(grads, scaled_by), True
            return gradients.all_reduce(grads, self.reduce_dtype), scaled
        # What overflows in float16 is harmless only where a step can be skipped.
        reduce_dtype = tf.float32 if in_float16 else self.reduce_dtype
        summed = gradients.all_reduce(gradients.widen(grads), reduce_dtype)
        if self.rule.is_scaling_safe:
            return summed, scaled
        if scaled:
            summed = gradients.unscale(summed, scaled_by)
        return gradients.cast_as(summed, grads), False

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
        apply: Callable[[], Any],
        finite: tf.Tensor | None,
        is_allowed: tf.Tensor | None,
        losses: Sequence[tf.Tensor],
        kept: Sequence[forward_writes.Kept],
    ) -> tf.Operation | None:
        """Applies gradients if they are finite. Once for all replicas."""

        # Each branch moves only what such a step moves: a good one has not much to do.
        def make() -> Any:
            for each in kept:
                each.let_go()
            applied = _operation(apply())
            return _operation([applied, *self.verdicts.good()])

        def skip() -> Any:
            self.rule.drop_accumulated()
            return self._note_skip(losses, kept)

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
        apply: Callable[[], Any],
        finite: tf.Tensor | None,
        is_allowed: tf.Tensor | None,
        losses: Sequence[tf.Tensor],
        kept: Sequence[forward_writes.Kept],
    ) -> tf.Operation | None:
        """Lets what is scaling-safe make or skip the step, which is noted here."""
        applied = _operation(apply())
        if finite is None:
            noted = self._unless_refused(is_allowed, kept, lambda: _operation([]))
        else:
            good = lambda: _operation(self.verdicts.good())  # noqa: E731
            skip = lambda: self._note_skip(losses, kept)  # noqa: E731
            noted = self._choose(finite, is_allowed, kept, good, skip)
        return _operation([applied, noted])

    def _choose(
        self,
        finite: tf.Tensor,
        is_allowed: tf.Tensor | None,
        kept: Sequence[forward_writes.Kept],
        make: Callable[[], Any],
        skip: Callable[[], Any],
    ) -> Any:
        if is_allowed is None:
            return tf.cond(finite, make, skip)
        # A good step passes one condition only.
        rest = lambda: self._unless_refused(is_allowed, kept, skip)  # noqa: E731
        return tf.cond(tf.logical_and(finite, is_allowed), make, rest)

    def _unless_refused(
        self,
        is_allowed: tf.Tensor | None,
        kept: Sequence[forward_writes.Kept],
        step: Callable[[], Any],
    ) -> Any:
        def refuse() -> Any:
            put_back = _put_back(kept)
            self.guard.refuse()
            return _operation(put_back)

        return step() if is_allowed is None else tf.cond(is_allowed, step, refuse)

    def _note_skip(
        self, losses: Sequence[tf.Tensor], kept: Sequence[forward_writes.Kept]
    ) -> tf.Operation | None:
        put_back = _put_back(kept)
        weights = [weight for each in kept for weight in each.weights]
        with tf.control_dependencies(put_back):
            noted = self.verdicts.bad(losses, weights)
        return _operation([*put_back, *noted])


def _put_back(kept: Sequence[forward_writes.Kept]) -> list[tf.Operation]:
    return [operation for each in kept for operation in each.put_back()]


def _operation(result: Any) -> tf.Operation | None:
    """What both branches of `tf.cond` return: an operation, which only TensorFlow 1 has to run."""
    if host.runs_by_itself():
        return None
    of_replicas = tf.distribute.get_strategy().experimental_local_results(result)
    return tf.group(*(each for each in tf.nest.flatten(of_replicas) if each is not None))
