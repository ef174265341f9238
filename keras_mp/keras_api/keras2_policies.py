"""The dtype policies of Keras 2, and the global one.

A scope changes it for its thread only.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Everywhere, Replacement, When, replica_threads
from keras_mp.hooks.once import once
from keras_mp.keras_api import keras2_names
from keras_mp.support.attributes import replaced

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


class _ThreadScope(threading.local):
    """The policy scope of this thread.

    It is a tuple of the policy, or None outside of scopes.
    """

    policy: tuple[Any] | None = None


_thread = _ThreadScope()


def get_global_policy() -> keras.mixed_precision.Policy:
    return keras.mixed_precision.global_policy()


def quantized_policy(name: str) -> None:
    del name


def set_global_policy(policy: keras.mixed_precision.Policy | None) -> None:
    keras.mixed_precision.set_global_policy(policy)


@contextlib.contextmanager
def policy_scope(policy: keras.mixed_precision.Policy | None) -> Iterator[None]:
    if get_global_policy().name == "_infer":  # as in TensorFlow 1
        keras.mixed_precision.set_global_policy(policy)  # Raises an error with the reason.
    _make_scopes_the_threads_own()
    with _entered((policy,)):
        yield


def _entered(scope: tuple[Any] | None) -> contextlib.AbstractContextManager[None]:
    return replaced(_thread, "policy", scope)


@once
def _make_scopes_the_threads_own() -> None:
    """Lets the functions of the global policy see this thread's scope.

    They see it if the thread is in one.
    """

    def getting(original: Callable[[], Any]) -> Callable[[], Any]:
        def global_policy() -> keras.mixed_precision.Policy:
            if _thread.policy is None:
                return original()
            (policy,) = _thread.policy
            return BasePolicy(keras.backend.floatx()) if policy is None else policy

        return global_policy

    def setting(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def set_global_policy(policy: keras.mixed_precision.Policy | None) -> None:
            if _thread.policy is None:
                original(policy)
            elif policy is None or isinstance(policy, BasePolicy):
                _thread.policy = (policy,)
            else:
                _thread.policy = (BasePolicy(policy),)

        return set_global_policy

    public = keras.mixed_precision
    hooks.install(
        [
            Replacement(Everywhere(public.global_policy), getting, When.ALWAYS),
            Replacement(Everywhere(public.set_global_policy), setting, When.ALWAYS),
        ]
    )
    replica_threads.inherit(lambda: _thread.policy, _entered)
