"""TensorFlow's callbacks after each operation: adding one, and switching all off.

A callback in a graph may add operations to it, as `tf.debugging.enable_check_numerics` does.
This module needs TensorFlow only.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.python.eager import context as _context
from tensorflow.python.framework import op_callbacks as _op_callbacks


@contextlib.contextmanager
def observed(callback: Callable[..., Any]) -> Iterator[None]:
    """Adds a callback after each operation of this thread, and of replicas that it starts.

    Args:
        callback: function like those of `tf.debugging`. Its arguments are the operation's type,
            inputs, attributes and outputs, in a graph also `op_name=` and `graph=`.
    """
    _op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        _op_callbacks.remove_op_callback(callback)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Switches off all callbacks, those of `observed` and those of `tf.debugging`."""
    context: Any = _context.context()
    before = context.invoking_op_callbacks
    context.invoking_op_callbacks = True
    try:
        yield
    finally:
        context.invoking_op_callbacks = before
