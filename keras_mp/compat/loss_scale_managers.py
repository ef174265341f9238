"""Loss scale managers of TensorFlow 1's `tf.contrib.mixed_precision`.

They move the loss scale. This module needs TensorFlow only. `next_exponential_state` is the
schedule, the managers hold its state, and `ManagedLossScale` lets a step move it.
"""

import abc
from typing import Any

import tensorflow as tf

from keras_mp.step.loss_scales import LossScale, state_variable
from keras_mp.step.schedule import LARGEST, SMALLEST, LossScaleState, bad_steps_after
from keras_mp.support import host, validation


class LossScaleManager(tf.Module, abc.ABC):
    """Decides how the loss scale moves. Subclass it for a schedule of your own.

    Unlike with a `keras_mp.FixedLossScale`, a step whose gradients are not finite is skipped under
    every manager. It is a `tf.Module`: a `tf.train.Checkpoint` of the optimizer holds the variables
    among its attributes.

    Example:

    >>> class Falling(keras_mp.compat.v1.LossScaleManager):
    ...     def __init__(self):
    ...         self.value = tf.Variable(1024.0, trainable=False)
    ...     def get_loss_scale(self):
    ...         return self.value
    ...     def update_loss_scale(self, finite_grads):
    ...         return self.value.assign(tf.where(finite_grads, self.value, self.value / 2.0))
    >>> sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    >>> optimizer = keras_mp.compat.v1.LossScaleOptimizer(sgd, Falling())
    >>> v = tf.Variable(1.0)
    >>> optimizer.minimize(lambda: v * float("inf"))
    >>> float(optimizer.loss_scale())
    512.0

    Source: TensorFlow 1, `tf.contrib.mixed_precision.LossScaleManager`.
    """

    @abc.abstractmethod
    def get_loss_scale(self) -> Any:
        """Returns the loss scale, a scalar tensor or variable of float32."""

    @abc.abstractmethod
    def update_loss_scale(self, finite_grads: bool | tf.Tensor) -> Any:
        """Moves the loss scale after a step.

        Args:
            finite_grads: bool scalar tensor. Whether the gradients of all replicas were finite.

        Returns:
            In a graph of TensorFlow 1 the operation that moves it; elsewhere nothing is expected.
        """


class FixedLossScaleManager(LossScaleManager):
    """Keeps the loss scale as it is.

    Args:
        loss_scale: int or float, from 2**-126 to 2**126.

    Raises:
        TypeError: `loss_scale` is not a number.
        ValueError: `loss_scale` is out of range.

    Example:

    >>> manager = keras_mp.compat.v1.FixedLossScaleManager(5000)
    >>> float(manager.get_loss_scale())
    5000.0

    Source: TensorFlow 1, `tf.contrib.mixed_precision.FixedLossScaleManager`.
    """

    def __init__(self, loss_scale: float) -> None:
        super().__init__()
        self._loss_scale = validation.number(
            "loss_scale", loss_scale, at_least=SMALLEST, at_most=LARGEST
        )

    def get_loss_scale(self) -> tf.Tensor:
        """Returns the loss scale, a float32 scalar tensor."""
        return tf.constant(self._loss_scale, tf.float32)

    def update_loss_scale(self, finite_grads: bool | tf.Tensor) -> Any:
        """Does nothing.

        Args:
            finite_grads: bool scalar tensor.
        """
        del finite_grads
        return tf.no_op()


def next_exponential_state(
    state: LossScaleState,
    finite: Any,
    *,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int,
    incr_ratio: float,
    decr_ratio: float,
) -> LossScaleState:
    """Returns the next state of an `ExponentialUpdateLossScaleManager`: its schedule.

    ::

        finite:      good steps += 1
                     at incr_every_n_steps good ones: scale *= incr_ratio, unless that is infinite;
                     good steps = bad steps = 0
        not finite:  bad steps += 1, good steps = 0
                     at decr_every_n_nan_or_inf bad ones: scale *= decr_ratio, but not below 1;
                     bad steps = 0

    So good steps are counted in a row, but bad ones are not: a good step does not reset them.

    Args:
        state: LossScaleState before the step.
        finite: bool scalar tensor, or bool. Whether all gradients of the step were finite.
        incr_every_n_steps: int. Good steps after which the scale grows.
        decr_every_n_nan_or_inf: int. Bad steps after which it shrinks.
        incr_ratio: float above 1.
        decr_ratio: float between 0 and 1.

    Returns:
        LossScaleState after the step, of tensors.

    Example:

    >>> from keras_mp.compat import v1
    >>> state = keras_mp.loss_scale.LossScaleState(64.0, num_good_steps=7, num_bad_steps=1)
    >>> after = v1.next_exponential_state(
    ...     state, False, incr_every_n_steps=10, decr_every_n_nan_or_inf=2, incr_ratio=2,
    ...     decr_ratio=0.5)
    >>> float(after.loss_scale), int(after.num_good_steps), int(after.num_bad_steps)
    (32.0, 0, 0)

    Source: TensorFlow 1, `tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager`.
    """
    finite = tf.convert_to_tensor(finite)
    scale = tf.convert_to_tensor(state.loss_scale, tf.float32)
    good = tf.where(finite, state.num_good_steps + 1, 0)
    bad = state.num_bad_steps + tf.where(finite, 0, 1)
    grows = tf.logical_and(finite, good >= incr_every_n_steps)
    shrinks = tf.logical_and(tf.logical_not(finite), bad >= decr_every_n_nan_or_inf)
    grown = scale * incr_ratio
    shrunk = tf.maximum(scale * decr_ratio, tf.minimum(scale, 1.0))
    moved = tf.where(tf.logical_and(grows, tf.math.is_finite(grown)), grown, scale)
    ends = tf.logical_or(grows, shrinks)
    return LossScaleState(
        tf.where(shrinks, shrunk, moved), tf.where(ends, 0, good), tf.where(ends, 0, bad)
    )


