"""Loss scales: the factor of the loss, a fixed one, and one that moves.

RFC 293, "The new LossScale class". This module needs TensorFlow only. `schedule` has the
arithmetic, and `scaled_step` looks at the gradients.
"""

import abc
import dataclasses
import operator
import types
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.step import schedule
from keras_mp.step.schedule import History, LossScaleState
from keras_mp.support import host, validation
from keras_mp.support.host import chosen
from keras_mp.support.number_operators import give_operators


def _read_only(path: str, doc: str) -> Any:
    """Returns a property that reads an attribute, or one of an attribute."""
    return property(operator.attrgetter(path), doc=doc)


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
    # Those of the tensor.
    dtype, shape = tf.float32, tf.TensorShape([])

    @abc.abstractmethod
    def __call__(self) -> tf.Tensor:
        """Returns the current loss scale, a float32 scalar tensor."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments as a dict of Python values."""

    def hidden_variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {}

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

        The result starts afresh, does not fall below 1, and has no ceiling but the largest float32.
        `keras_mp.loss_scale.get` is the way back.

        Returns:
            A `tf.compat.v1.mixed_precision.LossScale`.

        Raises:
            ValueError: TensorFlow has no such loss scale: the (initial) scale is below 1, or
                `backoff_multiplier`, `hysteresis`, `min_loss_scale`, `max_loss_scale` or
                `tolerance` is not one that TensorFlow's class has.

        Example:

        >>> scale = keras_mp.DynamicLossScale(64, increment_period=100).to_compat_v1()
        >>> scale.get_config()
        {'initial_loss_scale': 64.0, 'increment_period': 100, 'multiplier': 2.0}
        """
        from keras_mp.step import older_loss_scales

        return older_loss_scales.to_compat_v1(self)

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
        low, high = schedule.SMALLEST, schedule.LARGEST
        self._loss_scale_value = validation.number(
            "loss_scale_value", loss_scale_value, at_least=low, at_most=high
        )

    loss_scale_value = _read_only("_loss_scale_value", "The scale as a Python float.")

    def __call__(self) -> tf.Tensor:
        """Returns the scale, a float32 scalar tensor."""
        return tf.constant(self._loss_scale_value, tf.float32)

    def get_config(self) -> dict[str, Any]:
        """Returns `{"loss_scale_value": ...}`."""
        return {"loss_scale_value": self._loss_scale_value}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(loss_scale_value={self._loss_scale_value!r})"


class DynamicLossScale(LossScale):
    """A loss scale that stays just below the one at which gradients overflow.

    It doubles after 2,000 steps with finite gradients, and halves at a step with a non-finite one,
    which is skipped. It goes below 1 only if the loss is known to be finite, since no scale mends a
    loss of NaN, and only if such steps are frequent; it comes back soon. The loss is known where
    one function, or eager code, scales it and applies the gradients. The object holds the state;
    `LossScaleOptimizer` moves it. The exact rules are the pure function
    `keras_mp.loss_scale.next_state`. The state may be assigned: `scale.loss_scale.assign(256.)`.

    Args:
        initial_loss_scale: int or float. Where the scale starts. A start that is too high is put
            right within a few steps; one that is too low takes thousands. Defaults to `2**15`.
        increment_period: int, at least 1. The number of finite steps after which the scale grows.
            Defaults to 2000.
        multiplier: float above 1. The factor by which the scale grows. Powers of two cost no
            precision. Defaults to 2.
        backoff_multiplier: float between 0 and 1. The factor at a non-finite step. Defaults to
            `1 / multiplier`.
        hysteresis: int, at least 1. How many non-finite steps in a row it takes before the scale
            backs off (each of them is skipped in any case). Defaults to 1.
        min_loss_scale: float of at least `2**-126`. The floor. The RFC's floor is 1, and files that
            an older keras_mp saved have that too. Defaults to `2**-24`.
        max_loss_scale: float, at most `2**126`. The ceiling. At the default, `2**126`, the scale
            and its reciprocal are still normal numbers.
        tolerance: float from 0, less than 1. The share of the steps since the scale last moved that
            may be non-finite before it backs off. For example 0.05, for data in which one step in
            20 has a gradient that no scale makes finite. Such steps are skipped in any case.
            Defaults to 0.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is outside its range.

    Example:

    >>> scale = keras_mp.DynamicLossScale(initial_loss_scale=1024)
    >>> _ = scale.loss_scale.assign(256.0)
    >>> scale()
    <tf.Tensor: shape=(), dtype=float32, numpy=256.0>
    >>> int(scale.num_good_steps)
    0

    Source: RFC 293, "The new LossScale class".
    """

    moves = True

    def __init__(
        self,
        initial_loss_scale: float = schedule.INITIAL_LOSS_SCALE,
        increment_period: int = 2000,
        multiplier: float = 2.0,
        *,
        backoff_multiplier: float | None = None,
        hysteresis: int = 1,
        min_loss_scale: float = schedule.MIN_LOSS_SCALE,
        max_loss_scale: float = schedule.LARGEST,
        tolerance: float = 0.0,
    ) -> None:
        super().__init__(name="dynamic_loss_scale")
        number, integer = validation.number, validation.integer
        multiplier = number("multiplier", multiplier, above=1)
        backoff = 1 / multiplier if backoff_multiplier is None else backoff_multiplier
        low = number("min_loss_scale", min_loss_scale, at_least=schedule.SMALLEST)
        high = number("max_loss_scale", max_loss_scale, at_least=low, at_most=schedule.LARGEST)
        initial = number("initial_loss_scale", initial_loss_scale, at_least=low, at_most=high)
        self._schedule = schedule.Schedule(
            integer("increment_period", increment_period),
            multiplier,
            number("backoff_multiplier", backoff, above=0, below=1),
            integer("hysteresis", hysteresis),
            low,
            high,
            number("tolerance", tolerance, at_least=0, below=1),
        )
        self._initial_loss_scale, self._history = initial, None
        with tf.init_scope():
            # The attribute names are the checkpoint's keys, and those are the ones that
            # TensorFlow's own loss scales have written since 2.2.
            self.current_loss_scale = state_variable(initial, tf.float32, "current_loss_scale")
            self.good_steps = state_variable(0, tf.int64, "good_steps")
            self.bad_steps = state_variable(0, tf.int64, "bad_steps")
            # It is not part of checkpoints, which do not look into a namespace: what it describes
            # shows itself again within a few steps. A `Saver` of TensorFlow 1 saves all variables,
            # and only loads files that have all of them.
            if tolerance or not host.in_v1_graph():
                history = state_variable([float(n) for n in History()], tf.float32, "history")
                self._history = types.SimpleNamespace(variable=history)

    initial_loss_scale = _read_only("_initial_loss_scale", "Where the scale started.")
    multiplier = _read_only("_schedule.multiplier", "The factor by which the scale grows.")
    backoff_multiplier = _read_only("_schedule.backoff_multiplier", "The factor at a bad step.")
    hysteresis = _read_only("_schedule.hysteresis", "Bad steps in a row before the scale falls.")
    min_loss_scale = _read_only("_schedule.min_loss_scale", "The lowest value of the scale.")
    max_loss_scale = _read_only("_schedule.max_loss_scale", "The highest value of the scale.")
    tolerance = _read_only("_schedule.tolerance", "The share of bad steps that is tolerated.")
    loss_scale = _read_only("current_loss_scale", "The scale, a float32 variable.")
    num_good_steps = _read_only("good_steps", "Good steps since it moved, an int64 variable.")
    num_bad_steps = _read_only("bad_steps", "Bad steps in a row, an int64 variable.")

    @property
    def increment_period(self) -> int:
        """The number of finite steps after which the scale grows.

        A `tf.function` keeps the number that was set when it was traced.
        """
        return self._schedule.increment_period

    @increment_period.setter
    def increment_period(self, value: int) -> None:
        period = validation.integer("increment_period", value)
        self._schedule = dataclasses.replace(self._schedule, increment_period=period)

    def __call__(self) -> tf.Tensor:
        """Returns the current scale, a float32 scalar tensor."""
        return tf.convert_to_tensor(self.current_loss_scale)

    def next_state(
        self,
        loss_scale: tf.Tensor,
        finite: bool | tf.Tensor,
        loss_is_finite: bool | tf.Tensor = False,
    ) -> LossScaleState:
        """Returns the state after a step, for the caller to `assign`.

        Args:
            loss_scale: float32 scalar tensor, the scale that the step was made with.
            finite: bool, or bool scalar tensor. Whether all gradients were finite.
            loss_is_finite: bool, or bool scalar tensor. Whether the loss is known to be finite.
                Defaults to False.

        Returns:
            LossScaleState of tensors.
        """
        before = self._state()._replace(loss_scale=loss_scale)
        return self._schedule.after(before, self.history(), finite, loss_is_finite)[0]

    def _state(self) -> LossScaleState:
        return LossScaleState(self(), self.good_steps, self.bad_steps)

    def history(self) -> History:
        """Returns the `History` of the schedule, of float32 scalar tensors."""
        if self._history is None:
            return History()
        return History(*tf.unstack(tf.convert_to_tensor(self._history.variable)))

    def assign(self, state: LossScaleState) -> list[Any]:
        """Assigns the state.

        Args:
            state: LossScaleState of scalars.

        Returns:
            The list of the three assignments (operations, where there is a graph).
        """
        variables = (self.current_loss_scale, self.good_steps, self.bad_steps)
        return [v.assign(value, read_value=False) for v, value in zip(variables, state)]

    def move(
        self,
        finite: bool | tf.Tensor,
        loss_is_finite: bool | tf.Tensor = False,
        when: bool | tf.Tensor = True,
    ) -> list[Any]:
        """Moves the scale as a step moves it.

        Args:
            finite: as in `next_state`.
            loss_is_finite: as in `next_state`.
            when: bool, or bool scalar tensor. If it is False, the state stays as it is. Defaults to
                True.

        Returns:
            list of assignments.
        """
        if tf.executing_eagerly():
            finite, when = bool(finite), bool(when)
        if when is False:
            return []
        if finite is True and when is True and not host.in_v1_graph():
            self.bad_steps.assign(0, read_value=False)
            self.good_steps.assign_add(1, read_value=False)
            host.rarely(self._schedule.may_grow(self(), self.good_steps), self._grow)
            return []
        before = self._state()
        after, history = self._schedule.after(before, self.history(), finite, loss_is_finite)
        if when is not True:
            after = LossScaleState(*(tf.where(when, *pair) for pair in zip(after, before)))
        return [*self.assign(after), *self._remember(history, when)]

    def _grow(self) -> None:
        """Lets the scale grow if it is time, after a good step was counted."""
        grown = schedule.traced_once(self._schedule, "grown")
        self.assign(grown(self(), tf.convert_to_tensor(self.good_steps), self.history()))

    def fall_to(self, loss_scale: tf.Tensor) -> None:
        """Moves the scale to one at which the gradients of a step became finite.

        Args:
            loss_scale: float32 scalar tensor, below the current scale.
        """
        _, history = self._schedule.after(self._state(), self.history(), False, True)
        known = {"loss_scale": loss_scale, "fallen_to": loss_scale}
        self.assign(LossScaleState(loss_scale, 0, 0))
        self._remember(history._replace(good_steps=0.0, bad_steps=0.0, **known))

    def _remember(self, history: History, when: bool | tf.Tensor = True) -> list[Any]:
        """Assigns the history; returns operations."""
        if (own := self._history) is None:
            return []
        numbers = chosen(when, lambda: tf.stack(history), lambda: own.variable)
        return [own.variable.assign(numbers, read_value=False)]

    def hidden_variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {} if self._history is None else {"history": self._history.variable}

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, without the state."""
        return {"initial_loss_scale": self._initial_loss_scale, **self._schedule.get_config()}

    def __deepcopy__(self, memo: dict[int, Any]) -> "DynamicLossScale":
        # New variables rather than copied ones, since only new ones belong to the strategy in whose
        # scope the copy is made. While a graph is built there are no values to copy, so a copy
        # starts afresh there.
        copied: Any = type(self).from_config(self.get_config())
        memo[id(self)] = copied
        if tf.executing_eagerly():
            copied.assign(self._state())
            copied._remember(self.history())
        return copied


def state_variable(value: Any, dtype: tf.DType, name: str) -> tf.Variable:
    """Makes a variable that is assigned once for all replicas."""
    # Not aggregated: every replica assigns the same value, which they have agreed on.
    return tf.Variable(value, trainable=False, dtype=dtype, name=name)
