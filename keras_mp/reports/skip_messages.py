"""The sentences of warnings about skipped steps.

This module needs TensorFlow only.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_mp.reports.overflow_report import listed
from keras_mp.step.loss_scales import LossScale


def stuck(times: int, loss_scale: LossScale, names: Sequence[str], zeros: int) -> str:
    """Returns sentences about a scale that backs off though most steps are good.

    Args:
        times: int. How often it has backed off.
        loss_scale: the `LossScale`.
        names: the variables whose gradients were not finite each time.
        zeros: int. How many in a thousand gradient values are 0 now; -1 if that is not known.
    """
    whose = f" Each time these gradients were not finite: {listed(names)}." * bool(names)
    share = f": {zeros / 10:g} % of the values of the last gradients are 0" * (zeros >= 0)
    return (
        f"The loss scale has backed off {times} times, to {float(loss_scale()):g}, without growing "
        f"in between, though most steps were finite.{whose} Lowering the scale does not help where "
        f"no scale makes a gradient finite, and small gradients vanish in float16{share}. With "
        "keras_mp.DynamicLossScale(tolerance=0.05), up to 5 % of the steps may fail before the "
        "scale backs off; an epsilon in the square root, norm or division, or clipping what goes "
        "into it, mends the gradient."
    )


def bad_weights(weights: Sequence[tuple[str, Any, tf.DType]]) -> str:
    """Returns a sentence that names the weights that are not finite, or an empty text."""
    bad: dict[str, None] = {}
    for name, reference, dtype in weights:
        handle = reference()
        if handle is not None and dtype.is_floating:
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            if not bool(tf.reduce_all(tf.math.is_finite(value))):
                bad[name] = None
    if not bad:
        return ""
    return f" Weights that are already not finite: {listed([*bad])}. Load them from a checkpoint."


def diagnosis(loss_is_finite: bool | None) -> str:
    """Returns what to do about a loss that is finite, not finite, or unknown (None)."""
    forward = (
        "look at the forward pass, where a smaller loss scale changes nothing: at the inputs and "
        "labels, the learning rate, weights that are already not finite, and activations above "
        "65504, the largest float16; print(keras_mp.numerics.check(model, (x, y))) names the cause "
        "and the cure"
    )
    backward = (
        "gradients overflow on their way back: find the operation whose gradient is not finite "
        "(with keras_mp.numerics.watch(model): model.fit(x, y) names it), such as a norm at zero, "
        "run it in float32, or clip what goes into it; with several replicas, see whether "
        "aggregate_in_float16=False helps, since float16 sums end at 65504"
    )
    if loss_is_finite is None:
        return (
            "The loss was scaled in another function and could not be looked at. If it is Inf or "
            f"NaN, {forward}; if it is finite, {backward}."
        )
    if loss_is_finite:
        return f"The loss of the last one was finite, so {backward}."
    return f"The loss of the last one was Inf or NaN: {forward}."
