"""The interface by which a step calls an optimizer.

The adapters for optimizers of `tf.keras` are in `keras_api`, those for others in `other_adapters`.
"""

import abc
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

Pairs = Sequence[tuple[Any, Any]]
Loss = tf.Tensor | Callable[[], tf.Tensor]
Tape = tf.GradientTape | None
VarList = tf.Variable | Iterable[Any] | Callable[[], Any]
# The result of applying gradients. Only TensorFlow 1 has to run an operation.
Applied = tf.Operation | tf.Variable | None


class OptimizerAdapter(abc.ABC):
    """Calls an optimizer, or another object that applies gradients.

    A subclass only has to override `apply`. The other methods and attributes describe the optimizer
    to a step and to wrappers; the defaults fit most optimizers.

    Args:
        optimizer: The optimizer, or another object that applies gradients.

    Attributes:
        takes_float32_gradients: Whether gradients in 16 bits are cast to float32 before they are
            unscaled, so that small ones are not lost.
        is_revived_without_state: Whether a model that is loaded from a SavedModel starts with new
            slots.
        is_saved_by_keras: Whether Keras saves the optimizer's variables, in `.keras` and
            `.weights.h5` files.
        only_differentiates: Whether the gradients of a scaled loss are the gradients times the
            scale. They are not if the optimizer clips the gradient of each example while it
            computes them.
        overrides_minimize: Whether the optimizer does more in `minimize` than other optimizers do.
        compute_gradients: The first half of `minimize`, of an optimizer of `tf.keras`: a function
            of `loss`, `var_list`, `tape` and `grad_loss` that returns (gradient, variable) pairs.
    """

    takes_float32_gradients = False
    is_revived_without_state = False
    is_saved_by_keras = True
    only_differentiates = True
    overrides_minimize = False
    compute_gradients: Any = None
    # What counts steps in TensorFlow 1.
    _global_step: Any = None

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def hyperparameters(self) -> frozenset[str]:
        """Returns the names of the attributes that a wrapper takes from the optimizer.

        The wrapper reads and writes them on the optimizer.
        """
        try:
            with tf.init_scope():
                names = self.optimizer.get_config().keys() - {"name", "is_legacy_optimizer"}
        except NotImplementedError:
            names = {"learning_rate"}
        return frozenset(name for name in names if hasattr(self.optimizer, name))

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the optimizer's variables, outside of any function being traced."""
        del variables

    def built_variables(self) -> Sequence[Any]:
        """Returns the variables that the optimizer was built with.

        Raises a ValueError if they are unknown.
        """
        raise ValueError(
            "Pass the variables together with the gradients. "
            f"Received: trainable_variables=None for {type(self.optimizer)}"
        )

    def custom_aggregation(self) -> Callable[[list[tuple[Any, Any]]], Pairs] | None:
        """Returns the user's function that reduces (gradient, variable) pairs, or None."""
        return None

    @abc.abstractmethod
    def apply(self, grads_and_vars: Pairs, name: str | None, aggregate: bool) -> Applied:
        """Lets the optimizer clip, decay and apply.

        With `aggregate`, the optimizer reduces the gradients first.
        """

    def completes_step(self) -> tf.Tensor | None:
        """Whether the next gradients are the last of a step, a bool scalar tensor.

        It is None unless the gradients of several calls of `apply` make up one step.
        """
        return None

    def totals(self, grads_and_vars: Pairs) -> Pairs:
        """Returns the gradients of a whole step.

        They are the given gradients plus those that were accumulated before. The given pairs come
        first, then those of variables that only have accumulated gradients.
        """
        return grads_and_vars

    def steps_made(self) -> tf.Tensor | None:
        """Returns the number of steps made so far; None if they are not counted.

        It is an int64 scalar.
        """
        counter = getattr(self.optimizer, "iterations", self._global_step)
        return None if counter is None else tf.cast(tf.convert_to_tensor(counter), tf.int64)

    def drop_accumulated(self) -> None:
        """Drops accumulated gradients instead of applying them when a step is complete."""
        return

    def is_overwritten(self, variable: tf.Variable) -> bool:
        """Whether the "gradient" of a variable is in fact its new value."""
        del variable
        return False


class DelegatingAdapter(OptimizerAdapter):
    """An adapter around another one.

    It delegates to the other one whatever a subclass does not override.

    Args:
        optimizer: The optimizer.
        inner: The other adapter.
    """

    def __init__(self, optimizer: Any, inner: OptimizerAdapter) -> None:
        super().__init__(optimizer)
        self._inner = inner


# What it, or a subclass of it, does itself.
_ITSELF = {"apply", "build", "overrides_minimize"}
for _name in vars(OptimizerAdapter).keys() - _ITSELF:
    if not _name.startswith("_"):
        setattr(DelegatingAdapter, _name, property(operator.attrgetter(f"_inner.{_name}")))
