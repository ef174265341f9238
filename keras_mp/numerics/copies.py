"""Copies of a model under another policy, compiled as it is."""

from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.conversion import convert


def compiled(model: tf.keras.Model, policy: Any) -> tf.keras.Model:
    """Returns a copy under a policy, compiled as the model is, if it is compiled.

    Args:
        model: of `tf.keras`.
        policy: what `convert` takes.
    """
    copy = convert(model, policy)
    if getattr(model, "optimizer", None) is not None:
        compile_as(copy, model, optimizer_of(model))
    return copy


def compile_as(copy: tf.keras.Model, model: tf.keras.Model, optimizer: Any, **changes: Any) -> None:
    """Compiles a copy with the loss of a model and its weights, but for metrics.

    Args:
        copy: the copy.
        model: the model.
        optimizer: of the copy.
        **changes: other arguments of `compile`.
    """
    weights = (model.get_compile_config() or {}).get("loss_weights")
    loss = getattr(model, "loss", None)
    copy.compile(optimizer, loss=loss, loss_weights=weights, **changes)


def optimizer_of(model: tf.keras.Model) -> Any:
    """Returns a new optimizer like that of a model."""
    return keras_api.deserialize_optimizer(keras_api.serialize_optimizer(model.optimizer))
