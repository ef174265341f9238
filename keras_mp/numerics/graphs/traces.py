"""Traces a training step of a model, or any function, without running it."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.models.layer_paths import layers_by_path
from keras_mp.numerics import watching
from keras_mp.numerics.batches import Batch

_OTHER_REPLICA = re.compile(r"(^|/)replica_[1-9]\d*/")


def trains(model: tf.keras.Model) -> bool:
    """Whether a model was compiled with an optimizer, so that it has a training step."""
    return getattr(model, "optimizer", None) is not None


def name_of_step(model: tf.keras.Model) -> str:
    """Returns a name for the step that `step_of` traces."""
    step = "the training step" if trains(model) else "the forward pass"
    return f"{step} of {model.name!r}"


def step_of(
    model: tf.keras.Model,
    batch: Batch,
    scopes: dict[str, str],
    inspect: Callable[[Any, Batch], object] | None = None,
    forward_only: bool = False,
) -> tf.types.experimental.ConcreteFunction:
    """Traces the training step of a compiled model, or the forward pass of another one.

    It is the model's own `train_step`, under its strategy, without XLA. Nothing runs; weights and
    slots that are not there yet are made, as `fit` makes them.

    Args:
        model: a model of `tf.keras`.
        batch: Batch.
        scopes: filled with the scopes of the graph in which layers are called, each with the path
            of the layer, which is "" for the model.
        inspect: called in the graph, with the results of the step and the batch that it takes, when
            the step is complete. The function returns what it returns.
        forward_only: bool. Whether it is the forward pass in any case.

    Returns:
        `tf.types.experimental.ConcreteFunction` of `batch.data`.
    """

    def note(path: str, output: tf.Tensor, arguments: object) -> tf.Tensor:
        if scope := tf.get_current_name_scope():
            # A layer that calls `call` of another one, in its own scope, returns after it.
            scopes[scope] = path
        return output

    def run(data: tuple[Any, ...]) -> object:
        # In the thread of a replica, which is that of its layers' calls.
        with watching.watching_outputs({"": model, **layers_by_path(model)}, note):
            if forward_only or not trains(model):
                return model(data[0], training=True)
            return model.train_step(data)

    strategy = model.distribute_strategy
    is_distributed = strategy.num_replicas_in_sync > 1
    optimizer = getattr(model, "optimizer", None)
    build = getattr(optimizer, "build", None)
    if model.built and build and not getattr(optimizer, "built", False):
        with strategy.scope():
            build(model.trainable_variables)

    @tf.function
    def step(data: tuple[Any, ...]) -> object:
        scopes.clear()  # They may be those of an earlier trace, in which variables were made.
        result = strategy.run(run, args=(data,)) if is_distributed else run(data)
        return result if inspect is None else inspect(result, Batch(*data))

    with np.errstate(over="ignore"):  # NumPy warns of a constant that 16 bits do not hold.
        return step.get_concrete_function(batch.data)


def function_of(
    function: Callable[..., object], *args: Any, **kwargs: Any
) -> tf.types.experimental.ConcreteFunction:
    """Traces a function, without running it.

    Args:
        function: `ConcreteFunction`, `tf.function`, or any callable.
        *args: arguments or `tf.TensorSpec`s, for what is not traced yet.
        **kwargs: the same.

    Returns:
        `tf.types.experimental.ConcreteFunction`.

    Raises:
        TypeError: it cannot be called.
    """
    if isinstance(function, tf.types.experimental.ConcreteFunction):
        return function
    if not callable(function):
        raise TypeError(
            "Expected a model of `tf.keras`, a concrete function, a `tf.function` or another "
            f"callable. Received: {function!r} (of type {type(function)})"
        )
    if not hasattr(function, "get_concrete_function"):
        function = tf.function(function)
    return function.get_concrete_function(*args, **kwargs)


def is_first_replica(name: str) -> bool:
    """Whether an operation belongs to the first replica, or to no replica."""
    return _OTHER_REPLICA.search(name) is None
