"""A scaler that several optimizers share: its scale moves at `update`.

PyTorch's AMP feature proposal, "Gradient scaling".
"""

from typing import Any

import tensorflow as tf

from keras_mp.step.dynamic_loss_scale import DynamicLossScale
from keras_mp.step.loss_scales import LossScale, state_variable
from keras_mp.step.outcomes import OutcomeHandler, SkippedSteps
from keras_mp.step.scaler import C, Scaler
from keras_mp.step.schedule import LossScaleState
from keras_mp.support import selection

# The outcomes of a step, from good to bad. `update` moves the scale by the worst outcome since the
# last `update`. GOOD: the step was made. UNFINISHED: the step says nothing about the scale, as its
# gradients were accumulated for a later step, or a replica had no examples. OVERFLOWED: the step
# was skipped although its loss is finite. BAD: it was skipped, and its loss is not known to be
# finite.
_GOOD, _UNFINISHED, _OVERFLOWED, _BAD = 0, 1, 2, 3


class SharedOutcomes(OutcomeHandler):
    """Notes the worst outcome of several optimizers, until `update` moves the scale."""

    def __init__(self, loss_scale: LossScale, skipped: SkippedSteps) -> None:
        super().__init__(loss_scale, skipped)
        with tf.init_scope():
            self._worst: Any = state_variable(_GOOD, tf.int64, "worst_verdict")

    def good(self) -> list[Any]:
        """Does nothing, since GOOD is no worse than any outcome."""
        return []

    def _bad(
        self, before: tf.Tensor, loss_is_finite: tf.Tensor, has_overflowed: bool | tf.Tensor
    ) -> tuple[Any, ...]:
        # `update` counts one skip however many optimizers were skipped.
        is_first = self._worst < _OVERFLOWED
        unfinished = tf.constant(_UNFINISHED, tf.int64)
        outcome = tf.where(loss_is_finite, tf.constant(_OVERFLOWED, tf.int64), _BAD)
        outcome = selection.chosen(has_overflowed, lambda: outcome, lambda: unfinished)
        moved, consecutive = [self._note(outcome)], self.skips_in_a_row + 1
        after, back_offs = before, tf.constant(0.0)
        if isinstance(self._loss_scale, DynamicLossScale):
            state, history = self._loss_scale.after(before, False, loss_is_finite)
            after = selection.chosen(has_overflowed, lambda: state.loss_scale, lambda: before)
            assert history is not None
            back_offs = history.lone_back_offs
        return moved, after, consecutive, back_offs, is_first

    def accumulated(self) -> list[Any]:
        """Handles gradients that were accumulated for a step that is not complete yet."""
        return [self._note(tf.constant(_UNFINISHED, tf.int64))]

    def update(self, has_stepped: bool | tf.Tensor, new_scale: tf.Tensor | None = None) -> None:
        """Moves the scale by the worst outcome since the last call.

        It is called once for all replicas.

        Args:
            has_stepped: bool, or bool scalar tensor. Whether a step was made or skipped at all.
            new_scale: float32 scalar tensor. The new value of a dynamic scale; if it is None, the
                outcome moves the scale.
        """
        outcome = tf.convert_to_tensor(self._worst)
        if has_stepped is not True:
            outcome = tf.where(has_stepped, outcome, tf.maximum(outcome, _UNFINISHED))
        self._worst.assign(_GOOD, read_value=False)
        self._move_by(outcome)
        if new_scale is not None and isinstance(self._loss_scale, DynamicLossScale):
            zero = tf.zeros([], tf.int64)
            self._loss_scale.assign(LossScaleState(new_scale, zero, self.skips_in_a_row))

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {**super().variables(), "worst_verdict": self._worst}

    def _note(self, outcome: tf.Tensor) -> Any:
        return self._worst.assign(tf.maximum(self._worst, outcome), read_value=False)

    def _move_by(self, outcome: tf.Tensor) -> None:
        """Moves the scale at `update`.

        In a graph there is no branch, since a GPU would wait for it.
        """
        is_good, loss_is_finite = tf.equal(outcome, _GOOD), tf.equal(outcome, _OVERFLOWED)
        is_over = tf.not_equal(outcome, _UNFINISHED)
        if not tf.executing_eagerly():
            self._moved.move(is_good, loss_is_finite, is_over)
        elif is_over:
            self._moved.move(bool(is_good), loss_is_finite)


class SharedScaler(Scaler[C]):
    """A `Scaler` whose scale moves, and whose step ends, at `update`."""

    new_handler = SharedOutcomes

    def end_step(self) -> None:
        """Does nothing, since `update` ends the step of all optimizers."""
