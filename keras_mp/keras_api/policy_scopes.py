"""Scopes of the global policy, which hold for one thread, alike in both Kerases."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Everywhere, Replacement, When, replica_threads
from keras_mp.hooks.once import once
from keras_mp.support.attributes import replaced

_mixed_precision = tf.keras.mixed_precision
_of_keras_3: Any = getattr(tf.keras, "dtype_policies", None)
_policy_of = _of_keras_3.get if _of_keras_3 else _mixed_precision.Policy


class _Thread(threading.local):
    """What this thread is in.

    Attributes:
        scope: tuple of the policy of the innermost scope, None outside of scopes. Without a policy
            it follows floatx.
    """

    scope: tuple[Any] | None = None


thread = _Thread()


def of_floatx() -> Any:
    """Returns the policy that follows floatx."""
    return _mixed_precision.Policy(tf.keras.backend.floatx())


def entered(policy: Any) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager with another global policy.

    It holds in this thread, and in replicas that it starts. A policy that is set in it is that of
    the scope.

    Args:
        policy: the policy, or None to follow floatx.
    """
    _let_keras_see_scopes()
    return _in_scope((policy,))


def _in_scope(scope: tuple[Any] | None) -> contextlib.AbstractContextManager[None]:
    return replaced(thread, "scope", scope)


def _getting(original: Callable[[], Any]) -> Callable[[], Any]:
    def global_policy() -> Any:
        if thread.scope is None:
            return original()
        (policy,) = thread.scope
        return of_floatx() if policy is None else policy

    return global_policy


def _setting(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def set_global_policy(policy: Any) -> None:
        if thread.scope is None:
            original(policy)
        elif policy is None or isinstance(policy, _mixed_precision.Policy):
            thread.scope = (policy,)
        else:
            thread.scope = (_policy_of(policy),)

    return set_global_policy


@once
def _let_keras_see_scopes() -> None:
    """Lets Keras's functions of the global policy go by this thread's scope."""
    names = ("dtype_policy", "global_policy"), ("set_dtype_policy", "set_global_policy")
    for functions, make in zip(names, (_getting, _setting), strict=True):
        place = Everywhere(getattr(_mixed_precision, functions[1]), functions)
        hooks.install([Replacement(place, make, When.ALWAYS)])
    replica_threads.inherit(lambda: thread.scope, _in_scope)
