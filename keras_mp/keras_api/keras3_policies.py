"""The dtype policies of Keras 3, and the global one of each thread."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Everywhere, Replacement, When
from keras_mp.hooks.once import once
from keras_mp.keras_api import keras3_names, policy_scopes
from keras_mp.support import features

keras = tf.keras

BasePolicy = keras.mixed_precision.Policy


def register_policy(cls: type) -> type:
    """Registers a policy class.

    Without keras_mp, `tf.keras` makes a policy of its own class from the config.
    """
    # Keras writes the name of the class into configs, and reads this one without keras_mp as well.
    cls = keras.utils.register_keras_serializable(package="keras_mp", name="Policy")(cls)
    cls.__name__ = BasePolicy.__name__
    return cls


def init_base_policy(policy: keras.mixed_precision.Policy, name: str | None) -> None:
    """Initializes the base class of a policy; a subclass calls it first."""
    BasePolicy.__init__(policy, name)


class _PolicyName(str):
    """The name of a policy of keras_mp, with the policy itself.

    Keras makes a layer of a config by the name of its policy alone, and so with one of its own.
    """

    policy: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def policy_name(policy: keras.mixed_precision.Policy, name: str) -> str:
    """Returns the name of a policy, by which Keras finds the policy and not its own.

    It looks for it when it makes a layer of a config: from a file, or for a clone.
    """
    _find_policies_by_name()
    result = _PolicyName(name)
    result.policy = policy
    return result


@once
def _find_policies_by_name() -> None:
    def with_policies_of_names(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def get(identifier: Any) -> Any:
            return (
                identifier.policy if isinstance(identifier, _PolicyName) else original(identifier)
            )

        return get

    place = Everywhere(keras.dtype_policies.get)
    hooks.install([Replacement(place, with_policies_of_names, When.ALWAYS)])


class _Process:
    """The policy that keras_mp has set for all threads; None follows floatx."""

    policy: Any = None


# Keras keeps a policy for each thread: the one that its own function has set there, or else one
# that it made of floatx where it first needed one. The latter gives way to that of keras_mp, so it
# is noted beside the one that is kept.
_KEPT, _MADE = "dtype_policy", "keras_mp_policy_of_floatx"


def _chosen() -> Any:
    """Returns the policy that was chosen for this thread, or None to follow floatx."""
    kept = keras3_names.get_attribute(_KEPT)
    if kept is not None and kept is not keras3_names.get_attribute(_MADE):
        return kept
    return _Process.policy


def _choosing(original: Callable[[], Any]) -> Callable[[], Any]:
    def dtype_policy() -> Any:
        policy = _chosen()
        if policy is None:
            is_kept = keras3_names.get_attribute(_KEPT) is not None
            policy = original()
            if not is_kept:
                keras3_names.set_attribute(_MADE, policy)
        return policy

    return dtype_policy


if features.is_on(keras3_names.THREADS):
    # What Keras has made for the first layers may be there already.
    _kept = keras3_names.get_attribute(_KEPT)
    if type(_kept) is BasePolicy and _kept.name == keras.backend.floatx():
        keras3_names.set_attribute(_MADE, _kept)
_place = Everywhere(keras.mixed_precision.dtype_policy, ("global_policy",))
hooks.install([Replacement(_place, _choosing, When.ALWAYS, keras3_names.THREADS)])


@contextlib.contextmanager
def thread_with(name: str, value: Any) -> Iterator[None]:
    """Context manager in which Keras knows something else of this thread.

    Args:
        name: str. The attribute of Keras's state of a thread.
        value: its value inside of the block.
    """
    before = keras3_names.get_attribute(name)
    keras3_names.set_attribute(name, value)
    try:
        yield
    finally:
        keras3_names.set_attribute(name, before)


def get_global_policy() -> keras.mixed_precision.Policy:
    """Returns `tf.keras`'s global policy."""
    if policy_scopes.thread.scope is not None or not features.is_on(keras3_names.THREADS):
        return keras.mixed_precision.dtype_policy()
    policy = _chosen()
    if policy is None:
        # Keras would keep the one that it made, whatever becomes of floatx.
        keras3_names.set_attribute(_KEPT, None)
        policy = policy_scopes.of_floatx()
    return policy


def set_global_policy(policy: keras.mixed_precision.Policy | None) -> None:
    """Sets `tf.keras`'s global policy; None follows floatx."""
    if policy_scopes.thread.scope is not None:
        policy_scopes.thread.scope = (policy,)
    elif features.is_on(keras3_names.THREADS):
        keras3_names.set_attribute(_KEPT, None)
        _Process.policy = policy
    else:
        keras.mixed_precision.set_dtype_policy(policy or keras.backend.floatx())


policy_scope = policy_scopes.entered


def quantized_policy(name: str) -> keras.mixed_precision.Policy | None:
    """Returns the quantized policy of that name, or None."""
    if not re.search("._from_.", name):
        return None
    policy = keras.dtype_policies.get(name)
    return None if type(policy) is BasePolicy else policy
