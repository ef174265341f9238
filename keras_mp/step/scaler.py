"""A `Scaler`: a loss scale, outcomes of steps, and notes of skipped ones.

RFC 293, "LossScaleOptimizer Overview": steps whose gradients are not finite are skipped.
`LossScaleOptimizer` and the optimizer of TensorFlow 1 have a `Scaler` each. A `GradScaler`, which
several optimizers share, has a `SharedScaler`.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.step import replicas
from keras_mp.step.loss_scales import DynamicLossScale, LossScale, state_variable
from keras_mp.step.schedule import LossScaleState, bad_steps_after
from keras_mp.support import messages, validation
from keras_mp.support.host import chosen

Truth = bool | tf.Tensor


class Scaler:
    """The scale of a step, and what counts its outcomes.

    Attributes:
        loss_scale: the `LossScale`.
        reduce_dtype: DType in which float32 gradients are summed over replicas.
        can_skip: bool. Whether a step may be skipped.
        steps_skipped: int64 variable. How many steps were skipped.
        warn_after: int or None. After so many skips in a row there is a warning. None never warns.
        raise_after: int or None. After so many skips in a row an error is raised; None never
            raises.
        told: the warnings that were given.
        looked_at: float. How many steps were skipped when a note was read last.
        notes: the `Note`s.
        paths: function that returns the names of variables that are known, by their ids. At first
            it knows none.

    Args:
        loss_scale: `LossScale`.
        skip_nonfinite: bool. Whether steps with gradients that are not finite are always skipped,
            not only with a loss scale that moves.
        reduce_dtype: str, DType or None, as `replicas.reduce_dtype_of` takes it.
        aggregate_in_float16: bool or None, also as `replicas.reduce_dtype_of` takes it.
        warn_after_skips: int, or None for never.
        raise_after_skips: int, or None for never (the default).
    """

    # Whether several optimizers share it.
    is_shared = False

    def __init__(
        self,
        loss_scale: LossScale,
        *,
        skip_nonfinite: bool = False,
        reduce_dtype: str | tf.DType | None = None,
        aggregate_in_float16: bool | None = None,
        warn_after_skips: int | None,
        raise_after_skips: int | None = None,
    ) -> None:
        self.can_skip = skip_nonfinite or loss_scale.moves
        if tf.distribute.has_strategy():
            from keras_mp.step import strategies

            strategies.check(self.can_skip)
        self.loss_scale: Any = loss_scale
        self.reduce_dtype = replicas.reduce_dtype_of(reduce_dtype, aggregate_in_float16)
        with tf.init_scope():
            self.steps_skipped = state_variable(0, tf.int64, "steps_skipped")
            self._moved: Any = loss_scale if loss_scale.moves or not self.can_skip else _Counter()
        self.paths: Callable[[], dict[int, str]] = dict
        self.told, self.looked_at, self.notes = set[str](), 0.0, dict[Any, Any]()
        self.set_limits(warn_after_skips, raise_after_skips)

    @property
    def skips_in_a_row(self) -> tf.Variable:
        """The number of steps skipped since the last good one, an int64 variable."""
        return self._moved.num_bad_steps

    def outcome(self, finite: Truth, skipped: Any = None, is_moved: bool = False) -> list[Any]:
        """Moves the loss scale after a step, and counts and reports a skipped one.

        It is called once for all replicas of a process, in the branch for such a step. A good step
        is cheap: it moves the scale.

        Args:
            finite: True or False in a branch. Where XLA compiles there is none: a bool scalar
                tensor.
            skipped: `SkippedStep`; None if `finite` is True.
            is_moved: bool. Whether a tape has moved the scale by these gradients. Defaults to
                False.

        Returns:
            list of operations.
        """
        if finite is True or skipped is None:
            # A good outcome is no worse than any: `update` of a shared scaler asks for the worst.
            return [] if is_moved or self.is_shared else self._moved.move(True)
        from keras_mp.step import skip_report

        before = self.loss_scale()
        moved = self._move_after_skip(finite, skipped, is_moved)
        added = tf.cast(chosen(finite, lambda: 0, lambda: 1), tf.int64)
        counted = self.steps_skipped.assign_add(added, read_value=False)
        return [*moved, counted, *skip_report.noted(self, skipped, finite, before)]

    def _move_after_skip(self, finite: Truth, skipped: Any, is_moved: bool) -> list[Any]:
        overflowed: Any = skipped.has_overflowed
        if is_moved:  # But not by what the program has made of finite gradients.
            overflowed &= tf.equal(self.skips_in_a_row, 0)
        when = chosen(finite, lambda: not is_moved, lambda: overflowed)
        return self._moved.move(finite, skipped.loss_is_finite, when)

    def accumulated(self) -> list[Any]:
        """Handles gradients that were accumulated for a step that is not complete yet."""
        return []

    def set_limits(self, warn_after: int | None, raise_after: int | None) -> None:
        """Checks and sets both limits, after which skips in a row may be warned of again."""
        self.warn_after = validation.integer_or_none("warn_after_skips", warn_after)
        self.raise_after = validation.integer_or_none("raise_after_skips", raise_after)
        self.told.discard("row")

    def last(self) -> Any:
        """Returns the `Overflow` of the last skipped step; None if no step was skipped.

        Raises:
            RuntimeError: it is called in a graph.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "`last_overflow` can be read only in eager code, such as a callback, or after the "
                "tf.function that makes a step. Graphs of TensorFlow 1 have none."
            )
        from keras_mp.step import overflow

        found = overflow.last_note(self)
        return None if found is None else overflow.report(*found)

    def ask(self, line: messages.Line | None = None) -> None:
        """Warns if it is time; where XLA compiles steps, which cannot, others ask.

        Args:
            line: the user's line that makes the steps. Defaults to the one that is being executed.
        """
        if (self.warn_after or self.raise_after) and tf.executing_eagerly():
            from keras_mp.step import skip_warnings

            skip_warnings.warn(self, line)

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        notes = {f"note_{i}": note.vector for i, note in enumerate(self.notes.values())}
        return {**notes, **self._moved.hidden_variables()}

    def __getstate__(self) -> dict[str, Any]:
        new = {"paths": dict, "told": set(), "looked_at": 0.0, "notes": {}}
        return {**vars(self), **new}


