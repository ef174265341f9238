"""What optimizer wrappers do where a file is written or read, and only then."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.support import features, messages
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.tensorflow_api import saving
from keras_mp.tensorflow_api.features import SAVED_MODELS
from keras_mp.wrappers import inner_optimizers
from keras_mp.wrappers.scaler_properties import ScalerProperties


def check_shapes(variables: Iterable[Any], weights: Iterable[Any]) -> None:
    """Checks that weights fit into an optimizer's variables.

    Args:
        variables: iterable of variables.
        weights: iterable of arrays.

    Raises:
        ValueError: their shapes differ.
    """
    expected, received = ([tuple(np.shape(x)) for x in some] for some in (variables, weights))
    if expected != received:
        raise ValueError(
            "The weights are from another kind of optimizer, or for another model. Nothing was "
            f"set. Expected the shapes {expected}. Received: {received}"
        )


def load(optimizer: Any, store: Mapping[str, Any]) -> None:
    """Loads the variables of a wrapper, and of the optimizer in it.

    Args:
        optimizer: the wrapper.
        store: dict-like, of names and arrays. The names of the inner optimizer's are numbers.

    Raises:
        ValueError: the variables are those of another optimizer.
    """
    variables, own = optimizer._inner_variables(), optimizer._own_variables()
    names = set(store.keys())
    count = sum(name.isdigit() for name in names)
    if count == len(variables):
        weights = [store[str(i)][()] for i in range(count)]
        check_shapes(variables, weights)
        for variable, weight in zip(variables, weights, strict=True):
            variable.assign(weight)
    elif count:
        messages.warn(
            "The optimizer's variables were not loaded. If the file has an optimizer of the "
            "same kind, for the same model, build the optimizer first: "
            f"`model.optimizer.build(model.trainable_variables)`. Expected {len(variables)} "
            f"variables. Received: {count}"
        )
    for name in names & own.keys():
        own[name].assign(store[name][()])
    missing = sorted(own.keys() - names)
    if missing and isinstance(optimizer, ScalerProperties):
        messages.warn(
            f"The file holds no {', '.join(missing)} for the optimizer, so they stay as "
            "they are: it was saved without loss scaling, with another kind of loss scale, or "
            f"with another LossScaleOptimizer. Expected {sorted(own)}. Received: {sorted(names)}"
        )


def state_of(optimizer: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of a `LossScaleOptimizer` for its config; nothing in a graph.

    Args:
        optimizer: the optimizer.
        own: its variables, by their names.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return {}
        state = {name: tf.convert_to_tensor(v).numpy().item() for name, v in own.items()}
    model, policy = optimizer._model(), optimizer.policy_in_file
    if model is not None:
        layers = (each for each in keras_api.flatten_layers(model) if each is not model)
        half = [each for each in layers if each.compute_dtype in LOW_PRECISION_NAMES]
        policy = half[0].dtype_policy.name if half else None
    return {"state": {**state, "policy": policy}}


def saved_model_begins(base: type, loses_state: bool) -> None:
    """Prepares wrappers for a SavedModel, and says what that does not keep.

    Args:
        base: type. The base class of wrappers.
        loses_state: bool. Whether a model that is loaded starts with new slots.
    """
    if features.is_on(SAVED_MODELS):
        _let_write_themselves(base)
    if loses_state:
        messages.warn(
            "tf.keras loads a model from a SavedModel with a new optimizer: without iterations "
            "and slots. To train on after loading, save the model as .keras or .h5, or "
            "use a tf.train.Checkpoint. To serve it, leave the optimizer out "
            "(`model.save(path, include_optimizer=False)`, `model.export(path)`)."
        )


@functools.cache
def _let_write_themselves(base: type) -> None:
    """Lets a SavedModel ask wrappers what to write about them."""
    saving.register("keras_mp", predicate=lambda each: isinstance(each, base))(base)


def write_family(wrapper: Any, object_proto: Any) -> None:
    """Writes the family of the innermost optimizer into a SavedModel.

    At loading only that family takes its slots, and a wrapper may be an instance of several bases.
    """
    *_, innermost = inner_optimizers.chain(wrapper)
    revived = saving.revived(innermost)
    if revived is not None:
        object_proto.user_object.CopyFrom(revived)
    object_proto.registered_name = ""  # Loading would look the name up, even without keras_mp.
