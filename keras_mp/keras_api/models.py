"""Layers, models, losses and policies of the Keras that `tf.keras` is."""

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.keras_api import ROOT_PACKAGE
from keras_mp.support import features

if TYPE_CHECKING or ROOT_PACKAGE == "keras":
    from keras_mp.keras_api.keras3 import *
    from keras_mp.keras_api.keras3_layers import *
    from keras_mp.keras_api.keras3_policies import *
    from keras_mp.keras_api.keras3_saving import *
    from keras_mp.keras_api.keras3_workers import *
else:
    from keras_mp.keras_api.keras2 import *
    from keras_mp.keras_api.keras2_layers import *
    from keras_mp.keras_api.keras2_policies import *
    from keras_mp.keras_api.keras2_saving import *

# The loss that computes a function. The class is in no public namespace, but every built-in loss is
# a subclass of it.
LossFunctionWrapper = tf.keras.losses.MeanSquaredError.__mro__[1]


class BaseCallback(tf.keras.callbacks.Callback):
    """A callback that takes tensors as logs: Keras 2 need not wait for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self._supports_tf_logs = True


def flatten_layers(model: tf.keras.layers.Layer) -> list[Any]:
    """Returns the model and all layers below it."""
    if not features.is_on(keras_api.names.LAYERS_INSIDE):
        return [model, *(each for layer in layers_inside(model) for each in flatten_layers(layer))]
    return list(model._flatten_layers())


def layers_inside(layer: tf.keras.layers.Layer) -> list[Any]:
    """Returns the layers right below a layer."""
    if not features.is_on(keras_api.names.LAYERS_INSIDE):
        return list(getattr(layer, "layers", ()))
    return list(layer._flatten_layers(include_self=False, recursive=False))


def output_layers(model: Any, passing_on: tuple[type, ...] = ()) -> list[Any] | None:
    """Returns the layers that make a model's outputs, or None where nothing tells.

    Of an operation that is no layer, such as `2.0 * output`, they are those that make its inputs.

    Args:
        model: a model of `tf.keras`.
        passing_on: classes of layers. With such a layer those that make its inputs count, too.
            Defaults to none.
    """
    if isinstance(model, tf.keras.Sequential):
        layers: list[Any] = list(reversed(model.layers))
        passing = itertools.takewhile(lambda each: isinstance(each, passing_on), layers)
        return layers[: len(list(passing)) + 1]
    calls = calls_of_layers(model)
    if calls is None:
        return None
    makers = {id(each): (layer, inputs) for layer, inputs, outputs in calls for each in outputs}
    found, waiting = {}, tf.nest.flatten(model.outputs)
    while waiting:
        layer, inputs = makers.pop(id(waiting.pop()), (None, ()))
        # Keras 2 makes a layer of an operation.
        is_operation = getattr(layer, "_must_restore_from_config", False)
        is_layer = isinstance(layer, tf.keras.layers.Layer) and not is_operation
        if is_layer:
            found[id(layer)] = layer
        if not is_layer or isinstance(layer, passing_on):
            waiting += inputs
    return list(found.values())


def variables(layer: tf.keras.layers.Layer) -> list[Any]:
    """Returns the weights of a layer that are variables.

    A vocabulary of Keras 2 is a weight, but no variable.
    """
    return [weight for weight in layer.weights if hasattr(weight, "assign")]


def states(model: tf.keras.Model) -> list[Any]:
    """Returns the variables of stateful layers.

    They are not among the model's weights.
    """
    layers = [layer for layer in flatten_layers(model) if getattr(layer, "stateful", False)]
    values = tf.nest.flatten([getattr(layer, "states", None) for layer in layers])
    return [value for value in values if hasattr(value, "assign")]


def arguments_of_loss(loss: Any) -> dict[str, Any]:
    """Returns the arguments with which a built-in loss was made."""
    original = ("name", "reduction", "dtype")  # Keras 2 has no dtype of a loss
    given = {name: getattr(loss, name) for name in original if hasattr(loss, name)}
    return {**keras_api.names.arguments_of_loss.of(loss), **given}


def trusted_scope() -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager in which layers may be made from configs with code."""
    if not features.is_on(keras_api.names.TRUST):
        return contextlib.nullcontext()
    return keras_api.names.SafeModeScope(False)


def check_model(model: Any) -> None:
    """Raises a TypeError unless an argument is a model of `tf.keras`.

    A model of the other Keras is none.

    Args:
        model: Any. The argument.
    """
    if not isinstance(model, tf.keras.Model):
        raise TypeError(
            f"Expected a model of `tf.keras`, which is {ROOT_PACKAGE} in this process. "
            f"Received: model={model!r} (of type {type(model)})"
        )


def casts_inputs(layer: Any) -> bool:
    """Whether a layer casts its inputs, or has Keras's reasons not to.

    Some of Keras's layers cast in `call`, and an embedding takes ids.

    Args:
        layer: a layer of `tf.keras`.
    """
    is_keras_own = type(layer).__module__.startswith(f"{ROOT_PACKAGE}.")
    return is_keras_own or getattr(layer, "autocast", True)


def is_call_for_saving(call: Any) -> bool:
    """Whether this is the `call` that a layer of Keras 2 has while it is saved.

    Args:
        call: a new `call` of a layer.
    """
    # That of a user's layer has the module of the user's `call`, which it wraps.
    return type(getattr(call, "__wrapped__", None)).__module__.startswith("tf_keras.")
