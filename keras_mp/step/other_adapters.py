"""The adapters for optimizers of TensorFlow 1, for Sonnet's, and for functions."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import replicas
from keras_mp.step.optimizer_adapter import Applied, OptimizerAdapter, Pairs
from keras_mp.support import host
from keras_mp.support.autograph import allow_conversion


def other_adapter(optimizer: Any) -> OptimizerAdapter | None:
    """Returns the adapter of an object that is not an optimizer of Keras.

    Args:
        optimizer: A `tf.compat.v1.train.Optimizer`, an object with a method `apply(updates,
            parameters)`, or a function that takes the list of (gradient, variable) pairs.

    Returns:
        An `OptimizerAdapter`, or None for anything else.
    """
    if isinstance(optimizer, type):
        return None
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return V1Optimizer(optimizer)
    if callable(getattr(optimizer, "apply", None)):
        # Like the `apply` of Sonnet's optimizers, this one takes two lists.
        of_lists = allow_conversion(optimizer.apply)
        return Function(optimizer, lambda pairs: of_lists(*map(list, zip(*pairs))))
    return Function(optimizer, allow_conversion(optimizer)) if callable(optimizer) else None


class V1Optimizer(OptimizerAdapter):
    """The adapter for `tf.compat.v1.train.Optimizer`, also in graphs of TensorFlow 1.

    Args:
        optimizer: The `tf.compat.v1.train.Optimizer`.
        global_step: variable that each step increments, unless it is skipped; or None.
    """

    def __init__(self, optimizer: Any, global_step: tf.Variable | None = None) -> None:
        super().__init__(optimizer)
        self._global_step = global_step

    def build(self, variables: Sequence[Any]) -> None:
        # If Python runs along with the step, `apply` makes the slots. A graph of TensorFlow 1 would
        # name slots after the branch in which they are made, and each replica would make its own.
        def make_slots() -> None:
            with tf.init_scope():
                self.optimizer._create_slots(list(variables))

        if host.in_v1_graph() or not replicas.need_not_meet():
            replicas.once_for_all_replicas(make_slots)

    def apply(self, grads_and_vars: Pairs, name: str | None, aggregate: bool) -> Applied:
        # A user's subclass that overrides the method may not take the argument.
        is_summed = tf.distribute.has_strategy() and not aggregate
        summed = {"skip_gradients_aggregation": True} if is_summed else {}
        return self.optimizer.apply_gradients(
            grads_and_vars, global_step=self._global_step, name=name, **summed
        )


class Function(OptimizerAdapter):
    """The adapter for a function that applies gradients, or an object that has one.

    Args:
        optimizer: The function, or the object.
        apply: takes the list of (gradient, variable) pairs.
    """

    def __init__(self, optimizer: Any, apply: Callable[[list[tuple[Any, Any]]], Applied]) -> None:
        super().__init__(optimizer)
        self._apply = apply

    def apply(self, grads_and_vars: Pairs, name: str | None, aggregate: bool) -> Applied:
        del name, aggregate
        return self._apply(list(grads_and_vars))
