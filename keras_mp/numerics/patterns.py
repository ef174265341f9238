"""Patterns that choose layers, variables and operations by their paths and names."""

import itertools
from collections.abc import Iterable
from fnmatch import fnmatchcase


def listed(argument: str, patterns: str | Iterable[str]) -> list[str]:
    """Returns patterns as a list.

    Args:
        argument: str. What they were passed as.
        patterns: a pattern, or several.

    Raises:
        TypeError: they are no str.
    """
    found = [patterns] if isinstance(patterns, str) else list(patterns)
    if not all(isinstance(each, str) for each in found):
        raise TypeError(
            "Expected types of operations and paths of layers or variables, or patterns of them, "
            f"for `{argument}`. Received: {patterns!r}"
        )
    return found


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path is among patterns, as `fnmatch` takes them.

    A pattern matches a path, such as "encoder/dense_*", or a name in it, and all that is inside of
    what it matches.

    Args:
        path: str.
        patterns: iterable of str.

    Example:

    >>> from keras_mp.numerics import patterns
    >>> path = "block/odd[1]/kernel"
    >>> [patterns.matches(path, [each]) for each in ("block", "odd[1]", "odd*", "kernel", "c*")]
    [True, True, True, True, False]
    """
    names = path.split("/")
    known = {*names, *itertools.accumulate(names, "{}/{}".format)}
    return any(each == name or fnmatchcase(name, each) for each in patterns for name in known)


def chosen(argument: str, patterns: str | Iterable[str], paths: Iterable[str]) -> list[str]:
    """Returns the paths that patterns match, in their order.

    Args:
        argument: str. What the patterns were passed as.
        patterns: a pattern, or several.
        paths: all of them.

    Raises:
        TypeError: the patterns are no str.
        ValueError: one matches no path.
    """
    wanted, known = listed(argument, patterns), list(paths)
    if unknown := [each for each in wanted if not any(matches(path, [each]) for path in known)]:
        raise ValueError(
            f"Expected paths, or patterns of them, for `{argument}`: {known}. Received: {unknown}"
        )
    return [path for path in known if matches(path, wanted)]
