"""Functions and methods of others that are wrapped for a while: for every thread, or for one.

An attribute that is wrapped holds one function for all blocks, in any thread, which asks at each
call what this thread is to see. Outside of the blocks of a thread that is what was there before.
This module needs TensorFlow only.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras_mp.support.autograph import do_not_convert

_NOTHING = object()

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Place:
    """An attribute that is wrapped.

    Attributes:
        own: what the object itself had as this attribute, or `_NOTHING`.
        function: what a call of the attribute was.
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

        # AutoGraph converts this one, and so what it calls, which a user may have written.
        @functools.wraps(self.function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return here()(*args, **kwargs)

        @do_not_convert
        def here() -> Callable[..., Any]:
            function = self.function
            for wrap in self.everywhere[:1] + _thread.wraps.get(id(self), []):
                function = wrap(function)
            return function

        return property(call) if isinstance(self.own, property) else call


class _Thread(threading.local):
    """What this thread wraps.

    Attributes:
        wraps: dict of the ids of `_Place`s and lists of functions, the innermost first.
    """

    def __init__(self) -> None:
        self.wraps: dict[int, list[Wrap]] = {}


_thread = _Thread()
_lock = threading.Lock()
_places: dict[tuple[int, str], _Place] = {}


@contextlib.contextmanager
def everywhere(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """Wraps an attribute for all threads, once if several blocks do so at the same time.

    Args:
        owner: an object, a module or a class.
        name: the name of a function, a method or a property of a class.
        wrap: called with the function; returns what takes its place. The first block's is used.
    """
    with _placed(owner, name) as place:
        place.everywhere.append(wrap)
        try:
            yield
        finally:
            place.everywhere.remove(wrap)


@contextlib.contextmanager
def here(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """Wraps an attribute for this thread; other threads call what was there.

    Args:
        owner: an object, a module or a class.
        name: the name of a function, a method or a property of a class.
        wrap: called with the function; returns what takes its place. That of a block inside of
            another one gets the function of the outer block.

    Example:

    >>> import math
    >>> from keras_mp.hooks import wrapped
    >>> with wrapped.here(math, "sqrt", lambda own: lambda x: own(x) + 1):
    ...     math.sqrt(4.0)
    3.0
    >>> math.sqrt(4.0)
    2.0
    """
    with _placed(owner, name) as place:
        wraps = _thread.wraps.setdefault(id(place), [])
        wraps.append(wrap)
        try:
            yield
        finally:
            wraps.pop()
            if not wraps:
                del _thread.wraps[id(place)]


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
        # A class has what is wrapped here itself.
        setattr(owner, name, value)
    elif value is _NOTHING:
        del vars(owner)[name]
    else:
        # Not by `setattr`, of which Keras and layers of ours have their own idea.
        vars(owner).update({name: value})
