"""How Keras 3 saves and loads."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from keras_mp.keras_api import keras3_names

keras = tf.keras


def deserialize_optimizer(
    config: dict[str, Any], custom_objects: dict[str, Any] | None = None
) -> keras.optimizers.Optimizer:
    """Makes an optimizer of a config: see the interface."""
    package, _, _ = (config.get("module") or "keras").partition(".")
    if package in ("keras", "tf_keras"):
        found = keras.optimizers.deserialize(dict(config), custom_objects)
        if not isinstance(found, str):  # the name of a class that is not in its table
            return found
    return keras.utils.deserialize_keras_object(config, custom_objects=custom_objects)


def enter_while_saving(around: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Enters a context manager while Keras writes files: see the interface."""
    if not keras3_names.write_h5.is_there():
        return
    write = keras3_names.write_h5.get()

    @functools.wraps(write)
    def wrapped(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        with around(model):
            return write(model, *args, **kwargs)

    keras3_names.write_h5.set(wrapped)
