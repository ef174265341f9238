"""What both Kerases offer to the rest of keras_mp.

Each of `keras2` and `keras3` defines:

- `BaseCallback`: `tf.keras`'s own callback, which `RunsFirst`. No batch is waited for because it is
  there. What `put_in_logs` names, it adds to logs; progress bars show that as it is.
- `BaseLayer`: `tf.keras`'s own layer, but its inputs are not cast, and `add_weight` takes the name
  of arguments only, of which `autocast` must be there, and makes `AutoCastVariable`s.
- `BaseLoss`: `tf.keras`'s own loss, with a `dtype` that is a str, and `reduce(y_true, y_pred,
  sample_weight)`, which is what the stock `__call__` does but passes labels to `call` as they are.
- `BasePolicy`: `tf.keras`'s own dtype policy class.
- `init_base_policy(policy, name)`: what a subclass of it calls first.
- `LossFunctionWrapper`: the loss that computes a function.
- `StockLossScaleOptimizer`: `tf.keras.mixed_precision.LossScaleOptimizer`.
- `OPTIMIZER_BASES`: the classes that Keras takes for an optimizer.
- `CROSSENTROPY_NAMES`: what `compile(loss=)` takes for the cross entropy that fits the shapes.
- `COMPILE_OWNER`: the class on which `Model.compile` is defined.
- `APPLY_TAKES_SCALED_GRADIENTS`: does the stock wrapper's `apply_gradients` unscale?
- `arguments_of_loss(loss)`: with which arguments a built-in loss was made.
- `autocast_dtype()`: the dtype that `tf.keras` casts variables to in this thread, or None.
- `autocast_scope(dtype)`: context manager that sets it.
- `autocast_variables(weights)`: the `AutoCastVariable`s among the weights of a layer, or in them.
- `compile_without_wrapping(compile, call)`: stock compile with bound arguments, no stock wrapper.
- `flatten_layers(model)`: the model and all layers below it.
- `layers_inside(layer)`: those right below it.
- `output_layers(model)`: the layers that make a model's outputs, or None where nothing tells.
- `is_symbolic()`: does Keras only ask for shapes?
- `is_weight(value)`: is it what layers of `tf.keras` have as weights?
- `widen_predictions(model)`: lets the metrics of a compiled model see predictions in float32, and
  keeps labels from being narrowed to the predictions' dtype before our losses see them.
- `why_fit_fails()`: why `Model.fit` cannot work under the current strategy, or None.
- `get_global_policy()`, `set_global_policy(policy)`: `tf.keras`'s global policy; None is floatx.
- `thread_missed_global_policy()`: do stock layers of this thread not know the global policy?
- `trusted_scope()`: context manager in which layers are made of configs that hold code, too.
- `tracks_floatx()`: does the global policy follow floatx?
- `get_optimizer(identifier)`: instance, name or config to optimizer.
- `optimizer_family(optimizer)`: the `OptimizerFamily` of an optimizer, or None.
- `register_serializable`: decorator.
- `serialize_optimizer`, `deserialize_optimizer`.
"""

import abc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class RunsFirst:
    """Puts a callback before all others: each sees in `logs` what those before it have added.

    Keras runs callbacks in the order in which the user listed them, and never shows that list to
    them. It is the list that sets the model, so it is found one call further up.
    """

    def set_model(self, model: Any) -> None:
        """Sets the model, and moves this callback to the front.

        Args:
            model: model of `tf.keras`.
        """
        super().set_model(model)
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, tf.keras.callbacks.CallbackList):
            self._move_to_front(caller.callbacks)

    def _move_to_front(self, callbacks: list[Any]) -> None:
        callbacks.remove(self)
        callbacks.insert(0, self)


class OptimizerFamily(abc.ABC):
    """How the optimizers of one family are driven by a wrapper.

    Args:
        optimizer: The optimizer that is driven.

    Attributes:
        fits_into_saved_model: Could a SavedModel that holds it and its wrapper be loaded again?
    """

    fits_into_saved_model = True

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def hyperparameters(self) -> frozenset[str]:
        """Names of the attributes that a wrapper reads and writes on the optimizer."""
        try:
            with tf.init_scope():
                names = self.optimizer.get_config().keys() - {"name", "is_legacy_optimizer"}
        except NotImplementedError:
            names = {"learning_rate"}
        return frozenset(name for name in names if hasattr(self.optimizer, name))

    @abc.abstractmethod
    def build(self, variables: Sequence[Any]) -> None:
        """Creates the optimizer's variables, outside of any function that is being traced."""

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

    @abc.abstractmethod
    def custom_aggregation(self) -> Callable[[list[tuple[Any, Any]]], list[tuple[Any, Any]]] | None:
        """The user's own way of reducing (gradient, variable) pairs, or None."""

    @abc.abstractmethod
    def apply(
        self, grads_and_vars: Sequence[tuple[Any, Any]], name: str | None, aggregate: bool
    ) -> Any:
        """Lets the optimizer clip, decay and apply; `aggregate` says whether it reduces first."""

    def accumulates(self) -> bool:
        """Is a step made of the gradients of several calls of `apply`?"""
        return False

    def completes_step(self) -> tf.Tensor:
        """Are the next gradients the last of a step? A bool scalar."""
        return tf.constant(True)

    def totals(self, grads: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
        """What a step would be made of: gradients, and what was accumulated before them."""
        del variables
        return grads

    def drop_accumulated(self) -> None:
        """Forgets what was accumulated, in the place of the gradients that complete a step."""
        return

    def is_overwritten(self, variable: Any) -> bool:
        """Is what comes as the variable's gradient its new value?"""
        del variable
        return False
