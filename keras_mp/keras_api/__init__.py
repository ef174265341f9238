"""The Keras that `tf.keras` is, chosen once, at import.

`keras3*.py` and `keras2*.py` define the same names, which the former describe. `keras_api` has
those of the one that is chosen, and as `names` its private names and features. Nothing outside this
folder asks which Keras it is.
"""

import contextlib
import itertools
import os
import sys
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mp.support import features

_OLDEST_TENSORFLOW = (2, 16)
_OLDEST_KERAS_3 = (3, 12)

_INSTALL_KERAS = '`pip install "keras>={}.{}"`'.format(*_OLDEST_KERAS_3)

_OTHER = {"keras": "tf_keras", "tf_keras": "keras"}


def _refuse_older(title: str, version: str, oldest: tuple[int, int], cure: str = "") -> None:
    if tuple(int(part) for part in version.split(".")[:2]) < oldest:
        raise ImportError(
            f"keras_mp needs {title} {oldest[0]}.{oldest[1]} or later. {cure}"
            f"Received: {title.lower()} {version}"
        )


def _what_to_install() -> str:
    if os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True"):
        version = tf.__version__.rpartition(".")[0]
        return (
            "TF_USE_LEGACY_KERAS asks for Keras 2, which is not installed. Run "
            f"`pip install tf_keras=={version}.*`, or unset TF_USE_LEGACY_KERAS."
        )
    return (
        f"Keras 3 cannot be imported. Install it ({_INSTALL_KERAS}), and if KERAS_BACKEND or "
        "keras.json names another backend, set KERAS_BACKEND=tensorflow."
    )


def _root_package() -> str:
    """Returns "keras" (3) or "tf_keras" (2), if keras_mp works with it.

    Otherwise it raises an error.
    """
    _refuse_older("TensorFlow", tf.__version__, _OLDEST_TENSORFLOW)
    try:
        root = tf.keras.Model.__module__.partition(".")[0]
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"keras_mp cannot use `tf.keras`: {_what_to_install()} TensorFlow said: {error}"
        ) from error
    if root == "keras":
        version = sys.modules[root].__version__
        _refuse_older("Keras", version, _OLDEST_KERAS_3, f"Run {_INSTALL_KERAS}. ")
        backend = tf.keras.backend.backend()
        if backend != "tensorflow":
            raise ImportError(
                "keras_mp works with Keras 3 on its TensorFlow backend only. Set "
                "KERAS_BACKEND=tensorflow before Keras is imported, or in keras.json. "
                f"Received: backend={backend!r}"
            )
    return root


ROOT_PACKAGE = _root_package()
OTHER_PACKAGE = _OTHER[ROOT_PACKAGE]
# AutoGraph never converts Keras 3; tf_keras it converts up to TensorFlow 2.16.
AUTOGRAPH_MAY_CONVERT = ROOT_PACKAGE == "tf_keras"

# A test compares both, so one of them can stand for the other.
if TYPE_CHECKING or ROOT_PACKAGE == "keras":
    from keras_mp.keras_api import keras3_names as names
    from keras_mp.keras_api.keras3 import *
    from keras_mp.keras_api.keras3_adapter import *
    from keras_mp.keras_api.keras3_layers import *
    from keras_mp.keras_api.keras3_policies import *
    from keras_mp.keras_api.keras3_saving import *
    from keras_mp.keras_api.keras3_workers import *
else:
    from keras_mp.keras_api import keras2_names as names
    from keras_mp.keras_api.keras2 import *
    from keras_mp.keras_api.keras2_adapters import *
    from keras_mp.keras_api.keras2_layers import *
    from keras_mp.keras_api.keras2_policies import *
    from keras_mp.keras_api.keras2_saving import *

# Names that both Kerases have in the same place.
KerasLossScaleOptimizer = tf.keras.mixed_precision.LossScaleOptimizer
# The loss that computes a function. The class is in no public namespace, but every built-in loss is
# a subclass of it.
LossFunctionWrapper = tf.keras.losses.MeanSquaredError.__mro__[1]
register_serializable = tf.keras.utils.register_keras_serializable(package="keras_mp")
# Where gradients are applied, by optimizers that are no wrappers.
APPLY_METHODS = tuple(
    (base, "apply" if hasattr(base, "apply") else "apply_gradients") for base in OPTIMIZER_BASES
)
serialize_optimizer = tf.keras.optimizers.serialize


class BaseCallback(tf.keras.callbacks.Callback):
    """A callback that takes tensors as logs: Keras 2 need not wait for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self._supports_tf_logs = True


def get_optimizer(identifier: Any) -> Any:
    """Returns an optimizer, given by itself or by its name or config.

    None stays None.

    Args:
        identifier: an optimizer, a str, a dict or None.
    """
    if isinstance(identifier, dict):
        identifier = deserialize_optimizer(identifier)
    return tf.keras.optimizers.get(identifier)


def flatten_layers(model: tf.keras.layers.Layer) -> list[Any]:
    """Returns the model and all layers below it."""
    if not features.is_on(names.LAYERS_INSIDE):
        return [model, *(each for layer in layers_inside(model) for each in flatten_layers(layer))]
    return list(model._flatten_layers())


def layers_inside(layer: tf.keras.layers.Layer) -> list[Any]:
    """Returns the layers right below a layer."""
    if not features.is_on(names.LAYERS_INSIDE):
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
    return {**names.arguments_of_loss.of(loss), **given}


def trusted_scope() -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager in which layers may be made from configs with code."""
    if not features.is_on(names.TRUST):
        return contextlib.nullcontext()
    return names.SafeModeScope(False)


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


def switch_hint() -> str:
    """Returns the advice that makes `tf.keras` the other Keras."""
    change = "set TF_USE_LEGACY_KERAS=1" if ROOT_PACKAGE == "keras" else "unset TF_USE_LEGACY_KERAS"
    return f"{change} before TensorFlow is imported"
