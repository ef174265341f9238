"""How Keras 3 saves and loads."""

from typing import Any

import tensorflow as tf

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
