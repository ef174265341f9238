"""What is done once in a process, even if several threads ask at the same time.

This module needs nothing but Python.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

# One lock for all functions, since what is done once may call another such function.
lock = threading.RLock()


def once(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that calls another one only once in the process.

    Threads that call it meanwhile wait until that call returns. A call that raised an error does
    not count.

    Args:
        function: called with the arguments of the first call.

    Example:

    >>> from keras_mp.hooks.once import once
    >>> @once
    ... def install():
    ...     print("installed")
    >>> install(), install()
    installed
    (None, None)
    """
    is_done = False

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        nonlocal is_done
        if is_done:
            return
        with lock:
            if not is_done:
                function(*args, **kwargs)
                is_done = True

    return call
