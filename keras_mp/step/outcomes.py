"""The outcome of a step: the scale moves, and a skipped step is counted.

RFC 293, "LossScaleOptimizer Overview".
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step.loss_scales import DynamicLossScale, LossScale, state_variable
from keras_mp.step.overflows import NonFiniteCounts
from keras_mp.step.schedule import LossScaleState
from keras_mp.step.skipped_steps import SkippedSteps
from keras_mp.step.state_rollback import Weight
from keras_mp.support import host

# The worst outcome since the last `update`: all steps were made; gradients were accumulated for a
# step that is not complete; a step was skipped.
_GOOD, _UNFINISHED, _BAD = 0, 1, 2


class OutcomeHandler:
    """Moves the loss scale and counts skipped steps, at once or at `update`.

    `good`, `bad` and `accumulated` are called in the branch of such a step, once for all replicas
    of a process. They return their operations. A good step is cheap: it moves the scale, or costs
    nothing if `update` does so.

    Attributes:
        skips_in_a_row: int64 variable, the number of steps skipped since the last good one.

    Args:
        loss_scale: the `LossScale`. A dynamic one and that of a manager are moved.
        skipped: the `SkippedSteps`.
        at_update: bool. Whether `update` moves the scale, by the worst outcome of the optimizers
            that share it. Defaults to False: each outcome moves it at once.
    """

    def __init__(
        self, loss_scale: LossScale, skipped: SkippedSteps, *, at_update: bool = False
    ) -> None:
        self._loss_scale: Any = loss_scale
        self._skipped = skipped
        self._moves = loss_scale.moves
        self._worst: Any = None
        with tf.init_scope():
            if self._moves:
                self.skips_in_a_row = self._loss_scale.num_bad_steps
            else:
                self.skips_in_a_row = state_variable(0, tf.int64, "bad_steps")
            if at_update:
                self._worst = state_variable(_GOOD, tf.int64, "worst_verdict")

    def watch(self) -> None:
        """Prepares for the other methods. Called outside of any branch."""
        self._skipped.watch()

    def good(self) -> list[Any]:
        """Handles a step whose gradients are finite: the scale may grow."""
        return self._move(True)[0] if self._worst is None else []

    def bad(self, seen: NonFiniteCounts | None, weights: Sequence[Weight]) -> list[Any]:
        """Handles a step whose gradients are not finite: counts it, and the scale backs off.

        Args:
            seen: the counts of all replicas; None in a graph of TensorFlow 1.
            weights: the known weights of the model, from every replica of this process.
        """
        goes_on = tf.convert_to_tensor(self.skips_in_a_row) > 0
        if self._worst is not None:
            goes_on |= tf.equal(self._worst, _BAD)
        counted = self._skipped.skip(
            goes_on, self._loss_scale(), seen, weights, is_of_one=self._worst is None
        )
        if self._worst is not None:
            return [*counted, self._worst.assign(_BAD, read_value=False)]
        return [*self._move_after_skip(), *counted]

    def accumulated(self) -> list[Any]:
        """Handles gradients that were accumulated for a step that is not complete."""
        if self._worst is None:
            return []
        worst = tf.maximum(self._worst, tf.constant(_UNFINISHED, tf.int64))
        return [self._worst.assign(worst, read_value=False)]

    def update(
        self,
        has_stepped: bool | tf.Tensor,
        report: Callable[[], None],
        new_scale: tf.Tensor | None = None,
    ) -> None:
        """Moves the scale by the worst outcome since the last call. Called once for all replicas.

        Args:
            has_stepped: bool, or bool scalar tensor. Whether a step was made, or skipped.
            report: function that is called if there was none, in the branch for that case.
            new_scale: float32 scalar tensor. The new value of a dynamic scale; None moves it by the
                outcome.
        """
        outcome = tf.convert_to_tensor(self._worst)
        if has_stepped is not True:
            outcome = tf.where(has_stepped, outcome, tf.maximum(outcome, _UNFINISHED))

        def good() -> None:
            _ignore(self._move(True))

        def clear() -> None:
            self._worst.assign(_GOOD, read_value=False)
            if has_stepped is not True:
                tf.cond(has_stepped, lambda: None, report)

        def bad() -> None:
            self._worst.assign(_GOOD, read_value=False)
            _ignore(self._move_after_skip())

        if host.is_compiled_by_xla() and isinstance(self._loss_scale, DynamicLossScale):
            self._move_without_branches(outcome)
            clear()
        else:
            tf.switch_case(tf.cast(outcome, tf.int32), [good, clear, bad])
        if new_scale is not None and isinstance(self._loss_scale, DynamicLossScale):
            zero = tf.zeros([], tf.int64)
            self._loss_scale.assign(LossScaleState(new_scale, zero, self.skips_in_a_row))

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        own = {} if self._moves else {"skips_in_a_row": self.skips_in_a_row}
        return own if self._worst is None else {**own, "worst_verdict": self._worst}

    def _move(self, finite: bool) -> tuple[list[Any], tf.Tensor]:
        """Moves the scale. Returns the operations, and the number of steps skipped in a row."""
        if self._moves:
            return self._loss_scale.move(finite)
        in_a_row = tf.constant(0, tf.int64) if finite else self.skips_in_a_row + 1
        return [self.skips_in_a_row.assign(in_a_row, read_value=False)], in_a_row

    def _move_without_branches(self, outcome: tf.Tensor) -> None:
        """Moves a dynamic scale by selections, which XLA computes faster than a branch."""
        scale = self._loss_scale
        state = scale.loss_scale, scale.num_good_steps, scale.num_bad_steps
        before = LossScaleState(*map(tf.convert_to_tensor, state))
        moved = scale.next_state(before.loss_scale, tf.equal(outcome, _GOOD))
        is_over = tf.not_equal(outcome, _UNFINISHED)
        after = LossScaleState(*(tf.where(is_over, *each) for each in zip(moved, before)))
        scale.assign(after)
        is_bad = tf.equal(outcome, _BAD)
        self._skipped.in_a_row(tf.where(is_bad, after.num_bad_steps, 0))

    def _move_after_skip(self) -> list[Any]:
        moved, in_a_row = self._move(False)
        self._skipped.in_a_row(in_a_row)
        return moved


def _ignore(result: Any) -> None:
    """Drops a result, so that all branches return None."""
