"""What a step asks of what applies its gradients, and what a wrapper asks of the optimizer inside.

The optimizers of `tf.keras` answer in `keras_api`, all else in `update_rules`.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class UpdateRule(abc.ABC):
    """How a step has gradients applied.

    Args:
        optimizer: What applies them.

    Attributes:
        is_scaling_safe: Does it take scaled gradients and the verdict, in `apply_scaled`, and skip
            a step by itself?
        takes_float32_gradients: Are gradients in 16 bits cast to float32 before they are unscaled,
            so that small ones stay?
    """

    is_scaling_safe = False
    takes_float32_gradients = False

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the optimizer's variables, outside of any function that is being traced."""
        del variables

    def custom_aggregation(self) -> Callable[[list[tuple[Any, Any]]], list[tuple[Any, Any]]] | None:
        """The user's own way of reducing (gradient, variable) pairs, or None."""
        return None

    @abc.abstractmethod
    def apply(
        self, grads_and_vars: Sequence[tuple[Any, Any]], name: str | None, aggregate: bool
    ) -> Any:
        """Lets the optimizer clip, decay and apply; `aggregate` says whether it reduces first."""

    def apply_scaled(
        self, grads_and_vars: Sequence[tuple[Any, Any]], loss_scale: tf.Tensor, finite: tf.Tensor
    ) -> Any:
        """Lets a scaling-safe optimizer make or skip the step."""
        raise NotImplementedError

    def accumulates(self) -> bool:
        """Is a step made of the gradients of several calls of `apply`?"""
        return False

    def completes_step(self) -> tf.Tensor:
        """Are the next gradients the last of a step? A bool scalar."""
        return tf.constant(True)

    def totals(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> Sequence[tuple[Any, Any]]:
        """What a step would be made of: gradients with what was accumulated before them.

        After the pairs that are given come those of which only something was accumulated.
        """
        return grads_and_vars

    def steps_made(self) -> tf.Tensor | None:
        """How many steps were made so far, an int64 scalar, or None where nobody counts them."""
        return None

    def drop_accumulated(self) -> None:
        """Forgets what was accumulated, in the place of the gradients that complete a step."""
        return

    def is_overwritten(self, variable: Any) -> bool:
        """Is what comes as the variable's gradient its new value?"""
        del variable
        return False


class OptimizerAdapter(UpdateRule):
    """How the optimizers of one family are driven by a wrapper.

    Args:
        optimizer: The optimizer that is driven.

    Attributes:
        is_revived_without_state: Does a model that is loaded from a SavedModel have new slots?
        is_saved_by_keras: Does Keras save its variables, in `.keras` and in `.weights.h5` files?
    """

    is_revived_without_state = False
    is_saved_by_keras = True

    def hyperparameters(self) -> frozenset[str]:
        """Names of the attributes that a wrapper reads and writes on the optimizer."""
        try:
            with tf.init_scope():
                names = self.optimizer.get_config().keys() - {"name", "is_legacy_optimizer"}
        except NotImplementedError:
            names = {"learning_rate"}
        return frozenset(name for name in names if hasattr(self.optimizer, name))

    def steps_made(self) -> tf.Tensor | None:
        """What the optimizer's `iterations` say."""
        return tf.cast(tf.convert_to_tensor(self.optimizer.iterations), tf.int64)

    def built_variables(self) -> Sequence[Any]:
        """The variables that the optimizer was built with, where it can tell."""
        raise ValueError(
            "Pass the variables together with the gradients. "
            f"Received: trainable_variables=None for {type(self.optimizer)}"
        )

    @abc.abstractmethod
    def compute_gradients(
        self,
        loss: Any,
        var_list: Any,
        tape: tf.GradientTape | None,
        grad_loss: tf.Tensor | None,
    ) -> list[tuple[Any, Any]]:
        """The first half of `minimize`: a list of (gradient, variable) pairs."""
