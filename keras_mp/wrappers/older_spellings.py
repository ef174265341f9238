"""Older arguments and attributes of LossScaleOptimizer.

They are those of TensorFlow 2.4-2.15 and of Keras 3.

RFC 293, "LossScaleOptimizer API", has `loss_scale` in their place. Also the name of the inner
optimizer in checkpoints of TensorFlow 2.2 and 2.3.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

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


class OlderSpellings:
    """The older names of loss scale attributes, and methods for TensorFlow 1's graphs."""

    if TYPE_CHECKING:
        loss_scale: LossScale
        inner_optimizer: Any
        apply_gradients: Callable[[Iterable[tuple[Any, Any]]], Any]
        get_scaled_loss: Callable[[tf.Tensor], tf.Tensor]
        get_unscaled_gradients: Callable[[Iterable[Any]], list[Any]]
        _scales_on_tape: Callable[[], bool]

    @property
    def loss_scale_factor(self) -> None:
        """None. That of Keras 3's optimizers would scale the loss again."""
        return None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        raise TypeError(
            "A LossScaleOptimizer scales the loss itself, so it has no `loss_scale_factor`, and "
            "another LossScaleOptimizer cannot wrap it. "
            f"Received: loss_scale_factor={value!r}"
        )

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is a dynamic one."""
        return isinstance(self.loss_scale, DynamicLossScale)

    @property
    def initial_scale(self) -> float:
        """Where a dynamic scale started, or the fixed scale."""
        scale = self.loss_scale
        return scale.initial_loss_scale if isinstance(scale, DynamicLossScale) else float(scale)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The dynamic scale's `increment_period`, read and write; None for a fixed scale."""
        scale = self.loss_scale
        return scale.increment_period if isinstance(scale, DynamicLossScale) else None

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, value: int) -> None:
        scale = self.loss_scale
        if not isinstance(scale, DynamicLossScale):
            raise ValueError(
                "A fixed loss scale does not grow. "
                f"Received: dynamic_growth_steps={value!r} with {scale!r}"
            )
        scale.increment_period = whole(value)

    @property
    def dynamic_counter(self) -> tf.Variable | None:
        """The dynamic scale's `num_good_steps`; None for a fixed scale."""
        scale = self.loss_scale
        return scale.num_good_steps if isinstance(scale, DynamicLossScale) else None

    @property
    def step_counter(self) -> tf.Variable | None:
        """`dynamic_counter` under Keras 3's name."""
        return self.dynamic_counter

    @property
    def dynamic_scale(self) -> tf.Variable | None:
        """The dynamic scale's variable; None for a fixed scale."""
        scale = self.loss_scale
        return scale.loss_scale if isinstance(scale, DynamicLossScale) else None

    def get_gradients(self, loss: tf.Tensor, params: Any) -> list[Any]:
        """Returns the unscaled gradients of a loss in a TensorFlow 1 graph.

        Legacy optimizers have this method.

        Args:
            loss: float tensor. Not scaled.
            params: list of variables.

        Returns:
            list of tensors.
        """
        if self._scales_on_tape():
            raise TypeError(
                "The optimizer overrides how gradients are computed, and would see the scaled "
                "loss in a graph of TensorFlow 1. Train in mixed_bfloat16, without loss scaling. "
                f"Received: {self.inner_optimizer!r}"
            )
        scaled = self.inner_optimizer.get_gradients(self.get_scaled_loss(loss), params)
        return self.get_unscaled_gradients(scaled)

    def get_updates(self, loss: tf.Tensor, params: Any) -> list[Any]:
        """Makes a whole step in a TensorFlow 1 graph (legacy optimizers).

        Args:
            loss: float tensor. Not scaled.
            params: list of variables.

        Returns:
            list of the operations that make the step.
        """
        return [self.apply_gradients(zip(self.get_gradients(loss, params), params, strict=True))]


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
