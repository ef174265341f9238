"""Older arguments of LossScaleOptimizer: of TensorFlow 2.4-2.15 and Keras 3.

RFC 293, "LossScaleOptimizer API", has `loss_scale` in their place. Also the name of the inner
optimizer in checkpoints of TensorFlow 2.2 and 2.3.
"""

from typing import Any

from keras_mp.loss_scale import DynamicLossScale, FixedLossScale, LossScale, required

# The name of the inner optimizer, which is a child, in checkpoints of TensorFlow 2.2 and 2.3.
INNER_CHILD = "base_optimizer"

# Arguments without effect in configs of older versions of Keras 3.
_LEFT_ALONE = {
    "weight_decay": None,
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


def loss_scale_from_arguments(
    loss_scale: Any,
    dynamic: bool | None,
    initial_scale: float | None,
    dynamic_growth_steps: int | None,
) -> LossScale:
    """Returns the loss scale of `loss_scale` and the older keywords.

    Contradictions are refused.
    """
    older = {
        "dynamic": dynamic,
        "initial_scale": initial_scale,
        "dynamic_growth_steps": dynamic_growth_steps,
    }
    older = {key: value for key, value in older.items() if value is not None}
    if not older:
        return required(loss_scale, "LossScaleOptimizer", "the inner optimizer itself")
    received = ", ".join(f"{k}={v!r}" for k, v in {"loss_scale": loss_scale, **older}.items())
    if not (isinstance(loss_scale, str) and loss_scale == "dynamic"):
        raise ValueError(
            f"Pass `loss_scale`, or the older {', '.join(older)}, not both. Received: {received}"
        )
    if not isinstance(older.get("dynamic", True), bool):
        raise TypeError(f"`dynamic` must be a bool. Received: {received}")
    if older.get("dynamic", True):
        arguments = {
            "initial_loss_scale": initial_scale,
            "increment_period": whole(dynamic_growth_steps),
        }
        return DynamicLossScale(**{k: v for k, v in arguments.items() if v is not None})
    if initial_scale is None or dynamic_growth_steps is not None:
        raise ValueError(
            "With dynamic=False, `initial_scale` is the fixed scale and must be given, and "
            f"`dynamic_growth_steps` must not. Received: {received}"
        )
    return FixedLossScale(initial_scale)


def refuse_arguments_of_inner_optimizers(kwargs: dict[str, Any]) -> None:
    """Refuses arguments that a wrapper has no use for.

    Args:
        kwargs: dict of keyword arguments that the constructor does not know.

    Raises:
        ValueError: there is one that would have an effect.
    """
    strangers = {k: v for k, v in kwargs.items() if k not in _LEFT_ALONE or v != _LEFT_ALONE[k]}
    if strangers:
        received = ", ".join(f"{key}={value!r}" for key, value in strangers.items())
        raise ValueError(
            "LossScaleOptimizer does not take these arguments; pass them to the inner "
            f"optimizer. Received: {received}"
        )


def whole(number: Any) -> Any:
    """Makes an int of a whole float.

    Keras's own classes take such floats, and have them in configs.

    Args:
        number: Any.

    Returns:
        An int for a whole float; everything else as it is.
    """
    return int(number) if isinstance(number, float) and number.is_integer() else number
