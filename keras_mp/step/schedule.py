"""The schedule of dynamic loss scaling: pure functions of a state. It needs TensorFlow only."""

from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.support.selection import chosen

# Where a dynamic loss scale starts, and where it stops falling: at the smallest float16.
INITIAL_LOSS_SCALE, MIN_LOSS_SCALE = 2.0**15, 2.0**-24


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


def next_state(
    state: LossScaleState,
    finite: Any,
    *,
    increment_period: int,
    multiplier: float,
    backoff_multiplier: float,
    hysteresis: int,
    min_loss_scale: float,
    max_loss_scale: float,
    loss_is_finite: Any = False,
) -> LossScaleState:
    """Returns the next state of a dynamic loss scale: its schedule, as one pure function.

    ::

        finite:      num_good_steps += 1, num_bad_steps = 0
                     at increment_period good steps: scale *= multiplier, num_good_steps = 0
        not finite:  num_bad_steps += 1, num_good_steps = 0
                     at hysteresis bad steps or more in a row: scale *= backoff_multiplier

    The scale never leaves `[min_loss_scale, max_loss_scale]`. Below 1 it only falls if the loss is
    known to be finite: no loss scale makes another loss finite.

    Args:
        state: LossScaleState before the step.
        finite: bool scalar tensor, or bool. Whether all gradients of the step were finite.
        increment_period: int. Good steps after which the scale grows. The counter is compared with
            `>=`, so a period that was lowered below the counter takes effect on the next good step.
        multiplier: float above 1. Growth factor.
        backoff_multiplier: float between 0 and 1. Back-off factor.
        hysteresis: int. Consecutive bad steps that are needed before the scale backs off.
        min_loss_scale: float. Floor.
        max_loss_scale: float. Ceiling.
        loss_is_finite: bool scalar tensor, or bool. Whether the loss, before it was scaled, is
            known to be finite. Defaults to False.

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
    2018.
    """
    scale, zero = tf.convert_to_tensor(state.loss_scale, tf.float32), tf.constant(0, tf.int64)

    def grown() -> tf.Tensor:
        return tf.minimum(scale * multiplier, max_loss_scale)

    def backed_off() -> tf.Tensor:
        floor = min_loss_scale
        if min_loss_scale < 1:
            floor = tf.where(loss_is_finite, min_loss_scale, tf.minimum(scale, 1.0))
        return tf.maximum(scale * backoff_multiplier, floor)

    good = chosen(finite, lambda: state.num_good_steps + 1, lambda: zero)
    bad = chosen(finite, lambda: zero, lambda: state.num_bad_steps + 1)
    # What is known in Python leaves out operations.
    grows = good >= increment_period if finite is not False else False
    backs_off = bad >= hysteresis if hysteresis > 1 else True
    moved = chosen(
        finite,
        lambda: chosen(grows, grown, lambda: scale),
        lambda: chosen(backs_off, backed_off, lambda: scale),
    )
    return LossScaleState(moved, chosen(grows, lambda: zero, lambda: good), bad)


def bad_steps_after(before: Any, finite: Any) -> tf.Tensor:
    """Returns the number of non-finite steps in a row after a step.

    Args:
        before: int64 scalar tensor or variable. The number before it.
        finite: bool scalar tensor, or bool. Whether all gradients of the step were finite.
    """
    return chosen(finite, lambda: tf.constant(0, tf.int64), lambda: before + 1)
