"""One step with scaled gradients: sum them, judge them, unscale them, apply them or skip the step.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16".
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import forward_writes, gradients
from keras_mp.step.loss_scale import DynamicLossScale, LossScale
from keras_mp.step.optimizer_family import OptimizerFamily
from keras_mp.step.skipped_steps import SkippedSteps
from keras_mp.support import host


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """Makes a step; to be called in a replica context.

    Attributes:
        family: drives the inner optimizer, which is built.
        loss_scale: a dynamic one is moved.
        skipped: is told of the step.
        in_float16: bool. Are float32 gradients summed as float16?
    """

    family: OptimizerFamily
    loss_scale: LossScale
    skipped: SkippedSteps
    in_float16: bool

    def make(
        self,
        pairs: Sequence[tuple[Any, Any]],
        *,
        scaled: bool | tf.Tensor,
        scaled_by: tf.Tensor,
        loss: tf.Tensor | None,
        aggregate: bool,
        name: str | None,
    ) -> tf.Operation | None:
        """Makes the step.

        Args:
            pairs: sequence of (gradient, variable) pairs.
            scaled: bool, or bool scalar tensor. Are the gradients still scaled?
            scaled_by: float32 scalar tensor, what the loss was multiplied by.
            loss: the loss of this replica, or None where it is not known.
            aggregate: bool. Are the gradients to be summed over replicas?
            name: str. Name of the operation.

        Returns:
            In a TensorFlow 1 graph the operation that makes the step, else None.
        """
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        kept = forward_writes.keep(variables if self._can_skip else ())
        new_values = self._take_new_values(grads, variables, scaled, scaled_by)
        if tf.is_tensor(scaled):
            grads = gradients.unscale(grads, tf.where(scaled, scaled_by, 1.0))
            scaled = False
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        custom = self.family.custom_aggregation()
        if aggregate and custom:
            if scaled:
                grads, scaled = gradients.unscale(grads, scaled_by), False
            grads = [g for g, _ in custom(list(zip(grads, variables, strict=True)))]
        elif aggregate and replicas > 1:
            grads, unpack = gradients.pack(grads)
            grads = unpack(self._sum_and_unscale(grads, scaled, scaled_by))
            scaled = False
        if scaled:
            grads = gradients.unscale(grads, scaled_by)
        grads = [new_values.get(i, g) for i, g in enumerate(grads)]
        finite = None
        if self._can_skip:
            # Unscaled gradients are finite where scaled ones are, and the other way round.
            finite = gradients.all_finite(self.family.totals(grads, variables))
            if replicas > 1 and not aggregate:
                finite = gradients.agree(finite)
            self.skipped.watch()
        operation = gradients.decide_for_all_replicas(
            self._apply_or_skip,
            lambda grads: self.family.apply(list(zip(grads, variables)), name, aggregate=False),
            grads,
            finite,
            loss,
            kept,
        )
        forward_writes.step_is_over()
        return operation

    @property
    def _can_skip(self) -> bool:
        return isinstance(self.loss_scale, DynamicLossScale)

    def _sum_and_unscale(self, grads: list[Any], scaled: bool, scaled_by: tf.Tensor) -> list[Any]:
        if self._can_skip:
            if self.in_float16 and not scaled:
                grads, scaled = gradients.scale(grads, scaled_by), True
            grads = gradients.all_reduce(grads, self.in_float16)
            return gradients.unscale(grads, scaled_by) if scaled else grads
        # What overflows in float16 is harmless only where a step can be skipped.
        summed = gradients.all_reduce(gradients.widen(grads), in_float16=False)
        if scaled:
            summed = gradients.unscale(summed, scaled_by)
        return gradients.cast_as(summed, grads)

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
            if grads[i] is not None and self.family.is_overwritten(variable):
                divided_by = tf.where(scaled, 1.0, scaled_by)
                [values[i]] = gradients.scale([grads[i]], divided_by)
                grads[i] = None
        return values

    def _apply_or_skip(
        self,
        apply: Callable[[], Any],
        finite: tf.Tensor | None,
        losses: Sequence[tf.Tensor],
        kept: Sequence[forward_writes.Kept],
    ) -> tf.Operation | None:
        """Applies gradients if they are finite, and moves the scale. Once for all replicas."""
        if finite is None:
            return _operation(apply())
        if not self.family.accumulates():
            return self._judge(apply, finite, losses, kept)
        # Only what is made of all gradients that were accumulated is a step.
        return tf.cond(
            self.family.completes_step(),
            lambda: self._judge(apply, finite, losses, kept),
            lambda: self._accumulate(apply, finite, kept),
        )

    def _judge(
        self,
        apply: Callable[[], Any],
        finite: tf.Tensor,
        losses: Sequence[tf.Tensor],
        kept: Sequence[forward_writes.Kept],
    ) -> tf.Operation | None:
        # Each branch moves only what such a step moves: a good one has not much to do.
        def make() -> Any:
            for each in kept:
                each.let_go()
            applied = _operation(apply())
            state = self.loss_scale.next_state(self.loss_scale(), True)
            return _operation([applied, *self.loss_scale.assign(state)])

        def skip() -> Any:
            self.family.drop_accumulated()
            state = self.loss_scale.next_state(self.loss_scale(), False)
            moved = self.loss_scale.assign(state)
            put_back = _put_back(kept)
            weights = [weight for each in kept for weight in each.weights]
            with tf.control_dependencies(put_back):
                counted = self.skipped.skip(state.num_bad_steps, losses, weights)
            return _operation([*moved, *put_back, *counted])

        return tf.cond(finite, make, skip)

    def _accumulate(
        self, apply: Callable[[], Any], finite: tf.Tensor, kept: Sequence[forward_writes.Kept]
    ) -> tf.Operation | None:
        """Adds gradients up. If they are not finite, the step is skipped when it is complete."""
        applied = _operation(apply())
        if any(kept):
            put_back = lambda: _operation(_put_back(kept))  # noqa: E731
            applied = _operation([applied, tf.cond(finite, lambda: _operation([]), put_back)])
        return applied


def _put_back(kept: Sequence[forward_writes.Kept]) -> list[tf.Operation]:
    return [operation for each in kept for operation in each.put_back()]


def _operation(result: Any) -> tf.Operation | None:
    """What both branches of `tf.cond` return: an operation, which only TensorFlow 1 has to run."""
    if host.runs_by_itself():
        return None
    return tf.no_op() if result is None else tf.group(result)
