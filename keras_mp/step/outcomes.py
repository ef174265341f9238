"""The outcome of a step: it moves the scale, and is counted if it is a skip.

`keras_mp.reports` tells which gradients were not finite, and warns when many steps are skipped.

RFC 293, "LossScaleOptimizer Overview": steps whose gradients are not finite are skipped.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step.dynamic_loss_scale import DynamicLossScale
from keras_mp.step.loss_scales import LossScale, state_variable
from keras_mp.step.schedule import LossScaleState, bad_steps_after
from keras_mp.support import host, selection
from keras_mp.support.host_callback import HostCallback

# The outcomes of a step, from good to bad. `update` moves the scale by the worst outcome since the
# last `update`. GOOD: the step was made. UNFINISHED: the step says nothing about the scale, as its
# gradients were accumulated for a later step, or a replica had no examples. OVERFLOWED: the step
# was skipped although its loss is finite. BAD: it was skipped, and its loss is not known to be
# finite.
_GOOD, _UNFINISHED, _OVERFLOWED, _BAD = 0, 1, 2, 3


class OutcomeHandler:
    """Moves the loss scale and counts skipped steps, at once or at `update`.

    `good`, `bad` and `accumulated` are called in the branch for such a step, once for all replicas
    of a process. They return their operations. A good step is cheap: it moves the scale, or costs
    nothing if `update` moves it.

    Args:
        loss_scale: the `LossScale`. It is moved if it is dynamic or a manager's.
        skipped: the `SkippedSteps`.
        at_update: bool. Whether `update` moves the scale, by the worst outcome of the optimizers
            that share it. Defaults to False: each outcome moves the scale at once.
    """

    def __init__(
        self, loss_scale: LossScale, skipped: "SkippedSteps", *, at_update: bool = False
    ) -> None:
        self._loss_scale: Any = loss_scale
        self._skipped = skipped
        self._worst: Any = None
        with tf.init_scope():
            self._moved: Any = loss_scale if loss_scale.moves else _Counter()
            if at_update:
                self._worst = state_variable(_GOOD, tf.int64, "worst_verdict")

    @property
    def skips_in_a_row(self) -> tf.Variable:
        """The number of steps skipped since the last good one, an int64 variable."""
        return self._moved.num_bad_steps

    def watch(self) -> None:
        """Prepares for the other methods; called outside of any branch."""
        self._skipped.report.watch()

    def seen(self, steps: Sequence[Any]) -> Any:
        """Looks for Inf and NaN in a skipped step, as `SkipObserver.seen` does."""
        return self._skipped.report.seen(steps)

    def good(self) -> list[Any]:
        """Handles a step with finite gradients, after which the scale may grow."""
        return self._moved.move(True)[0] if self._worst is None else []

    def bad(self, seen: Any, loss_is_finite: tf.Tensor) -> list[Any]:
        """Handles a step whose gradients are not finite.

        It counts the step, and the scale backs off.

        Args:
            seen: the result of `seen`.
            loss_is_finite: bool scalar tensor. Whether the loss is known to be finite.
        """
        before, zero = self._loss_scale(), tf.constant(0, tf.int64)
        has_overflowed = True if seen is None else seen.has_overflowed()
        if self._worst is None:
            moved, consecutive = self._moved.move(False, loss_is_finite, has_overflowed)
            is_first, after = None, self._loss_scale()
            back_offs = self._lone_back_offs()
        else:
            # `update` moves the scale, and counts one skip however many optimizers were skipped.
            is_first = self._worst < _OVERFLOWED
            outcome = tf.where(loss_is_finite, tf.constant(_OVERFLOWED, tf.int64), _BAD)
            outcome = selection.chosen(has_overflowed, lambda: outcome, lambda: zero + _UNFINISHED)
            moved, consecutive = [self._note(outcome)], self.skips_in_a_row + 1
            after, back_offs = before, tf.constant(0.0)
            if isinstance(self._loss_scale, DynamicLossScale):
                state, history = self._loss_scale.after(before, False, loss_is_finite)
                after = selection.chosen(has_overflowed, lambda: state.loss_scale, lambda: before)
                assert history is not None
                back_offs = history.lone_back_offs
        consecutive = selection.chosen(has_overflowed, lambda: consecutive, lambda: zero)
        with computed_after(moved):
            counted = self._skipped.skip(seen, (before, after), consecutive, back_offs, is_first)
        return [*moved, *counted]

    def _lone_back_offs(self) -> tf.Tensor:
        if isinstance(self._loss_scale, DynamicLossScale):
            return self._loss_scale.history().lone_back_offs
        return tf.constant(0.0)

    def accumulated(self) -> list[Any]:
        """Handles gradients that were accumulated for a step that is not complete yet."""
        if self._worst is None:
            return []
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
        own = {}
        if isinstance(self._moved, _Counter):
            own["skips_in_a_row"] = self.skips_in_a_row
        if isinstance(self._moved, DynamicLossScale):
            own = self._moved.hidden_variables()
        return own if self._worst is None else {**own, "worst_verdict": self._worst}

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


def computed_after(operations: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which a graph computes after some operations.

    Eager code has no operations.
    """
    return tf.control_dependencies([op for op in operations if isinstance(op, tf.Operation)])


