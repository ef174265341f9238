"""The interface by which a step calls an optimizer.

The adapters for optimizers of `tf.keras` are in `keras_api`, most others in `other_adapters`.
"""

import abc
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import gradients
from keras_mp.step.compiled_update import CompiledUpdates, Pairs
from keras_mp.support import host
from keras_mp.support.dtypes import LOW_PRECISION

Loss = tf.Tensor | Callable[[], tf.Tensor]
VarList = tf.Variable | Iterable[Any] | Callable[[], Any]
# The result of applying gradients. Only TensorFlow 1 has to run an operation.
Applied = tf.Operation | tf.Variable | None


class OptimizerAdapter(abc.ABC):
    """Calls an optimizer, or another object that applies gradients.

    A subclass has to override `apply` only. The other methods and attributes describe the
    optimizer to a step and to wrappers; the defaults fit most optimizers.

    Args:
        optimizer: The optimizer, or another object that applies gradients.

    Attributes:
        unscales_and_skips: Whether `update` takes scaled gradients and the verdicts, and skips a
            step by itself.
        takes_float32_gradients: Whether gradients in 16 bits are cast to float32 before they are
            unscaled, so that small ones stay.
        is_revived_without_state: Whether a model that is loaded from a SavedModel has new slots.
        is_saved_by_keras: Whether Keras saves its variables, in `.keras` and `.weights.h5` files.
        jit_compile: Whether XLA compiles the update, as one function.
        only_differentiates: Whether gradients of a scaled loss are the gradients times the scale.
            They are not if the optimizer clips the gradient of each example as it computes them.
        overrides_minimize: Whether the optimizer does something of its own in `minimize`.
    """

    unscales_and_skips = False
    takes_float32_gradients = False
    is_revived_without_state = False
    is_saved_by_keras = True
    jit_compile = False
    only_differentiates = True
    overrides_minimize = False

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def hyperparameters(self) -> frozenset[str]:
        """Returns the names of the attributes that a wrapper reads and writes on the optimizer."""
        try:
            with tf.init_scope():
                names = self.optimizer.get_config().keys() - {"name", "is_legacy_optimizer"}
        except NotImplementedError:
            names = {"learning_rate"}
        return frozenset(name for name in names if hasattr(self.optimizer, name))

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the optimizer's variables, outside of any function that is being traced."""
        del variables

    def built_variables(self) -> Sequence[Any]:
        """Returns the variables that the optimizer was built with; a ValueError if unknown."""
        raise ValueError(
            "Pass the variables together with the gradients. "
            f"Received: trainable_variables=None for {type(self.optimizer)}"
        )

    def compute_gradients(
        self,
        loss: Loss,
        var_list: VarList,
        tape: tf.GradientTape | None,
        grad_loss: tf.Tensor | None,
    ) -> list[tuple[Any, Any]]:
        """Returns (gradient, variable) pairs: the first half of `minimize`."""
        del loss, var_list, tape, grad_loss
        raise TypeError(f"Compute the gradients with a tape. Received: {self.optimizer!r}")

    def custom_aggregation(self) -> Callable[[list[tuple[Any, Any]]], Pairs] | None:
        """Returns the user's function that reduces (gradient, variable) pairs, or None."""
        return None

    @abc.abstractmethod
    def apply(self, grads_and_vars: Pairs, name: str | None, aggregate: bool) -> Applied:
        """Lets the optimizer clip, decay and apply; with `aggregate` it reduces first."""

    @functools.cached_property
    def _compiled(self) -> CompiledUpdates:
        return CompiledUpdates(self.optimizer, self.hyperparameters())

    def update(
        self,
        grads_and_vars: Pairs,
        name: str | None,
        *,
        divisor: tf.Tensor | None = None,
        verdicts: Sequence[tf.Tensor] = (),
    ) -> Applied:
        """Lets the optimizer apply summed gradients; with `jit_compile`, XLA compiles this.

        Args:
            grads_and_vars: sequence of (gradient, variable) pairs.
            name: str. Name of the operation.
            divisor: float32 scalar tensor. The number that unscales the gradients. Defaults to
                None, for unscaled ones.
            verdicts: bool scalar tensors. An optimizer that skips steps by itself makes the step
                if all are True.

        Returns:
            The result of `apply`; of a compiled update, the optimizer's count of steps.
        """
        del verdicts

        def apply(pairs: Pairs) -> Applied:
            return self.apply(pairs, name, aggregate=False)

        if self.jit_compile and not host.is_compiled_by_xla():
            self.build([variable for _, variable in grads_and_vars])
            if self._compiled.make(apply, grads_and_vars, divisor):
                return getattr(self.optimizer, "iterations", None)
        if divisor is not None:
            unscaled = gradients.unscale([g for g, _ in grads_and_vars], divisor)
            grads_and_vars = list(zip(unscaled, (v for _, v in grads_and_vars), strict=True))
        return apply(grads_and_vars)

    def widened(self, grads: list[gradients.Gradient]) -> list[gradients.Gradient]:
        """Casts gradients to float32 if the optimizer takes it: unscaled, small ones stay."""
        if not self.takes_float32_gradients:
            return grads
        return gradients.cast(grads, LOW_PRECISION, tf.float32)

    def accumulates(self) -> bool:
        """Whether a step is made of the gradients of several calls of `apply`."""
        return False

    def completes_step(self) -> tf.Tensor:
        """Whether the next gradients are the last of a step, a bool scalar tensor."""
        return tf.constant(True)

    def totals(self, grads_and_vars: Pairs) -> Pairs:
        """Returns the gradients of a whole step: those given plus those accumulated before.

        The given pairs come first, then those of variables with accumulated gradients only.
        """
        return grads_and_vars

    def steps_made(self) -> tf.Tensor | None:
        """Returns the number of steps made so far, an int64 scalar; None if it is not counted."""
        iterations = getattr(self.optimizer, "iterations", None)
        return None if iterations is None else tf.cast(tf.convert_to_tensor(iterations), tf.int64)

    def drop_accumulated(self) -> None:
        """Drops accumulated gradients, in place of applying those that complete a step."""
        return

    def is_overwritten(self, variable: tf.Variable) -> bool:
        """Whether the gradient of the variable is its new value instead."""
        del variable
        return False


class DelegatingAdapter(OptimizerAdapter):
    """An adapter around another one, to which it delegates unless a subclass overrides.

    Args:
        optimizer: The optimizer.
        inner: The other adapter.
    """

    def __init__(self, optimizer: Any, inner: OptimizerAdapter) -> None:
        super().__init__(optimizer)
        self._inner = inner


for _name in (
    *("is_revived_without_state", "is_saved_by_keras"),
    *("takes_float32_gradients", "only_differentiates", "hyperparameters"),
    *("built_variables", "compute_gradients", "custom_aggregation", "steps_made"),
    *("accumulates", "completes_step", "totals", "drop_accumulated", "is_overwritten"),
):
    setattr(DelegatingAdapter, _name, property(operator.attrgetter(f"_inner.{_name}")))
