"""The scope in which variables appear in another dtype.

RFC 293, "AutoCastVariable API".

This module needs TensorFlow only.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from keras_mp.hooks import reach
from keras_mp.support.dtypes import LOW_PRECISION


class _Shared:
    """How the dtype is read and set that variables are cast to, where Keras keeps it.

    So the scopes of each of the two cast the other's variables as well. `keras_mp.layers` sets
    both.

    Attributes:
        dtype: returns the DType in force in this thread, or None.
        enter: takes a DType or None and returns the context manager that puts it in force.
    """

    dtype: Callable[[], tf.DType | None]
    enter: Callable[[tf.DType | None], AbstractContextManager[None]]


shared = _Shared()


def autocast_scope(dtype: str | tf.DType | None) -> AbstractContextManager[None]:
    """Makes variables that cast themselves appear in a dtype.

    The scope holds in the thread that enters it, until it exits, also by an exception. A layer
    enters it before it runs `call`; code without Keras enters it by hand. It also applies to the
    weights of Keras layers.

    A `tf.function` has one trace for a scope of 16 bits and another one for code outside. It does
    not notice scopes of other dtypes: a function that was traced inside of one, and reads a
    variable that is not among its arguments, still casts when it is called outside. If the variable
    is an argument, the function is traced again for another dtype.

    Args:
        dtype: DType, string, or anything else that `tf.as_dtype` takes, floating; or None, which
            turns casting off.

    Returns:
        A context manager.

    Raises:
        ValueError: `dtype` is not floating.

    Example:

    >>> v = keras_mp.autocast_variable(tf.Variable(1.5))
    >>> with keras_mp.autocast_scope("bfloat16"):
    ...     (v + 1).dtype
    tf.bfloat16
    >>> (v + 1).dtype
    tf.float32

    Source: RFC 293, "AutoCastVariable API".
    """
    if dtype is not None:
        dtype = tf.as_dtype(dtype)
        if not dtype.is_floating:
            raise ValueError(
                "Variables can be cast to a floating-point dtype only. Expected a floating-point "
                f"dtype or None. Received: dtype={dtype.name!r}"
            )
        if dtype in LOW_PRECISION:
            return _in_reach(dtype)
    return shared.enter(dtype)


@contextlib.contextmanager
def _in_reach(dtype: tf.DType) -> Iterator[None]:
    reach.begins()
    with reach.entered(dtype, reach.thread.is_exact), shared.enter(dtype):
        yield


def autocast_dtype() -> tf.DType | None:
    """Returns the dtype that variables are cast to in this thread, or None.

    Example:

    >>> with keras_mp.autocast_scope("float16"):
    ...     keras_mp.autocast_dtype()
    tf.float16
    """
    return shared.dtype()


def in_current_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function run in the current scope, wherever it is called later.

    It serves functions that are called later (`tf.recompute_grad` calls its function again when
    gradients are computed) or in another thread.

    Args:
        function: callable.

    Returns:
        A callable with the same arguments and results.

    Example:

    >>> v = keras_mp.autocast_variable(tf.Variable(1.5))
    >>> with keras_mp.autocast_scope("float16"):
    ...     double = keras_mp.in_current_scope(lambda: v * 2)
    >>> double().dtype
    tf.float16
    """
    dtype = autocast_dtype()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> object:
        with autocast_scope(dtype):
            return function(*args, **kwargs)

    return call


def recompute_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    """A `tf.recompute_grad` that reads variables again in the same dtype.

    When gradients are computed, the layer that called the function has returned. In layers of Keras
    with a policy of its own, the function of `tf.recompute_grad` would then read float32 variables.
    Variables may be among the arguments.

    Args:
        function: callable whose results are to be computed again instead of being kept.

    Returns:
        A callable with the same arguments and results.

    Example:

    >>> v = keras_mp.autocast_variable(tf.Variable(1.5))
    >>> double = keras_mp.recompute_grad(lambda x: x * v)
    >>> with tf.GradientTape() as tape, keras_mp.autocast_scope("float16"):
    ...     y = double(tf.constant(2.0, tf.float16))
    >>> tape.gradient(y, v)
    <tf.Tensor: shape=(), dtype=float32, numpy=2.0>
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> object:
        # TensorFlow does not know a variable of Keras as one. It would take its gradient twice: as
        # that of an argument, and as that of a variable.
        args, kwargs = tf.nest.map_structure(read, (args, kwargs))
        return tf.recompute_grad(in_current_scope(function))(*args, **kwargs)

    return call


def read(value: Any) -> Any:
    """Returns the tensor of a variable, or anything else as it is."""
    is_variable = isinstance(value, tf.Variable) or hasattr(value, "__tf_tensor__")
    is_other = isinstance(value, tf.Tensor | tf.Operation)
    return tf.convert_to_tensor(value) if is_variable and not is_other else value
