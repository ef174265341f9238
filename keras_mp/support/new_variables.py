"""Variables that a function makes in its first call, without a second trace.

This module needs TensorFlow only.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def made_at_once() -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which new variables need no second trace.

    A `tf.function` that makes variables in its first call is traced twice, since TensorFlow may
    have made them in a branch of the graph. In an `init_scope` they get their values at once, so
    one trace is enough. What is made elsewhere in a graph still needs two.
    """
    return tf.variable_creator_scope(_make)


def _make(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    if tf.executing_eagerly():
        kwargs["experimental_enable_variable_lifting"] = False
    return next_creator(**kwargs)
