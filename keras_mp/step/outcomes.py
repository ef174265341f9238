"""The outcome of a step: it moves the scale, and is counted if it is a skip.

When many steps are skipped, there is a warning.

RFC 293, "LossScaleOptimizer Overview": steps whose gradients are not finite are skipped.
"""

import contextlib
import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.step import skip_messages
from keras_mp.step.dynamic_loss_scale import DynamicLossScale
from keras_mp.step.loss_scales import LossScale, state_variable
from keras_mp.step.overflow_report import Overflow
from keras_mp.step.overflows import HALF, Overflows, SkippedStep
from keras_mp.step.schedule import LossScaleState, bad_steps_after
from keras_mp.support import host, messages, selection

# After so many steps at the start whose loss is not finite, a warning says so. After so many
# back-offs without growth, a warning says that a smaller scale does not help.
_FIRST_STEPS, _MANY_BACK_OFFS = 3, 8
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
        self._skipped.watch()

    def good(self) -> list[Any]:
        """Handles a step with finite gradients, after which the scale may grow."""
        return self._moved.move(True)[0] if self._worst is None else []

    def bad(self, seen: SkippedStep | None, loss_is_finite: tf.Tensor) -> list[Any]:
        """Handles a step whose gradients are not finite.

        It counts the step, and the scale backs off.

        Args:
            seen: the `SkippedStep`; None in a graph of TensorFlow 1.
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
        with _after(moved):
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


def _after(operations: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
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


class SkippedSteps:
    """Counts skipped steps, remembers why, and warns when many are skipped.

    Attributes:
        total: int64 variable. How many steps were skipped.
        warn_after: int or None. After so many skips in a row there is a warning, once. There is
            also a warning when half of the last hundred steps were skipped, when the scale has come
            down to its floor, when it backs off again and again though most steps are good, and
            when the first steps have a loss that is not finite. None never warns.
        raise_after: int or None. After so many skips in a row an error is raised; None never
            raises.

    Args:
        loss_scale: the `LossScale`.
        warn_after: int or None.
        raise_after: int or None. Defaults to None.
        beside: another callback of the same graphs, or None (the default).
    """

    def __init__(
        self,
        loss_scale: LossScale,
        warn_after: int | None,
        raise_after: int | None = None,
        beside: host.HostCallback | None = None,
    ) -> None:
        self._loss_scale = loss_scale
        self.warn_after, self.raise_after = warn_after, raise_after
        with tf.init_scope():
            self.total = state_variable(0, tf.int64, "steps_skipped")
        # The weights that a warning looks at, by weak references, since models come and go.
        self._looked_at: Sequence[tuple[str, Any, tf.DType]] = ()
        # The warnings that were given already; each is given once.
        self._told: set[str] = set()
        # A graph of TensorFlow 1 only counts, since it would save every variable that it has.
        self._is_recorded = not host.in_v1_graph()
        if self._is_recorded:
            self._overflows = Overflows()
            self._reports = host.HostCallback(
                self._warn,
                size=len(_Numbers._fields),
                beside=beside,
                is_urgent=self._raises,
                foresee=self._foresee,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_looked_at": ()}

    @property
    def _may_warn(self) -> bool:
        return self._is_recorded and (self.warn_after is not None or self.raise_after is not None)

    def _raises(self) -> bool:
        return self.raise_after is not None

    def look_next_time(self) -> None:
        """Makes the next `skip` look, after `warn_after` or the like has changed."""
        if self._is_recorded:
            self._reports.look_next_time()

    def watch(self) -> None:
        """Prepares the function that is being traced for `skip`."""
        if self._may_warn:
            self._reports.watch(leaves=selection.is_selecting())

    def skip(
        self,
        seen: SkippedStep | None,
        scales: tuple[tf.Tensor, tf.Tensor],
        consecutive: tf.Tensor,
        back_offs: tf.Tensor,
        is_first: bool | tf.Tensor | None = None,
    ) -> list[Any]:
        """Counts and records a skipped step, and warns if it is time.

        It is called in the branch that skips.

        Args:
            seen: the `SkippedStep`; None in a graph of TensorFlow 1, which only counts.
            scales: the loss scale before and after the step, float32 scalar tensors.
            consecutive: int64 scalar tensor. How many steps were skipped in a row.
            back_offs: `History.lone_back_offs` after the step.
            is_first: bool scalar tensor. For several optimizers, whose skips count as one in
                `consecutive`: whether this skip is the first of them. Defaults to None: there is
                only one optimizer.

        Returns:
            list of the operations that count and record.
        """
        counted = [self.total.assign_add(1, read_value=False)]
        if seen is None:
            return counted
        total = tf.convert_to_tensor(self.total)
        is_of_one = is_first is None
        recorded, is_share, bad_losses = self._overflows.record(seen, scales[0], total, is_of_one)
        noted = [*counted, *recorded]
        if not self._may_warn:
            return noted
        names = seen.names_of([weight.variable for weight in seen.weights])
        self._looked_at = [
            (name, weakref.ref(weight.handle), weight.dtype)
            for name, weight in zip(names, seen.weights, strict=True)
        ]
        is_time = tf.constant(False)
        flags = tf.constant([False] * 4)
        if self.warn_after is not None:
            has_fallen = scales[1] < scales[0]
            is_stuck = has_fallen & tf.equal(back_offs, _MANY_BACK_OFFS)
            is_floor = has_fallen & self._is_at_floor(scales[1])
            flags = tf.stack(
                [is_share, is_stuck, self._is_start(seen, consecutive, bad_losses), is_floor]
            )
            is_time = tf.equal(consecutive, self.warn_after) | tf.reduce_any(flags, 0)
        if self.raise_after is not None:
            is_time |= consecutive >= self.raise_after
        if is_first is not None:
            is_time &= is_first
        numbers = tf.concat([[consecutive, seen.zeros], tf.cast(flags, tf.int64)], 0)
        # The warning has to read what these operations write.
        with _after(noted):
            self._reports.post(numbers, is_time, leaves=selection.is_selecting())
        return noted

    def last_overflow(self) -> Overflow | None:
        """Returns the report of the last skipped step; None if no step was skipped.

        Raises:
            RuntimeError: it is called in a graph.
        """
        if not (tf.executing_eagerly() and self._is_recorded):
            raise RuntimeError(
                "`last_overflow` can be read only in eager code, for example after the "
                "tf.function that makes a step, or in a callback. It is not available for graphs "
                "of TensorFlow 1."
            )
        return self._overflows.last()

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        if not self._is_recorded:
            return {}
        reports = self._reports.variables("skip_report")
        return {**reports, **self._overflows.variables()}

    def collect_reports(self) -> None:
        """Gives the warnings of functions compiled by XLA, which cannot call Python."""
        if self._is_recorded:
            self._reports.collect()

    def _foresee(self, numbers: Sequence[int]) -> int:
        """Returns after how many more skips there may be something to say.

        It is the lowest possible number.
        """
        consecutive = numbers[0]
        left = [HALF]
        if self.warn_after is not None:
            # A good step in between starts the count again.
            more = self.warn_after - consecutive
            left += [more if more > 0 else self.warn_after, self._skips_to_floor()]
            if "start" not in self._told and consecutive == self._total():
                left.append(_FIRST_STEPS - self._overflows.bad_losses())
            if isinstance(self._loss_scale, DynamicLossScale):
                back_offs = float(self._loss_scale.history().lone_back_offs)
                left.append(int(_MANY_BACK_OFFS - back_offs) % _MANY_BACK_OFFS or _MANY_BACK_OFFS)
        if self.raise_after is not None:
            left.append(self.raise_after - consecutive)
        return max(1, min(left))

    def _is_at_floor(self, loss_scale: tf.Tensor) -> Any:
        floor = getattr(self._loss_scale, "min_loss_scale", None)
        return False if floor is None else loss_scale <= floor

    def _skips_to_floor(self) -> int:
        """Returns after how many more skips the scale may come down to its floor."""
        scale = self._loss_scale
        if not isinstance(scale, DynamicLossScale) or float(scale()) <= scale.min_loss_scale:
            return HALF
        falls = math.log(float(scale()) / scale.min_loss_scale) / -math.log(
            scale.backoff_multiplier
        )
        # One less, since a `GradScaler` moves the scale later. The 1e-3 is for a rounding error,
        # which would count as a whole skip.
        return math.ceil(falls - 1e-3) - 1

    def _total(self) -> int:
        return int(tf.convert_to_tensor(self.total))

    def _is_start(
        self, seen: SkippedStep, consecutive: tf.Tensor, bad_losses: tf.Tensor
    ) -> tf.Tensor:
        """Returns whether no step was made yet, and several losses were not finite."""
        made: Any = self.total - consecutive if seen.steps_made is None else seen.steps_made
        return tf.equal(bad_losses, _FIRST_STEPS) & (made <= 0)

    def _warn(self, received: Sequence[int], line: messages.Line | None) -> None:
        numbers = _Numbers(*received)
        last = self._overflows.last()
        loss_is_finite = None if last is None else last.loss_is_finite
        is_over = self.raise_after is not None and numbers.consecutive >= self.raise_after
        what = self._what(numbers, loss_is_finite, is_over)
        if not what:
            return
        inputs, grads = ("", "") if last is None else (last.of_inputs, last.of_gradients)
        if loss_is_finite is False and not self._overflows.are_several():
            grads = ""  # All gradients of such a loss are NaN.
        text = what + inputs
        if last is None or not last.lacks_examples:
            text += f" {skip_messages.diagnosis(loss_is_finite)}{grads}"
        text += (
            skip_messages.bad_weights(self._looked_at)
            + " `last_overflow` tells more about the last step."
        )
        if is_over:
            raise RuntimeError(f"{text} Received: raise_after_skips={self.raise_after}")
        messages.warn(text, line)

    def _what(self, numbers: "_Numbers", loss_is_finite: bool | None, is_over: bool) -> str:
        """Returns the first sentences of a warning; empty if there is nothing to say."""
        consecutive, warn_after = numbers.consecutive, self.warn_after
        if is_over or consecutive == warn_after:
            return f"{consecutive} steps in a row were skipped."
        was_reported = warn_after is None or consecutive > warn_after
        if numbers.is_share and not was_reported:
            return f"Half of the last {2 * HALF} steps were skipped."
        if numbers.is_start and loss_is_finite is False and self._is_news("start"):
            return f"{consecutive} steps were skipped, and none was made yet."
        if numbers.is_stuck and self._is_news("stuck"):
            names = self._overflows.not_finite_in_a_row(_MANY_BACK_OFFS)
            return skip_messages.stuck(_MANY_BACK_OFFS, self._loss_scale, names, numbers.zeros)
        if numbers.is_floor and loss_is_finite is not False and self._is_news("floor"):
            return "The loss scale has come down to its floor, and steps are still skipped."
        return ""

    def _is_news(self, what: str) -> bool:
        is_new = what not in self._told
        self._told.add(what)
        return is_new


class _Numbers(NamedTuple):
    """What a warning is about, as numbers that a graph sends to Python.

    Attributes:
        consecutive: How many steps were skipped in a row.
        zeros: How many in a thousand gradient values are 0; -1 if they were not counted.
        is_share: Whether half of the last steps were skipped.
        is_stuck: Whether the scale backs off again and again though most steps are good.
        is_start: Whether no step was made yet, and the loss of several was not finite.
        is_floor: Whether the scale has come down to its floor.
    """

    consecutive: int
    zeros: int
    is_share: int
    is_stuck: int
    is_start: int
    is_floor: int
