"""What is done once in a process, though several threads may be the first to ask for it.

This module needs nothing but Python.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

# One for all, as what is done once may do other things once.
lock = threading.RLock()


def once(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that calls another one once in the process.

    Threads that call it meanwhile wait until it is done. What has raised an error was not done.

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
