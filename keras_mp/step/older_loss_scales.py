"""Conversions to and from the loss scales of `tf.compat.v1.mixed_precision`."""

from typing import Any

import tensorflow as tf

from keras_mp.step.loss_scales import DynamicLossScale, FixedLossScale, LossScale
from keras_mp.step.schedule import Schedule
from keras_mp.support import messages, validation


def to_compat_v1(scale: LossScale) -> Any:
    """Makes an older loss scale, as `LossScale.to_compat_v1` says."""
    older = tf.compat.v1.mixed_precision
    if isinstance(scale, FixedLossScale):
        value = validation.number("loss_scale_value", scale.loss_scale_value, at_least=1)
        return older.FixedLossScale(value)
    if not isinstance(scale, DynamicLossScale):
        raise ValueError(
            "Only a FixedLossScale and a DynamicLossScale have a counterpart in "
            f"tf.compat.v1.mixed_precision. Received: {scale!r} (of type {type(scale)})"
        )
    validation.number("initial_loss_scale", scale.initial_loss_scale, at_least=1)
    names = ("initial_loss_scale", "increment_period", "multiplier")
    arguments = {name: getattr(scale, name) for name in names}
    default = Schedule(backoff_multiplier=1 / scale.multiplier).get_config() | arguments
    strangers = {k: v for k, v in scale.get_config().items() if v != default.get(k)}
    if strangers and strangers != {"min_loss_scale": 1}:
        raise ValueError(
            "A tf.compat.v1.mixed_precision.DynamicLossScale cannot move like this one. "
            f"Expected {default}. Received: {strangers}"
        )
    return older.DynamicLossScale(**arguments)


def from_compat_v1(old: Any) -> LossScale:
    """Makes a loss scale of an older one, which warns.

    Args:
        old: A `FixedLossScale` or `DynamicLossScale` of `tf.compat.v1.mixed_precision`.
    """
    name = type(old).__name__
    messages.warn(
        f"tf.compat.v1.mixed_precision.{name} was converted to keras_mp.{name}: its state starts "
        f"afresh. Pass a keras_mp.{name} to silence this."
    )
    return (FixedLossScale if name == "FixedLossScale" else DynamicLossScale)(**old.get_config())
