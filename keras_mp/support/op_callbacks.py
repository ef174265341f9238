"""TensorFlow's callbacks after each operation: adding one, and doing without.

What calls back in a graph may add operations to it, as `tf.debugging.enable_check_numerics` does.
This module needs TensorFlow only.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.python.eager import context as _context
from tensorflow.python.framework import op_callbacks as _op_callbacks


@contextlib.contextmanager
def observed(callback: Callable[..., Any]) -> Iterator[None]:
    """Calls back after each operation of this thread, and of replicas that it starts.

    Args:
        callback: as `tf.debugging`'s own tools have it: it gets the operation's type, inputs,
            attributes and outputs, in a graph also `op_name=` and `graph=`.
    """
    _op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        _op_callbacks.remove_op_callback(callback)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Calls nothing back: neither what `observed` has added nor `tf.debugging`'s tools."""
    context: Any = _context.context()
    before = context.invoking_op_callbacks
    context.invoking_op_callbacks = True
    try:
        yield
    finally:
        context.invoking_op_callbacks = before
