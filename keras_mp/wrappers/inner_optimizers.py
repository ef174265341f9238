"""Optimizers inside of others: which there are, and how a wrapper calls one."""

import operator
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.step.optimizer_adapter import Applied, DelegatingAdapter, OptimizerAdapter, Pairs
from keras_mp.wrappers.scaler_properties import ScalerProperties


class WrapperAdapter(DelegatingAdapter):
    """A wrapper that is wrapped itself.

    Args:
        wrapper: An `OptimizerWrapper`.
    """

    # The wrapper saves the variables that Keras does not save.
    is_saved_by_keras = True

    def __init__(self, wrapper: tf.keras.optimizers.Optimizer) -> None:
        super().__init__(wrapper, wrapper._adapter)

    only_differentiates = property(
        lambda self: self._is_ours("compute_gradients") and self._inner.only_differentiates
    )
    overrides_minimize = property(lambda self: not self._is_ours("minimize"))

    def _is_ours(self, method: str) -> bool:
        return (getattr(type(self.optimizer), method).__module__ or "").startswith("keras_mp.")

    def hyperparameters(self) -> frozenset[str]:
        return self.optimizer._delegated

    def apply(self, grads_and_vars: Pairs, name: str | None, aggregate: bool) -> Applied:
        return self.optimizer.apply_gradients(
            grads_and_vars, name=name, skip_gradients_aggregation=not aggregate
        )


for _name in ("build", "compute_gradients"):
    setattr(WrapperAdapter, _name, property(operator.attrgetter(f"optimizer.{_name}")))


def chain(optimizer: tf.keras.optimizers.Optimizer | None) -> Iterator[Any]:
    """Yields an optimizer, then its inner optimizer, and so on.

    Args:
        optimizer: An optimizer of `tf.keras`, or None, which yields nothing.
    """
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def find_loss_scale_optimizer(optimizer: tf.keras.optimizers.Optimizer | None) -> Any:
    """Finds the optimizer that scales the loss, among one and those that it wraps.

    Args:
        optimizer: An optimizer of `tf.keras`, or None.

    Returns:
        A `LossScaleOptimizer`, ours or Keras's own, or None.
    """
    scaling = (o for o in chain(optimizer) if isinstance(o, keras_api.KerasLossScaleOptimizer))
    return next(scaling, None)


def adapter_of(optimizer: Any, takes_others: bool = False) -> OptimizerAdapter:
    """Returns the adapter of an optimizer of `tf.keras`, or of a wrapper of one.

    Args:
        optimizer: Any.
        takes_others: bool. Whether the optimizer may also be one that is not of Keras, or a
            function. Defaults to False.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(getattr(optimizer, "_adapter", None), OptimizerAdapter):
        return WrapperAdapter(optimizer)
    adapter, root = keras_api.optimizer_adapter(optimizer), keras_api.ROOT_PACKAGE
    is_of_other = type(optimizer).__module__.partition(".")[0] == keras_api.OTHER_PACKAGE
    if adapter is None and takes_others and not is_of_other:
        from keras_mp.step.other_adapters import other_adapter

        adapter = other_adapter(optimizer)
    if adapter is None:
        others = (
            "a tf.compat.v1.train.Optimizer, an object with a method `apply(updates, parameters)`, "
            "a function of a list of (gradient, variable) pairs, or "
        )
        hint = f". To use one of {keras_api.OTHER_PACKAGE}, {keras_api.switch_hint()}"
        raise TypeError(
            f"Expected {others if takes_others else ''}an optimizer of `tf.keras`, which is {root} "
            f"in this process{hint if is_of_other else ''}. Received: "
            f"{'' if takes_others else 'inner_'}optimizer={optimizer!r} (of type {type(optimizer)})"
        )
    return adapter


def has_all_reduce(optimizer: Any) -> bool:
    """Whether an optimizer is an `AllReduceOptimizer` or the like, or wraps one.

    Args:
        optimizer: An optimizer of `tf.keras`, or anything else.
    """
    wrappers = (each for each in chain(optimizer) if hasattr(each, "inner_optimizer"))
    return any(vars(each).get("_reduce_dtype") is not None for each in wrappers)


def refuse_second(optimizer: Any, user: str) -> None:
    """Refuses an optimizer that scales losses or sums gradients a second time.

    Args:
        optimizer: An optimizer of `tf.keras`, or anything else.
        user: str. The name of the other object's class.

    Raises:
        TypeError: `optimizer` scales the loss or has a `reduce_dtype`, or wraps one that does.
    """
    of_tensorflow = tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    kinds = (keras_api.KerasLossScaleOptimizer, ScalerProperties, of_tensorflow)
    if has_all_reduce(optimizer) or any(isinstance(each, kinds) for each in chain(optimizer)):
        raise TypeError(
            f"The {user} scales the loss or sums gradients over replicas, and so does this "
            "optimizer, or one inside of it: that would be done twice. Use the one that you have, "
            "or its `inner_optimizer`. Pass `reduce_dtype` to the one that scales the loss, or "
            f"else to the outer one. Received: optimizer={optimizer!r}"
        )
