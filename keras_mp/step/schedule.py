"""The schedule of dynamic loss scaling, as pure functions of a state.

This module needs TensorFlow only.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.support import host
from keras_mp.support.host import chosen

# Hardware flushes neither these numbers nor their reciprocals to zero.
SMALLEST, LARGEST = 2.0**-126, 2.0**126
# Where a dynamic loss scale starts, and where it stops falling: at the smallest float16.
INITIAL_LOSS_SCALE, MIN_LOSS_SCALE = 2.0**15, 2.0**-24
# The evidence that overflows are no accident, without which a scale does not fall below 1: each bad
# step adds 1, and each good one takes a part away. At random, one bad step in 20 does not add up to
# that much in many thousand steps. Below 1, where too high a scale costs steps, less evidence is
# enough.
_AT_1, _BELOW_1 = (6.0, 1 / 6), (3.0, 1 / 10)
# The number of good steps after which a scale below 1 grows: at first, and at most.
_FIRST_WAIT, _LONGEST_WAIT = 10.0, 320.0


class LossScaleState(NamedTuple):
    """The state of a dynamic loss scale between two steps.

    Attributes:
        loss_scale: The scale, a float32 scalar.
        num_good_steps: Finite steps since the scale last moved, an int64 scalar.
        num_bad_steps: Non-finite steps in a row, an int64 scalar.

    Example:

    >>> keras_mp.loss_scale.LossScaleState(64.0, num_good_steps=1, num_bad_steps=0)
    LossScaleState(loss_scale=64.0, num_good_steps=1, num_bad_steps=0)
    """

    loss_scale: Any
    num_good_steps: Any
    num_bad_steps: Any


class History(NamedTuple):
    """What happened before a step, as far as the schedule asks: float scalars.

    Attributes:
        evidence: The evidence that overflows are no accident, from 0 to 6. A new schedule is ready
            to fall.
        loss_scale: The scale after the last bad step.
        good_steps: `num_good_steps` after the last bad step.
        bad_steps: Bad steps since the scale last moved.
        fallen_to: The scale after it last backed off.
        wait: Good steps after which a scale below 1 grows. It doubles with each growth that failed.
    """

    evidence: Any = _AT_1[0]
    loss_scale: Any = LARGEST
    good_steps: Any = 0.0
    bad_steps: Any = 0.0
    fallen_to: Any = LARGEST
    wait: Any = _FIRST_WAIT


def next_state(
    state: LossScaleState,
    finite: Any,
    *,
    loss_is_finite: Any = False,
    history: History | None = None,
    **schedule: Any,
) -> LossScaleState:
    """Returns the next state of a dynamic loss scale.

    This pure function is the schedule of the scale.

    ::

        finite:      num_good_steps += 1, num_bad_steps = 0
                     at increment_period good steps: scale *= multiplier, num_good_steps = 0
        not finite:  num_bad_steps += 1, num_good_steps = 0
                     at hysteresis bad steps or more in a row: scale *= backoff_multiplier

    The scale never leaves `[min_loss_scale, max_loss_scale]`. With a `tolerance` it backs off only
    if more than that share of the steps since it last moved were bad; other bad steps leave
    `num_good_steps` as it is.

    It goes below 1 only if the loss is known to be finite (since no loss scale makes another loss
    finite), and if the history shows that overflows are frequent. Below 1 it grows after 10 good
    steps, or after twice as many for each growth that failed, up to 320; bad steps in between do
    not count.

    Args:
        state: LossScaleState before the step.
        finite: bool scalar tensor, or bool. Whether all gradients of the step were finite.
        loss_is_finite: bool scalar tensor, or bool. Whether the loss, before it was scaled, is
            known to be finite. Defaults to False.
        history: History before the step. Defaults to that of a new schedule.
        **schedule: `increment_period`, `multiplier`, `backoff_multiplier`, `hysteresis`,
            `min_loss_scale`, `max_loss_scale` and `tolerance`, as of a `DynamicLossScale`, whose
            values are the defaults. The counter is compared with `increment_period` by `>=`, so a
            period that was lowered below the counter takes effect on the next good step.

    Returns:
        LossScaleState after the step, of tensors.

    Example:

    >>> from keras_mp import loss_scale
    >>> state = loss_scale.LossScaleState(64.0, num_good_steps=1, num_bad_steps=0)
    >>> after = loss_scale.next_state(
    ...     state, False, increment_period=2, multiplier=2.0, backoff_multiplier=0.5, hysteresis=1,
    ...     min_loss_scale=1.0, max_loss_scale=2.0**127,
    ... )
    >>> float(after.loss_scale), int(after.num_good_steps), int(after.num_bad_steps)
    (32.0, 0, 1)

    Source: RFC 293, "The new LossScale class"; Micikevicius et al., "Mixed Precision Training",
    2018; fairseq's dynamic loss scaler for `tolerance`.
    """
    return Schedule(**schedule).after(state, history or History(), finite, loss_is_finite)[0]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The arguments of `next_state` that do not change from step to step.

    By default it is that of a `DynamicLossScale`.
    """

    increment_period: int = 2000
    multiplier: float = 2.0
    backoff_multiplier: float = 0.5
    hysteresis: int = 1
    min_loss_scale: float = MIN_LOSS_SCALE
    max_loss_scale: float = LARGEST
    tolerance: float = 0.0

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        config = dataclasses.asdict(self)
        if not self.tolerance:
            del config["tolerance"]  # An older keras_mp can read configs without it.
        return config

    def after(
        self, state: LossScaleState, history: History, finite: Any, loss_is_finite: Any = False
    ) -> tuple[LossScaleState, History]:
        """Returns the state and the history after a step, all as tensors.

        Args:
            state: LossScaleState before the step.
            history: History before the step.
            finite: as in `next_state`.
            loss_is_finite: as in `next_state`.
        """
        state = LossScaleState(*map(tf.convert_to_tensor, state, [tf.float32, tf.int64, tf.int64]))
        history = History(*(tf.cast(number, tf.float32) for number in history))
        good = self.grown(state.loss_scale, state.num_good_steps + 1, history), history
        if finite is True:
            return good
        bad = traced_once(self, "bad")(state, history, tf.convert_to_tensor(loss_is_finite))
        choose = functools.partial(tf.where, finite)
        return bad if finite is False else tf.nest.map_structure(choose, good, bad)

    def may_grow(self, scale: tf.Tensor, good_steps: tf.Tensor) -> tf.Tensor:
        """Whether `grown` may return other values than it is given."""
        is_due = good_steps >= self.increment_period
        return is_due | (scale < 1) if self.min_loss_scale < 1 else is_due

    def grown(self, scale: tf.Tensor, good_steps: tf.Tensor, history: History) -> LossScaleState:
        """Returns the state after one more good step was counted."""
        period, zero = self.increment_period, tf.constant(0, tf.int64)
        if self.min_loss_scale < 1:
            longest = min(_LONGEST_WAIT, float(period))
            wait = tf.minimum(self._wait_after_growth(scale, history), longest)
            period = tf.where(scale < 1, tf.cast(wait, tf.int64), period)
        grows = good_steps >= period
        grown = tf.minimum(scale * self.multiplier, self.max_loss_scale)
        return LossScaleState(
            tf.where(grows, grown, scale), tf.where(grows, zero, good_steps), zero
        )

    def _wait_after_growth(self, scale: tf.Tensor, history: History) -> tf.Tensor:
        # A growth has not failed if a second one has followed. This is a quotient, since the
        # product may be infinite; 1.001 allows for rounding.
        has_grown_twice = scale / self.multiplier > 1.001 * history.fallen_to
        return tf.where(has_grown_twice, _FIRST_WAIT, history.wait)

    def bad(
        self, state: LossScaleState, history: History, loss_is_finite: tf.Tensor
    ) -> tuple[LossScaleState, History]:
        """Returns the state and the history after a bad step, all as tensors."""
        scale, num_bad_steps = state.loss_scale, state.num_bad_steps + 1
        good_steps = tf.cast(state.num_good_steps, tf.float32)
        # Whether the scale has moved since the last bad step, and grown since it last backed off.
        has_moved, has_grown = scale > history.loss_scale, scale > history.fallen_to
        good_before = good_steps - tf.where(has_moved, 0.0, history.good_steps)
        enough, lost = tf.unstack(tf.where(scale < 1, _BELOW_1, _AT_1))
        evidence = tf.nn.relu(history.evidence - lost * good_before)
        evidence = tf.minimum(evidence + tf.cast(loss_is_finite, tf.float32), enough)

        has_failed = has_grown & (scale <= 1)
        is_evident = (evidence >= enough) | (has_failed & tf.equal(good_steps, 0))
        lowest, at_1 = self.min_loss_scale, tf.minimum(scale, max(self.min_loss_scale, 1.0))
        floor = tf.where(is_evident & loss_is_finite, lowest, at_1)
        lowered = tf.maximum(scale * self.backoff_multiplier, floor)
        lowered = tf.where(num_bad_steps >= self.hysteresis, lowered, scale)
        bad_steps = tf.where(has_moved, 0.0, history.bad_steps) + 1
        if self.tolerance:
            tolerated = self.tolerance * (good_steps + bad_steps)
            lowered = tf.where(bad_steps > tolerated, lowered, scale)

        moves = lowered < scale
        starts_again = moves if self.tolerance else moves | (scale >= 1)
        good_steps = tf.where(starts_again, 0.0, good_steps)
        wait = self._wait_after_growth(scale, history)
        after = History(
            # Now the next bad step in a row is evidence enough.
            evidence=tf.where(moves & (lowered < 1), evidence - 1, evidence),
            loss_scale=lowered,
            good_steps=good_steps,
            bad_steps=tf.where(moves, 0.0, bad_steps),
            fallen_to=tf.where(moves, lowered, history.fallen_to),
            wait=tf.where(moves & has_failed, 2 * wait, wait),
        )
        return LossScaleState(lowered, tf.cast(good_steps, tf.int64), num_bad_steps), after


@functools.cache
def traced_once(schedule: Schedule, method: str) -> Callable[..., Any]:
    """Returns a method as an operation that is traced once for all graphs."""
    return host.shared_operation(getattr(schedule, method))


def bad_steps_after(before: Any, finite: Any) -> tf.Tensor:
    """Returns the number of non-finite steps in a row after a step.

    Args:
        before: int64 scalar tensor or variable. The number before the step.
        finite: bool scalar tensor, or bool. Whether all gradients of the step were finite.
    """
    return chosen(finite, lambda: tf.constant(0, tf.int64), lambda: before + 1)
