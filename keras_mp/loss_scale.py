"""Loss scales, and conversions to them.

RFC 293, "The new LossScale class". This module needs TensorFlow only.
"""

import numbers
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_mp.step.loss_scales import DynamicLossScale, FixedLossScale, LossScale
from keras_mp.step.schedule import INITIAL_LOSS_SCALE, LossScaleState, Schedule, next_state

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale", "LossScaleState"]
__all__ += ["get", "next_state", "serialize"]

LossScaleArgument = LossScale | float | str | dict[str, Any] | None

# It equals `serialize(DynamicLossScale())`, which would make variables.
DEFAULT_DYNAMIC = {
    "class_name": "DynamicLossScale",
    "config": {"initial_loss_scale": INITIAL_LOSS_SCALE, **Schedule().get_config()},
}


def get(loss_scale: LossScaleArgument) -> LossScale | None:
    """Converts a number, a name, a config or another loss scale to a `LossScale`.

    Args:
        loss_scale: None, a `LossScale`, `"dynamic"`, a positive number (a fixed scale), the result
            of `serialize`, or a `tf.compat.v1.mixed_precision` loss scale (which warns).

    Returns:
        A `LossScale`, or None for None.

    Raises:
        TypeError: `loss_scale` is of another type.
        ValueError: `loss_scale` has a wrong value.

    Example:

    >>> keras_mp.loss_scale.get(64)
    FixedLossScale(loss_scale_value=64.0)

    Source: RFC 293, "The new LossScale class".
    """
    if loss_scale is None or isinstance(loss_scale, LossScale):
        return loss_scale
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return DynamicLossScale()
    if isinstance(loss_scale, dict):
        return _deserialize(loss_scale)
    older = tf.compat.v1.mixed_precision
    if type(loss_scale) in (older.FixedLossScale, older.DynamicLossScale):
        from keras_mp.step import older_loss_scales

        return older_loss_scales.from_compat_v1(loss_scale)
    if isinstance(loss_scale, numbers.Real):
        return FixedLossScale(loss_scale)  # pyright: ignore[reportArgumentType]
    error = ValueError if isinstance(loss_scale, str) else TypeError
    raise error(
        "Expected None, 'dynamic', a positive number or a keras_mp.LossScale. "
        f"Received: loss_scale={loss_scale!r} (of type {type(loss_scale)})"
    )


def required(loss_scale: LossScaleArgument, user: str, instead: str) -> LossScale:
    """Converts a value to a `LossScale` as `get` does, but refuses None.

    Args:
        loss_scale: as in `get`.
        user: str. The name of the class that needs a loss scale, for the message.
        instead: str. The alternative without a loss scale, for the message.

    Returns:
        A `LossScale`.

    Raises:
        ValueError: `loss_scale` is None.
    """
    result = get(loss_scale)
    if result is None:
        raise ValueError(
            f"A {user} needs a loss scale; without one, use {instead}. Received: loss_scale=None"
        )
    return result


def serialize(loss_scale: LossScale | None) -> dict[str, Any] | None:
    """Returns a dict of Python values that `get` turns back into the loss scale.

    Args:
        loss_scale: `LossScale` or None.

    Returns:
        dict with the keys `class_name` and `config`, or None for None.

    Example:

    >>> keras_mp.loss_scale.serialize(keras_mp.FixedLossScale(128))
    {'class_name': 'FixedLossScale', 'config': {'loss_scale_value': 128.0}}
    """
    if loss_scale is None:
        return None
    return {"class_name": _name_in_files(type(loss_scale)), "config": loss_scale.get_config()}


def _subclasses(cls: type) -> Iterator[Any]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _name_in_files(cls: type) -> str:
    """Returns the name of a class in configs.

    It includes the module, except for classes of keras_mp.
    """
    is_ours = cls.__module__.startswith("keras_mp.")
    return cls.__name__ if is_ours else f"{cls.__module__}.{cls.__qualname__}"


def _deserialize(config: dict[str, Any]) -> LossScale:
    name = config.get("class_name")
    classes = {_name_in_files(cls): cls for cls in _subclasses(LossScale)}
    # A class may have moved to another module since, or the file may not name its module.
    moved = [cls for cls in classes.values() if cls.__name__ == str(name).rpartition(".")[2]]
    if name not in classes and len(moved) != 1:
        raise ValueError(
            f"Unknown loss scale class. Expected one of {sorted(classes)} (import the module that "
            f"defines your own class before loading). Received: {config!r}"
        )
    cls = classes[name] if name in classes else moved[0]
    return cls.from_config(config["config"])
