"""Variables that are made while a function is traced, without a second trace.

This module needs TensorFlow only.
"""

import contextlib
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

import tensorflow as tf

_T = TypeVar("_T")


def made_at_once() -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which new variables need no second trace.

    A `tf.function` that makes variables in its first call is traced twice, since TensorFlow may
    have made them in a branch of the graph. In an `init_scope` they get their values at once, so
    one trace is enough. What is made elsewhere in a graph still needs two.
    """
    return tf.variable_creator_scope(_make)


def outside_of_functions(make: Callable[[], _T]) -> _T:
    """Makes variables of the current strategy where no graph sees them.

    An `init_scope` would not hide a variable from the `tf.function` that is being traced, which
    would be traced again, or refuse the variable. Another thread does hide it.

    Args:
        make: the function that makes them.

    Returns:
        What it returns.
    """
    strategy = tf.distribute.get_strategy()

    def make_in_scope() -> _T:
        with strategy.scope():
            return make()

    with futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(make_in_scope).result()


def _make(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    if tf.executing_eagerly():
        kwargs["experimental_enable_variable_lifting"] = False
    return next_creator(**kwargs)
