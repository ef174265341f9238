"""Replaces functions of TensorFlow and Keras for as long as a process runs.

A `Replacement` is a row of a table: the function, what takes its place, and when that acts. A
function is replaced at most once. What takes its place asks for the state of the thread
(`reach.py`) and then calls what the rows of this function have made of the original. Where a
function has several rows, each wraps the one before; those that always act are the innermost.

This module needs TensorFlow only.
"""

import enum
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from keras_mp.hooks import reach
from keras_mp.hooks.once import lock
from keras_mp.support import features
from keras_mp.support.autograph import do_not_convert
from keras_mp.tensorflow_api.features import Feature
from keras_mp.tensorflow_api.names import Name

Function = Callable[..., Any]


class When(enum.IntEnum):
    """When a replacement acts; at other times the original function is called."""

    ALWAYS = 0
    OUT_OF_REACH = 1
    IN_REACH = 2


class Method(NamedTuple):
    """A public function of a module, or a method of a class.

    Attributes:
        owner: the module or class.
        name: str.
    """

    owner: Any
    name: str

    @classmethod
    def of(cls, inheriting: type, name: str) -> "Method":
        """Returns a method in the class that defines it.

        Args:
            inheriting: a class that has the method.
            name: str.
        """
        return cls(next(each for each in inheriting.__mro__ if name in vars(each)), name)

    def get(self) -> Function:
        """Returns the function that is there now."""
        return getattr(self.owner, self.name)

    def set(self, function: Function) -> None:
        """Puts a function there.

        Args:
            function: the function.
        """
        setattr(self.owner, self.name, function)


class Everywhere(NamedTuple):
    """A function in all the modules of its library that define or import it.

    Attributes:
        function: the function.
        names: the names under which modules have it. Defaults to its own name.
    """

    function: Function
    names: tuple[str, ...] = ()

    def get(self) -> Function:
        """Returns the function."""
        return self.function


class Replacement(NamedTuple):
    """A row of what is replaced.

    Attributes:
        place: Name, Method or Everywhere. The function.
        make: takes the function, and returns what takes its place.
        when: When. Defaults to code in reach.
        feature: Feature that is off where TensorFlow or Keras lacks the function, or None.
    """

    place: Name | Method | Everywhere
    make: Callable[[Function], Function]
    when: When = When.IN_REACH
    feature: Feature | None = None


class _Replaced:
    """A function that is replaced.

    Attributes:
        original: the library's function.
        call: what takes its place.
        rows: the `Replacement`s.
    """

    def __init__(self, original: Any) -> None:
        self.original, self.rows = original, []
        function: Any = original.fget if isinstance(original, property) else original
        elsewhere = in_reach = function
        thread = reach.thread

        def call(*args: Any, **kwargs: Any) -> Any:
            if thread.dtype is None:
                return elsewhere(*args, **kwargs)
            return in_reach(*args, **kwargs)

        def use(rows: list[Replacement], made: Sequence[Function]) -> None:
            nonlocal elsewhere, in_reach
            elsewhere, in_reach = made
            self.rows = rows

        call = functools.wraps(function)(do_not_convert(call))
        if function.__name__ == "__init__":
            # Keras looks up the arguments in a way that does not see through wrappers.
            call.__signature__ = inspect.signature(function)  # pyright: ignore
        self.call: Any = property(call) if isinstance(original, property) else call
        self._function, self.use = function, use

    def made_by(self, rows: list[Replacement]) -> tuple[Function, Function]:
        """Returns the functions to call out of reach and in reach.

        They are the original, wrapped by its rows.
        """

        def wrapped(function: Function, when: When) -> Function:
            for row in rows:
                if row.when == when:
                    function = row.make(function)
            return function

        always = wrapped(self._function, When.ALWAYS)
        return wrapped(always, When.OUT_OF_REACH), wrapped(always, When.IN_REACH)


# By the function that takes the place of the original.
_replaced: dict[Any, _Replaced] = {}


@do_not_convert
def install(rows: Iterable[Replacement]) -> None:
    """Replaces functions, all or none.

    A row that is installed already changes nothing. It may be called while AutoGraph converts a
    function, and what it makes runs as it is written all the same.

    Args:
        rows: `Replacement`s. Those of features that are off are left out.

    Raises:
        MissingName: a row without a feature names a function that is not there.
    """
    with lock:
        there = {row for each in _replaced.values() for row in each.rows}
        new: dict[Any, list[Replacement]] = {}
        for row in dict.fromkeys(rows):
            if row not in there and (row.feature is None or features.is_on(row.feature)):
                new.setdefault(row.place.get(), []).append(row)
        # All functions are made first: if one cannot be made, nothing has been replaced.
        made = []
        for now, its_rows in new.items():
            replaced = _replaced.get(now) or _Replaced(now)
            all_rows = [*replaced.rows, *its_rows]
            made.append((now, replaced, all_rows, replaced.made_by(all_rows)))
        changes = []
        for now, replaced, all_rows, functions in made:
            replaced.use(all_rows, functions)
            if replaced.call is not now:
                _replaced[replaced.call] = replaced
                changes += [(row.place, now, replaced.call) for row in all_rows]
        _put(changes)


def installed() -> list[Replacement]:
    """Returns all rows that are installed in this process."""
    return [row for replaced in _replaced.values() for row in replaced.rows]


def _put(changes: Iterable[tuple[Name | Method | Everywhere, Any, Any]]) -> None:
    """Puts functions in the place of others.

    A library has thousands of modules, so what is replaced together takes one pass over them.
    """
    by_name: dict[str, list[tuple[str, Any, Any]]] = {}
    for place, before, after in changes:
        if not isinstance(place, Everywhere):
            place.set(after)
            continue
        library = place.function.__module__.partition(".")[0]
        for name in {place.function.__name__, *place.names}:
            by_name.setdefault(name, []).append((library, before, after))
    libraries = {library for found in by_name.values() for library, _, _ in found}
    for module_name, module in list(sys.modules.items()) if libraries else ():
        own_library = module_name.partition(".")[0]
        if own_library in libraries:
            for name in by_name.keys() & vars(module).keys():
                for library, before, after in by_name[name]:
                    if library == own_library and vars(module)[name] is before:
                        setattr(module, name, after)
                        break