class ExponentialUpdateLossScaleManager(LossScaleManager):
    """Moves the loss scale by factors: up after good steps, down after bad ones.

    The exact rules are the pure function `keras_mp.compat.v1.next_exponential_state`. Its variables
    have the names and dtypes that they had in TensorFlow 1, so checkpoints of that time load.

    Args:
        init_loss_scale: int or float, from 2**-126 to 2**126. Where the scale starts.
        incr_every_n_steps: int, at least 1. Good steps in a row after which the scale grows.
        decr_every_n_nan_or_inf: int, at least 1. Bad steps after which it shrinks; good ones may
            lie between. Defaults to 2.
        incr_ratio: int or float above 1. The factor by which it grows. Defaults to 2.
        decr_ratio: float between 0 and 1. The factor by which it shrinks, not below 1. Defaults to
            0.8.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range.

    Example:

    >>> manager = keras_mp.compat.v1.ExponentialUpdateLossScaleManager(1000, 2000)
    >>> manager.update_loss_scale(tf.constant(False))
    >>> manager.update_loss_scale(tf.constant(False))
    >>> float(manager.get_loss_scale())
    800.0

    Source: TensorFlow 1, `tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager`.
    """

    def __init__(
        self,
        init_loss_scale: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2,
        decr_ratio: float = 0.8,
    ) -> None:
        super().__init__()
        initial = validation.number(
            "init_loss_scale", init_loss_scale, at_least=SMALLEST, at_most=LARGEST
        )
        self._incr_every_n_steps = validation.integer(
            "incr_every_n_steps", incr_every_n_steps, below=2**31
        )
        self._decr_every_n_nan_or_inf = validation.integer(
            "decr_every_n_nan_or_inf", decr_every_n_nan_or_inf, below=2**31
        )
        self._incr_ratio = validation.number("incr_ratio", incr_ratio, above=1)
        self._decr_ratio = validation.number("decr_ratio", decr_ratio, above=0, below=1)
        self.loss_scale = state_variable(initial, tf.float32, "loss_scale")
        self.good_steps = state_variable(0, tf.int32, "good_steps")
        self.bad_steps = state_variable(0, tf.int32, "bad_steps")

    def get_loss_scale(self) -> tf.Variable:
        """Returns the loss scale, a float32 scalar variable."""
        return self.loss_scale

    def update_loss_scale(self, finite_grads: bool | tf.Tensor) -> Any:
        """Moves the loss scale after a step.

        Args:
            finite_grads: bool scalar tensor, or bool.

        Returns:
            In a graph of TensorFlow 1 the operation that moves it, else None.
        """
        before = LossScaleState(*map(tf.convert_to_tensor, self._state()))
        after = next_exponential_state(
            before,
            finite_grads,
            incr_every_n_steps=self._incr_every_n_steps,
            decr_every_n_nan_or_inf=self._decr_every_n_nan_or_inf,
            incr_ratio=self._incr_ratio,
            decr_ratio=self._decr_ratio,
        )
        moved = [
            variable.assign(value, read_value=False)
            for variable, value in zip(self._state(), after, strict=True)
        ]
        return tf.group(*moved) if host.in_v1_graph() else None

    def _state(self) -> LossScaleState:
        return LossScaleState(self.loss_scale, self.good_steps, self.bad_steps)


class ManagedLossScale(LossScale):
    """The loss scale of a manager, which a step moves.

    Attributes:
        num_bad_steps: int64 variable, the number of steps skipped in a row.

    Args:
        manager: `LossScaleManager`.

    Example:

    >>> manager = keras_mp.compat.v1.FixedLossScaleManager(128)
    >>> keras_mp.compat.v1.ManagedLossScale(manager)()
    <tf.Tensor: shape=(), dtype=float32, numpy=128.0>
    """

    moves = True

    def __init__(self, manager: LossScaleManager) -> None:
        super().__init__(name="managed_loss_scale")
        self._manager = manager
        self.num_bad_steps = state_variable(0, tf.int64, "steps_skipped_in_a_row")

    @property
    def manager(self) -> LossScaleManager:
        """The manager."""
        return self._manager

    def __call__(self) -> tf.Tensor:
        """Returns the current scale, a float32 scalar tensor."""
        return tf.cast(self._manager.get_loss_scale(), tf.float32)

    def move(
        self,
        finite: bool | tf.Tensor,
        loss_is_finite: bool | tf.Tensor = False,
        when: bool | tf.Tensor = True,
    ) -> list[Any]:
        """Lets the manager move the scale, as a step does.

        Args:
            finite: bool, or bool scalar tensor. Whether all gradients were finite.
            loss_is_finite: not used.
            when: bool, or bool scalar tensor. If it is False, nothing is moved. Defaults to True.

        Returns:
            list of operations.
        """
        del loss_is_finite
        operations: list[Any] = []

        def move() -> None:
            operations.append(self._manager.update_loss_scale(tf.convert_to_tensor(finite)))
            num_bad_steps = bad_steps_after(self.num_bad_steps, finite)
            operations.append(self.num_bad_steps.assign(num_bad_steps, read_value=False))

        if when is True:
            move()
        else:  # the manager assigns by itself
            tf.cond(when, move, lambda: None)
            operations.clear()  # They may be those of a branch.
        return [each for each in operations if each is not None]

    def get_config(self) -> dict[str, Any]:
        """Returns `{"manager": ...}`."""
        return {"manager": self._manager}
