"""The dtype policies of Keras 2, and the global one."""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Replacement, When
from keras_mp.keras_api import keras2_names, policy_scopes

keras = tf.keras

BasePolicy = keras.mixed_precision.Policy


def register_policy(cls: Any) -> type:
    cls = keras.utils.register_keras_serializable(package="keras_mp")(cls)

    def taking_ours(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def get_policy(identifier: Any) -> Any:
            policy = identifier or get_global_policy()
            # In an .h5 file Keras finds its own class by the name before registered ones.
            if isinstance(policy, dict) and "registered_name" in policy:
                found = keras.utils.get_registered_object(policy["registered_name"])
                if isinstance(found, type) and issubclass(found, cls):
                    return found.from_config(policy["config"])
            # Keras refuses float16 under a ParameterServerStrategy. What scales a loss, and cannot
            # do that there, says which scale can.
            return policy if isinstance(policy, cls) else original(identifier)

        return get_policy

    place, feature = keras2_names.policy_of_layer, keras2_names.POLICIES
    hooks.install([Replacement(place, taking_ours, When.ALWAYS, feature)])
    return cls


def init_base_policy(policy: keras.mixed_precision.Policy, name: str | None) -> None:
    # Keras's own class logs a message about the hardware; keras_mp has one for both Kerases.
    logger = tf.get_logger()
    logger.addFilter(_is_not_compatibility_check)
    try:
        BasePolicy.__init__(policy, name)
    finally:
        logger.removeFilter(_is_not_compatibility_check)


def policy_name(policy: keras.mixed_precision.Policy, name: str) -> str:
    del policy  # Keras makes a layer with the whole config of its policy.
    return name


def _is_not_compatibility_check(record: logging.LogRecord) -> bool:
    return "compatibility check" not in record.getMessage()


def get_global_policy() -> keras.mixed_precision.Policy:
    return keras.mixed_precision.global_policy()


def quantized_policy(name: str) -> None:
    del name


def set_global_policy(policy: keras.mixed_precision.Policy | None) -> None:
    keras.mixed_precision.set_global_policy(policy)


def policy_scope(
    policy: keras.mixed_precision.Policy | None,
) -> contextlib.AbstractContextManager[None]:
    if get_global_policy().name == "_infer":  # as in TensorFlow 1
        keras.mixed_precision.set_global_policy(policy)  # Raises an error with the reason.
    return policy_scopes.entered(policy)
