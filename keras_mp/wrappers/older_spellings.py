"""Older arguments of LossScaleOptimizer: of TensorFlow 2.4-2.15 and Keras 3.

RFC 293, "LossScaleOptimizer API", has `loss_scale` in their place.
"""

from typing import Any

from keras_mp.loss_scale import INITIAL_LOSS_SCALE, DynamicLossScale, FixedLossScale
from keras_mp.support import validation

_OLDER = ("dynamic", "initial_scale", "dynamic_growth_steps")
# Arguments without effect in configs of older versions of Keras 3.
_LEFT_ALONE = {"use_ema": False, "ema_momentum": 0.99, "ema_overwrite_frequency": None}
_LEFT_ALONE |= dict.fromkeys(("weight_decay", "clipnorm", "clipvalue", "global_clipnorm"))
_LEFT_ALONE |= dict.fromkeys(("loss_scale_factor", "gradient_accumulation_steps"))


def loss_scale_of(loss_scale: Any, **given: Any) -> Any:
    """Returns the loss scale of `loss_scale` and the older keywords.

    Args:
        loss_scale: as in the constructor.
        **given: the arguments that the constructor does not know. None of an older one is none.

    Raises:
        ValueError: they contradict each other, or there is one that would have an effect on the
            inner optimizer.
    """
    older = {name: given.pop(name) for name in _OLDER if name in given}
    older = {name: value for name, value in older.items() if value is not None}
    strangers = {k: v for k, v in given.items() if k not in _LEFT_ALONE or v != _LEFT_ALONE[k]}
    shown = strangers or {"loss_scale": loss_scale, **older}
    received = ", ".join(f"{name}={value!r}" for name, value in shown.items())
    if strangers:
        raise ValueError(
            "LossScaleOptimizer does not take these arguments; pass them to the inner "
            f"optimizer. Received: {received}"
        )
    if not older:
        return loss_scale
    if not (isinstance(loss_scale, str) and loss_scale == "dynamic"):
        raise ValueError(f"Pass `loss_scale` or older arguments, not both. Received: {received}")
    if validation.boolean("dynamic", older.get("dynamic", True)):
        period = whole(older.get("dynamic_growth_steps", 2000))
        return DynamicLossScale(older.get("initial_scale", INITIAL_LOSS_SCALE), period)
    if older.keys() != {"dynamic", "initial_scale"}:
        raise ValueError(
            "With dynamic=False, `initial_scale` is the fixed scale and must be given, and "
            f"`dynamic_growth_steps` must not. Received: {received}"
        )
    return FixedLossScale(older["initial_scale"])


def whole(number: Any) -> Any:
    """Makes an int of a whole float.

    Keras's own classes take such floats, and have them in configs.

    Args:
        number: Any.

    Returns:
        An int for a whole float; everything else as it is.
    """
    return int(number) if isinstance(number, float) and number.is_integer() else number
