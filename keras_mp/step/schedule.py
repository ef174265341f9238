"""The schedule of dynamic loss scaling: pure functions of a state. It needs TensorFlow only."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

# Where a dynamic loss scale starts.
INITIAL_LOSS_SCALE = 2.0**15


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
) -> LossScaleState:
    """Returns the next state of a dynamic loss scale: its schedule, as one pure function.

    ::

        finite:      num_good_steps += 1, num_bad_steps = 0
                     at increment_period good steps: scale *= multiplier, num_good_steps = 0
        not finite:  num_bad_steps += 1, num_good_steps = 0
                     at hysteresis bad steps or more in a row: scale *= backoff_multiplier

    The scale never leaves `[min_loss_scale, max_loss_scale]`.

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
    schedule = {
        "increment_period": increment_period,
        "multiplier": multiplier,
        "backoff_multiplier": backoff_multiplier,
        "hysteresis": hysteresis,
        "min_loss_scale": min_loss_scale,
        "max_loss_scale": max_loss_scale,
    }
    if not isinstance(finite, bool):
        cases = [next_state(state, case, **schedule) for case in (True, False)]
        return LossScaleState(*(tf.where(finite, *values) for values in zip(*cases, strict=True)))
    scale = tf.convert_to_tensor(state.loss_scale, tf.float32)
    zero = tf.constant(0, tf.int64)
    if finite:
        good = state.num_good_steps + 1
        grow = good >= increment_period
        grown = _where(grow, lambda: tf.minimum(scale * multiplier, max_loss_scale), scale)
        return LossScaleState(grown, _where(grow, lambda: zero, good), zero)
    bad = state.num_bad_steps + 1
    backed_off = _where(
        bad >= hysteresis, lambda: tf.maximum(scale * backoff_multiplier, min_loss_scale), scale
    )
    return LossScaleState(backed_off, zero, bad)


def _where(condition: tf.Tensor, value: Callable[[], tf.Tensor], otherwise: tf.Tensor) -> tf.Tensor:
    # Eager code computes only the value that it takes.
    if tf.executing_eagerly():
        return value() if condition else otherwise
    return tf.where(condition, value(), otherwise)
