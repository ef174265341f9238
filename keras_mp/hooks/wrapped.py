"""Wraps functions and methods for a while, for every thread or for one.

A wrapped attribute holds one function for all blocks and threads. A call runs what the blocks of
its own thread have made of the original; in other threads it runs the original. This module needs
TensorFlow only.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras_mp.support.autograph import do_not_convert
from keras_mp.support.observers import thread

_NOTHING = object()

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Place:
    """An attribute that is wrapped at the moment.

    Attributes:
        own: the attribute in the object's own namespace, or `_NOTHING`.
        function: what a call of the attribute ran before.
        blocks: int. How many blocks wrap it.
        everywhere: list of what wraps it for all threads.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.own = vars(owner).get(name, _NOTHING)
        is_property = isinstance(self.own, property)
        self.function: Any = self.own.fget if is_property else getattr(owner, name)
        self.blocks = 0
        self.everywhere: list[Wrap] = []

    def attribute(self) -> Any:
        """Returns what the object has as this attribute while it is wrapped."""

        # AutoGraph converts this function, and so also the functions that it calls, some of them a
        # user's.
        @functools.wraps(self.function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return here()(*args, **kwargs)

        @do_not_convert
        def here() -> Callable[..., Any]:
            function = self.function
            for wrap in self.everywhere[:1] + thread.wraps.get(id(self), []):
                function = wrap(function)
            return function

        return property(call) if isinstance(self.own, property) else call


_lock = threading.Lock()
_places: dict[tuple[int, str], _Place] = {}


@contextlib.contextmanager
def everywhere(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """Wraps an attribute for all threads.

    Several blocks that do so at the same time wrap it once.

    Args:
        owner: an object, a module or a class.
        name: the name of a function, a method or a property of a class.
        wrap: takes the function, and returns what takes its place. That of the first block is used.
    """
    with _placed(owner, name) as place:
        place.everywhere.append(wrap)
        try:
            yield
        finally:
            place.everywhere.remove(wrap)


@contextlib.contextmanager
def here(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """Wraps an attribute for this thread; other threads call the original.

    Args:
        owner: an object, a module or a class.
        name: the name of a function, a method or a property of a class.
        wrap: takes the function, and returns what takes its place. In nested blocks, the inner one
            gets the function that the outer one has made.

    Example:

    >>> import math
    >>> from keras_mp.hooks import wrapped
    >>> with wrapped.here(math, "sqrt", lambda original: lambda x: original(x) + 1):
    ...     math.sqrt(4.0)
    3.0
    >>> math.sqrt(4.0)
    2.0
    """
    with _placed(owner, name) as place:
        wraps = thread.wraps.setdefault(id(place), [])
        wraps.append(wrap)
        try:
            yield
        finally:
            wraps.pop()
            if not wraps:
                del thread.wraps[id(place)]


@contextlib.contextmanager
def _placed(owner: Any, name: str) -> Iterator[_Place]:
    key = (id(owner), name)
    with _lock:
        place = _places.get(key)
        if place is None:
            place = _places[key] = _Place(owner, name)
            _set(owner, name, place.attribute())
        place.blocks += 1
    try:
        yield place
    finally:
        with _lock:
            place.blocks -= 1
            if not place.blocks:
                del _places[key]
                _set(owner, name, place.own)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        # A class that is wrapped here has the attribute in its own namespace.
        setattr(owner, name, value)
    elif value is _NOTHING:
        del vars(owner)[name]
    else:
        # Not `setattr`, which Keras and the layers of keras_mp override.
        vars(owner).update({name: value})
