"""Verdicts on the steps of several optimizers, which move one loss scale together."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step.loss_scales import Schedule, state_variable
from keras_mp.step.overflows import NonFiniteCounts
from keras_mp.step.scaled_step import Verdicts
from keras_mp.step.schedule import LossScaleState
from keras_mp.step.skipped_steps import SkippedSteps
from keras_mp.step.state_rollback import Weight

# The worst of the verdicts: all that were made are good; gradients were added up that no step was
# made of yet; a step was skipped.
_GOOD, _UNFINISHED, _BAD = 0, 1, 2


class Gathered(Verdicts):
    """Remembers the worst verdict until `close`. A good one costs nothing.

    Args:
        schedule: what is moved then.
        skipped: is told of steps that are skipped.
    """

    def __init__(self, schedule: Schedule, skipped: SkippedSteps) -> None:
        self._schedule, self._skipped = schedule, skipped
        with tf.init_scope():
            self.worst = state_variable(_GOOD, tf.int64, "worst_verdict")

    def watch(self) -> None:
        """Prepares for the others, outside of any branch."""
        self._skipped.watch()

    def good(self) -> list[Any]:
        """The gradients were finite."""
        return []

    def bad(self, seen: NonFiniteCounts | None, weights: Sequence[Weight]) -> list[Any]:
        """They were not."""
        goes_on = (self._schedule.num_bad_steps > 0) | tf.equal(self.worst, _BAD)
        scale = self._schedule()
        counted = self._skipped.skip(goes_on, scale, seen, weights, is_of_one=False)
        return [*counted, self.worst.assign(_BAD, read_value=False)]

    def accumulated(self) -> list[Any]:
        """The gradients were added to those of the calls before, and no step was made yet."""
        worst = tf.maximum(self.worst, tf.constant(_UNFINISHED, tf.int64))
        return [self.worst.assign(worst, read_value=False)]

    def close(
        self,
        has_stepped: bool | tf.Tensor,
        report: Callable[[], None],
        new_scale: tf.Tensor | None = None,
    ) -> None:
        """Moves the scale. Called once for all replicas.

        Args:
            has_stepped: bool, or bool scalar tensor. Was a step made, or skipped?
            report: called, in the branch that is taken then, if there was none.
            new_scale: float32 scalar tensor, to which a dynamic scale is set in place of being
                moved, or None.
        """
        worst = tf.convert_to_tensor(self.worst)

        def move(finite: bool) -> None:
            _, in_a_row = self._schedule.move(finite)
            if not finite:
                self._skipped.in_a_row(in_a_row)

        def rest() -> None:
            self.worst.assign(_GOOD, read_value=False)
            tf.cond(tf.equal(worst, _BAD), lambda: move(False), stay)

        def stay() -> None:
            if has_stepped is not True:
                tf.cond(has_stepped, lambda: None, report)

        is_good = tf.equal(worst, _GOOD)
        if has_stepped is not True:
            is_good = tf.logical_and(has_stepped, is_good)
        tf.cond(is_good, lambda: move(True), rest)
        if new_scale is not None:
            bad = self._schedule.num_bad_steps
            self._schedule.assign(LossScaleState(new_scale, tf.zeros([], tf.int64), bad))

    def variables(self) -> dict[str, tf.Variable]:
        """The variables of which a checkpoint knows nothing, by name."""
        return {"worst_verdict": self.worst, "skips_in_a_row": self._schedule.num_bad_steps}