class _Counter:
    """Counts the steps skipped in a row, in place of a loss scale that moves."""

    def __init__(self) -> None:
        self.num_bad_steps = state_variable(0, tf.int64, "bad_steps")

    def move(
        self,
        finite: bool | tf.Tensor,
        loss_is_finite: bool | tf.Tensor = False,
        when: bool | tf.Tensor = True,
    ) -> tuple[list[Any], tf.Tensor]:
        """Counts a step, as `DynamicLossScale.move` does."""
        del loss_is_finite
        consecutive = bad_steps_after(self.num_bad_steps, finite)
        if when is not True:
            consecutive = tf.where(when, consecutive, self.num_bad_steps)
        return [self.num_bad_steps.assign(consecutive, read_value=False)], consecutive


class SkipObserver:
    """Tells the user of skipped steps; this base class tells nothing.

    It is used as it is in graphs of TensorFlow 1, whose `Saver` would save each variable of a
    report.
    """

    def look_next_time(self) -> None:
        """Makes the next `record` look, after `warn_after` or the like has changed."""

    def watch(self) -> None:
        """Prepares the function that is being traced for `record`."""

    def seen(self, steps: Sequence[Any]) -> Any:
        """Looks for Inf and NaN in a skipped step.

        It is called in the branch that skips.

        Args:
            steps: the `ReplicaStep`s of all replicas that are at hand.

        Returns:
            A `SkippedStep`, or None.
        """
        del steps

    def record(
        self,
        seen: Any,
        scales: tuple[tf.Tensor, tf.Tensor],
        consecutive: tf.Tensor,
        back_offs: tf.Tensor,
        is_first: bool | tf.Tensor | None,
    ) -> list[Any]:
        """Records a skipped step, and warns if it is time.

        It is called in the branch that skips.

        Args:
            seen: the result of `seen`.
            scales: the loss scale before and after the step, float32 scalar tensors.
            consecutive: int64 scalar tensor. How many steps were skipped in a row.
            back_offs: `History.lone_back_offs` after the step.
            is_first: bool scalar tensor. For several optimizers, whose skips count as one in
                `consecutive`: whether this skip is the first of them. None for one optimizer.

        Returns:
            list of the operations that record.
        """
        del seen, scales, consecutive, back_offs, is_first
        return []

    def last(self) -> Any:
        """Returns the `Overflow` of the last skipped step; None if no step was skipped.

        Raises:
            RuntimeError: it is called in a graph.
        """
        raise RuntimeError(
            "`last_overflow` can be read only in eager code, for example after the "
            "tf.function that makes a step, or in a callback. It is not available for graphs "
            "of TensorFlow 1."
        )

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {}

    def collect(self) -> None:
        """Issues the warnings of what XLA has compiled, which cannot call Python."""


class SkippedSteps:
    """Counts skipped steps, and has a report of them.

    Attributes:
        loss_scale: the `LossScale`.
        total: int64 variable. How many steps were skipped.
        warn_after: int or None. After so many skips in a row there is a warning, once. None never
            warns.
        raise_after: int or None. After so many skips in a row an error is raised; None never
            raises.
        beside: another callback of the same graphs, or None.
        report: the `SkipObserver` that tells the user of them.

    Args:
        loss_scale: as the attribute.
        warn_after: as the attribute.
        raise_after: as the attribute. Defaults to None.
        beside: as the attribute. Defaults to None.
    """

    # `extensions` sets it, so that the core imports no report.
    new_report: Callable[["SkippedSteps"], SkipObserver] = lambda skipped: SkipObserver()

    def __init__(
        self,
        loss_scale: LossScale,
        warn_after: int | None,
        raise_after: int | None = None,
        beside: HostCallback | None = None,
    ) -> None:
        self.loss_scale, self.beside = loss_scale, beside
        self.warn_after, self.raise_after = warn_after, raise_after
        with tf.init_scope():
            self.total = state_variable(0, tf.int64, "steps_skipped")
        self.report = SkipObserver() if host.in_v1_graph() else type(self).new_report(self)

    def skip(self, seen: Any, *about: Any) -> list[Any]:
        """Counts a skipped step, and records it as `SkipObserver.record` does.

        It is called in the branch that skips.
        """
        counted = [self.total.assign_add(1, read_value=False)]
        return [*counted, *self.report.record(seen, *about)]