# The outcomes of a step, from good to bad. `update` moves the scale by the worst outcome since the
# last `update`. GOOD: the step was made. UNFINISHED: the step says nothing about the scale, as its
# gradients were accumulated for a later step, or a replica had no examples. OVERFLOWED: the step
# was skipped although its loss is finite. BAD: it was skipped, and its loss is not known to be
# finite.
_GOOD, _UNFINISHED, _OVERFLOWED, _BAD = 0, 1, 2, 3


class SharedScaler(Scaler):
    """A `Scaler` of several optimizers, whose step ends at `update`.

    PyTorch's AMP feature proposal, "Gradient scaling".
    """

    is_shared = True

    def __init__(self, loss_scale: LossScale, **arguments: Any) -> None:
        super().__init__(loss_scale, **arguments)
        with tf.init_scope():
            self._worst = state_variable(_GOOD, tf.int64, "worst_verdict")

    def _move_after_skip(self, finite: Truth, skipped: Any, is_moved: bool) -> list[Any]:
        outcome = chosen(skipped.loss_is_finite, lambda: _OVERFLOWED, lambda: _BAD)
        outcome = chosen(skipped.has_overflowed, lambda: outcome, lambda: _UNFINISHED)
        outcome = chosen(finite, lambda: _GOOD, lambda: outcome)
        return [self._note(outcome)]

    def accumulated(self) -> list[Any]:
        """Handles gradients that were accumulated for a step that is not complete yet."""
        return [self._note(_UNFINISHED)]

    def update(self, has_stepped: bool, new_scale: tf.Tensor | None = None) -> None:
        """Moves the scale by the worst outcome since the last call.

        It is called once for all replicas. In a graph there is no branch, since a GPU would wait
        for it.

        Args:
            has_stepped: bool. Whether a step was made or skipped at all.
            new_scale: float32 scalar tensor. The new value of a dynamic scale; if it is None, the
                outcome moves the scale.
        """
        worst = tf.convert_to_tensor(self._worst)
        self._worst.assign(_GOOD, read_value=False)
        if has_stepped:
            is_good, has_finite_loss = tf.equal(worst, _GOOD), tf.equal(worst, _OVERFLOWED)
            self._moved.move(is_good, has_finite_loss, tf.not_equal(worst, _UNFINISHED))
        if new_scale is not None and isinstance(self.loss_scale, DynamicLossScale):
            zero = tf.zeros([], tf.int64)
            self.loss_scale.assign(LossScaleState(new_scale, zero, self.skips_in_a_row))

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {**super().variables(), "worst_verdict": self._worst}

    def _note(self, outcome: Any) -> Any:
        outcome = tf.maximum(self._worst, tf.cast(outcome, tf.int64))
        return self._worst.assign(outcome, read_value=False)


class _Counter:
    """Counts the steps skipped in a row, in place of a loss scale that moves."""

    def __init__(self) -> None:
        self.num_bad_steps = state_variable(0, tf.int64, "bad_steps")

    def hidden_variables(self) -> dict[str, tf.Variable]:
        return {"skips_in_a_row": self.num_bad_steps}

    def move(self, finite: Truth, loss_is_finite: Truth = False, when: Truth = True) -> list[Any]:
        """Counts a step, as `DynamicLossScale.move` does."""
        del loss_is_finite
        counted = bad_steps_after(self.num_bad_steps, finite)
        counted = chosen(when, lambda: counted, lambda: self.num_bad_steps)
        return [self.num_bad_steps.assign(counted, read_value=False)]
