"""The dtype policies of Keras 3, and the global one of each thread."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Everywhere, Replacement, When, replica_threads
from keras_mp.hooks.once import once
from keras_mp.keras_api import keras3_names
from keras_mp.support import features

keras = tf.keras

BasePolicy = keras.mixed_precision.Policy


def register_policy(cls: type) -> type:
    # Keras writes the name of the class into configs, and reads this one without keras_mp as well.
    cls = keras.utils.register_keras_serializable(package="keras_mp", name="Policy")(cls)
    cls.__name__ = BasePolicy.__name__
    return cls


def init_base_policy(policy: keras.mixed_precision.Policy, name: str | None) -> None:
    BasePolicy.__init__(policy, name)


class _PolicyName(str):
    """The name of a policy of keras_mp, with the policy itself.

    Keras makes a layer of a config by the name of its policy alone, and so with one of its own.
    """

    policy: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def policy_name(policy: keras.mixed_precision.Policy, name: str) -> str:
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


# Keras 3 keeps one global policy for each thread, and a new thread starts from floatx. `_process`
# has the policy that any thread set last; None stands for floatx. `_thread` has the policy that
# keras_mp gave this thread. If Keras has another one, Keras's own function has set it. None stays
# None until Keras needs a policy; then Keras makes one, and keeps it.
_process: dict[str, Any] = {"policy": None, "version": 0}


class _ThreadPolicy(threading.local):
    """The policy that this thread holds: the process's, or that of a scope of its own."""

    holds = None
    is_of_scope = False
    version = 0
    floatx: str | None = None


_thread = _ThreadPolicy()


def get_global_policy() -> keras.mixed_precision.Policy:
    if not features.is_on(keras3_names.THREADS):
        return keras.mixed_precision.dtype_policy()
    # Not the public function, which would make a policy of floatx and keep it.
    current = keras3_names.get_attribute("dtype_policy")
    if current is not _thread.holds and not (_thread.holds is None and _is_floatx(current)):
        set_global_policy(current)
    elif thread_missed_global_policy():
        _hold(_process["policy"])
    elif _thread.holds is None:
        _hold(None)
    return BasePolicy(keras.backend.floatx()) if _thread.holds is None else _thread.holds


def _is_floatx(policy: keras.mixed_precision.Policy | None) -> bool:
    """Whether Keras has made a policy of floatx, as it is now or was before."""
    names = (keras.backend.floatx(), _thread.floatx)
    return policy is None or (type(policy) is BasePolicy and policy.name in names)


def set_global_policy(policy: keras.mixed_precision.Policy | None) -> None:
    if not _thread.is_of_scope:
        _process["policy"] = policy
        _process["version"] += 1
    _hold(policy)


def thread_missed_global_policy() -> bool:
    return not _thread.is_of_scope and _thread.version != _process["version"]


@contextlib.contextmanager
def policy_scope(policy: keras.mixed_precision.Policy | None) -> Iterator[None]:
    _let_replicas_inherit_scope()
    get_global_policy()  # Notes a policy of Keras's own function, which outlives the scope.
    was_of_scope, before = _thread.is_of_scope, _thread.holds
    _thread.is_of_scope = True
    _hold(policy)
    try:
        yield
    finally:
        _thread.is_of_scope = was_of_scope
        _hold(before if was_of_scope else _process["policy"])


@once
def _let_replicas_inherit_scope() -> None:
    def state() -> tuple[Any] | None:
        return (_thread.holds,) if _thread.is_of_scope else None

    def entered(scope: tuple[Any] | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if scope is None else policy_scope(*scope)

    hooks.install([replica_threads.inheriting(state, entered)])


def _hold(policy: keras.mixed_precision.Policy | None) -> None:
    _thread.holds, _thread.floatx = policy, keras.backend.floatx()
    _thread.version = _process["version"]
    if features.is_on(keras3_names.THREADS):
        keras3_names.set_attribute("dtype_policy", policy)
    else:
        keras.mixed_precision.set_dtype_policy(policy or keras.backend.floatx())


def quantized_policy(name: str) -> keras.mixed_precision.Policy | None:
    if not re.search("._from_.", name):
        return None
    policy = keras.dtype_policies.get(name)
    return None if type(policy) is BasePolicy else policy
