"""What AutoGraph need not convert: it takes seconds for code that has nothing to convert.

This module needs TensorFlow only.
"""

from collections.abc import Callable
from typing import Any


def unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets AutoGraph call a function as it is, and convert what users of it define.

    `tf.autograph.experimental.do_not_convert` would switch AutoGraph off for all that the function
    calls, a user's own optimizer among it.

    Args:
        function: A function or method without control flow that depends on tensors.

    Returns:
        The function.

    Example:

    >>> from keras_mp.support.unconverted import unconverted
    >>> @unconverted
    ... def twice(x):
    ...     return x + x
    >>> float(tf.function(lambda x: twice(x))(tf.constant(1.0)))
    2.0
    """
    # No public name: it is how AutoGraph marks what it has made itself.
    function.autograph_info__ = {}
    return function
