"""Tells AutoGraph which functions to convert.

AutoGraph takes seconds, even for functions without control flow. This module needs TensorFlow only.
"""

from collections.abc import Callable
from typing import Any

from keras_mp.support import features
from keras_mp.tensorflow_api import graphs
from keras_mp.tensorflow_api.features import AUTOGRAPH


def do_not_convert(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets AutoGraph call a function as it is.

    Functions of the user that it calls are still converted.
    `tf.autograph.experimental.do_not_convert` would switch AutoGraph off for all functions that are
    called inside, even those from `allow_conversion`.

    Args:
        function: A function, method or `functools.partial` without control flow that depends on
            tensors. TensorFlow may be the one to call it.

    Returns:
        The function.

    Example:

    >>> from keras_mp.support.autograph import do_not_convert
    >>> @do_not_convert
    ... def twice(x):
    ...     return x + x
    >>> float(tf.function(lambda x: twice(x))(tf.constant(1.0)))
    2.0
    """
    # AutoGraph has no public name for it: it marks the functions that it has made in this way.
    function.autograph_info__ = {}
    return function


def allow_conversion(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets AutoGraph convert a user's function, whoever calls it.

    The caller may be a function that AutoGraph need not convert.

    Args:
        function: Any callable.

    Returns:
        A callable. It is converted if AutoGraph converts the caller of `allow_conversion`.

    Example:

    >>> from keras_mp.support.autograph import allow_conversion, do_not_convert
    >>> @do_not_convert
    ... def call(function, x):
    ...     return allow_conversion(function)(x)
    >>> def magnitude(x):
    ...     if x > 0:  # Only AutoGraph makes this work in a graph.
    ...         return x
    ...     return -x
    >>> float(tf.function(lambda x: call(magnitude, x))(tf.constant(-2.0)))
    2.0
    """
    if not features.is_on(AUTOGRAPH):
        return function
    status = graphs.autograph_status()
    return graphs.autograph_convert(function, status, convert_by_default=False)
