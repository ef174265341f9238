"""The outcome of a step: it moves the scale, and is counted if it is a skip.

`keras_mp.reports` tells which gradients were not finite, and warns when many steps are skipped.

RFC 293, "LossScaleOptimizer Overview": steps whose gradients are not finite are skipped.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mp.step.dynamic_loss_scale import DynamicLossScale
from keras_mp.step.loss_scales import LossScale, state_variable
from keras_mp.step.schedule import bad_steps_after
from keras_mp.support import host, selection

if TYPE_CHECKING:
    from keras_mp.support.host_callback import HostCallback


class OutcomeHandler:
    """Moves the loss scale at each outcome of a step, and counts skipped steps.

    `good`, `bad` and `accumulated` are called in the branch for such a step, once for all replicas
    of a process. They return their operations. A good step is cheap: it moves the scale.

    Args:
        loss_scale: the `LossScale`. It is moved if it is dynamic or a manager's.
        skipped: the `SkippedSteps`.
    """

    def __init__(self, loss_scale: LossScale, skipped: "SkippedSteps") -> None:
        self._loss_scale: Any = loss_scale
        self._skipped = skipped
        with tf.init_scope():
            self._moved: Any = loss_scale if loss_scale.moves else _Counter()

    @property
    def skips_in_a_row(self) -> tf.Variable:
        """The number of steps skipped since the last good one, an int64 variable."""
        return self._moved.num_bad_steps

    def watch(self) -> None:
        """Prepares for the other methods; called outside of any branch."""
        self._skipped.report.watch()

    def before(self, state: Any, pairs: Sequence[tuple[Any, Any]], kept: Any) -> Any:
        """Notes what a replica has before a step, as `SkipObserver.before` does."""
        return self._skipped.report.before(state, pairs, kept)

    def seen(self, steps: Sequence[Any]) -> Any:
        """Looks for Inf and NaN in a skipped step, as `SkipObserver.seen` does."""
        return self._skipped.report.seen(steps)

    def good(self) -> list[Any]:
        """Handles a step with finite gradients, after which the scale may grow."""
        return self._moved.move(True)[0]

    def bad(self, seen: Any, loss_is_finite: tf.Tensor) -> list[Any]:
        """Handles a step whose gradients are not finite.

        It counts the step, and the scale backs off.

        Args:
            seen: the result of `seen`.
            loss_is_finite: bool scalar tensor. Whether the loss is known to be finite.
        """
        has_overflowed = True if seen is None else seen.has_overflowed()
        before, zero = self._loss_scale(), tf.constant(0, tf.int64)
        moved, after, consecutive, *about = self._bad(before, loss_is_finite, has_overflowed)
        consecutive = selection.chosen(has_overflowed, lambda: consecutive, lambda: zero)
        with computed_after(moved):
            counted = self._skipped.skip(seen, (before, after), consecutive, *about)
        return [*moved, *counted]

    def _bad(
        self, before: tf.Tensor, loss_is_finite: tf.Tensor, has_overflowed: bool | tf.Tensor
    ) -> tuple[Any, ...]:
        """Moves the scale after a step whose gradients are not finite.

        Returns:
            tuple of a list of operations, and of the last arguments of `SkipObserver.record`: the
            scale after the step, `consecutive`, `back_offs` and `is_first`.
        """
        del before
        moved, consecutive = self._moved.move(False, loss_is_finite, has_overflowed)
        scale, after = self._loss_scale, self._loss_scale()
        is_dynamic = isinstance(scale, DynamicLossScale)
        back_offs = scale.history().lone_back_offs if is_dynamic else tf.constant(0.0)
        return moved, after, consecutive, back_offs, None

    def accumulated(self) -> list[Any]:
        """Handles gradients that were accumulated for a step that is not complete yet."""
        return []

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        if isinstance(self._moved, DynamicLossScale):
            return self._moved.hidden_variables()
        return {"skips_in_a_row": self.skips_in_a_row} if isinstance(self._moved, _Counter) else {}


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

    def before(self, state: Any, pairs: Sequence[tuple[Any, Any]], kept: Any) -> Any:
        """Notes what a replica has before a step, in its replica context.

        Args:
            state: the `GradientState`.
            pairs: the (gradient, variable) pairs.
            kept: the `Kept` of the step.

        Returns:
            Any object. Eager code releases it where the step is made.
        """
        del state, pairs, kept

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
        beside: "HostCallback | None" = None,
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
