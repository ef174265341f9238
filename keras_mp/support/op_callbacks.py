"""TensorFlow's callbacks after each operation, which may be off.

A callback in a graph may add operations to it, as `tf.debugging.enable_check_numerics` does.
This module needs TensorFlow only.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from keras_mp.support import features
from keras_mp.tensorflow_api import operations
from keras_mp.tensorflow_api.features import UNOBSERVED


def are_off() -> bool:
    """Whether the callbacks of this thread are off.

    In eager, TensorFlow calls them even so.
    """
    return features.is_on(UNOBSERVED) and operations.context().invoking_op_callbacks


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Switches off all callbacks, also those of `tf.debugging`."""
    if are_off() or not features.is_on(UNOBSERVED):
        yield
        return
    context: Any = operations.context()
    context.invoking_op_callbacks = True
    try:
        yield
    finally:
        context.invoking_op_callbacks = False


@contextlib.contextmanager
def observed(callback: Callable[..., Any]) -> Iterator[None]:
    """Adds a callback after each operation of this thread.

    Replicas that the thread starts have it too.

    Args:
        callback: function like those of `tf.debugging`. Its arguments are the operation's type,
            inputs, attributes and outputs; in a graph also `op_name=` and `graph=`.
    """
    operations.add_callback(callback)
    try:
        yield
    finally:
        operations.remove_callback(callback)
