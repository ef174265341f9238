"""Loss scales: the number that the loss is multiplied by, and a fixed one.

RFC 293, "The new LossScale class". This module needs TensorFlow only.
"""

import abc
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.support import validation
from keras_mp.support.number_operators import give_operators

# Hardware flushes neither these numbers nor their reciprocals to zero.
SMALLEST, LARGEST = 2.0**-126, 2.0**126

CLASSES: "weakref.WeakValueDictionary[Any, type[LossScale]]" = weakref.WeakValueDictionary()


class LossScale(tf.Module, abc.ABC):
    """Base class of loss scales.

    Call one to get the scale as a float32 scalar tensor. A loss scale also converts to a tensor, an
    array and a `float`, and takes part in arithmetic and comparisons (except `==`, which is
    identity). So code that was written for TensorFlow 2.4 and later, where `optimizer.loss_scale`
    is a tensor, still works.

    A subclass that is not a `DynamicLossScale` is used like a fixed scale: no step is skipped.

    Example:

    >>> scale = keras_mp.FixedLossScale(128)
    >>> scale()
    <tf.Tensor: shape=(), dtype=float32, numpy=128.0>
    >>> float(scale)
    128.0
    >>> tf.constant(0.5) * scale
    <tf.Tensor: shape=(), dtype=float32, numpy=64.0>
    >>> f"the scale is {scale}"
    'the scale is 128.0'

    Source: RFC 293, "The new LossScale class".
    """

    # Whether steps move the scale, and are skipped if their gradients are not finite.
    moves = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        CLASSES[cls.__module__, cls.__qualname__] = cls

    @abc.abstractmethod
    def __call__(self) -> tf.Tensor:
        """Returns the current loss scale, a float32 scalar tensor."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments as a dict of Python values."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LossScale":
        """Makes a loss scale from a config.

        Args:
            config: dict of constructor arguments, the result of `get_config`.

        Returns:
            A new loss scale, in its initial state.
        """
        return cls(**config)

    def to_compat_v1(self) -> Any:
        """Makes the `tf.compat.v1.mixed_precision` loss scale that moves as this one does.

        The result starts afresh. `keras_mp.loss_scale.get` is the way back.

        Returns:
            A `tf.compat.v1.mixed_precision.LossScale`.

        Raises:
            ValueError: TensorFlow has no such loss scale.

        Example:

        >>> scale = keras_mp.DynamicLossScale(64, increment_period=100).to_compat_v1()
        >>> scale.get_config()
        {'initial_loss_scale': 64.0, 'increment_period': 100, 'multiplier': 2.0}
        """
        raise ValueError(
            "Only a FixedLossScale and a DynamicLossScale have a counterpart in "
            f"tf.compat.v1.mixed_precision. Received: {self!r} (of type {type(self)})"
        )

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the tensor, which is float32."""
        return tf.float32

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the tensor, which is a scalar."""
        return tf.TensorShape([])

    def __float__(self) -> float:
        return float(self())

    def __int__(self) -> int:
        return int(float(self))

    def __format__(self, specification: str) -> str:
        current = _current_value(self)
        if current is None:
            # While a graph is built, there is no number to format. TensorFlow's tensors are
            # formatted in the same way.
            return format(self(), specification) if specification else repr(self)
        return format(current, specification)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self().numpy(), dtype)

    def numpy(self) -> Any:
        """Returns the current loss scale as a NumPy float32 scalar (eager only)."""
        return self().numpy()

    def __repr__(self) -> str:
        current = _current_value(self)
        shown = {} if current is None else {"loss_scale": current}
        shown |= self.get_config()
        arguments = ", ".join(f"{key}={value!r}" for key, value in shown.items())
        return f"{type(self).__name__}({arguments})"


def _current_value(loss_scale: LossScale) -> float | None:
    """Returns the scale as a number, or None where none can be read."""
    if not tf.executing_eagerly():
        return None
    try:
        return float(loss_scale())
    # A subclass or a device may raise anything, and a repr must work while errors are searched.
    except Exception:
        return None


give_operators(LossScale)


class FixedLossScale(LossScale):
    """A loss scale that never changes, and skips no step.

    Args:
        loss_scale_value: int or float, from 2**-126 to 2**126. The scale. A scale below 1 is for
            gradients that overflow float16 even if the loss is not scaled up.

    Raises:
        TypeError: `loss_scale_value` is not a number.
        ValueError: `loss_scale_value` is below 2**-126, above 2**126 or NaN.

    Example:

    >>> keras_mp.FixedLossScale(1024)
    FixedLossScale(loss_scale_value=1024.0)

    Source: RFC 293, "The new LossScale class".
    """

    def __init__(self, loss_scale_value: float) -> None:
        super().__init__(name="fixed_loss_scale")
        self._loss_scale_value = validation.number(
            "loss_scale_value", loss_scale_value, at_least=SMALLEST, at_most=LARGEST
        )

    @property
    def loss_scale_value(self) -> float:
        """The scale as a Python float."""
        return self._loss_scale_value

    def __call__(self) -> tf.Tensor:
        """Returns the scale, a float32 scalar tensor."""
        return tf.constant(self._loss_scale_value, tf.float32)

    def to_compat_v1(self) -> Any:
        """Returns a `tf.compat.v1.mixed_precision.FixedLossScale`.

        The scale must be at least 1.
        """
        value = validation.number("loss_scale_value", self._loss_scale_value, at_least=1)
        return tf.compat.v1.mixed_precision.FixedLossScale(value)

    def get_config(self) -> dict[str, Any]:
        """Returns `{"loss_scale_value": ...}`."""
        return {"loss_scale_value": self._loss_scale_value}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(loss_scale_value={self._loss_scale_value!r})"


def state_variable(value: Any, dtype: tf.DType, name: str) -> tf.Variable:
    """Makes a variable that is assigned once for all replicas."""
    # Not aggregated: every replica assigns the same value, which they have agreed on.
    return tf.Variable(
        value,
        dtype=dtype,
        name=name,
        trainable=False,
        aggregation=tf.VariableAggregation.NONE,
    )
