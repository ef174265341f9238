"""Checks arguments; the errors show the value."""

import math
import numbers
import operator

_HOLDS = {"at_least": operator.ge, "above": operator.gt}
_HOLDS |= {"below": operator.lt, "at_most": operator.le}


def number(name: str, value: float, **bounds: float) -> float:
    """Checks that an argument is a finite number within bounds.

    Args:
        name: str. The argument's name, for the message.
        value: the argument.
        **bounds: `at_least`, the lowest value allowed; `above`, than which the value must be
            greater; `below`, than which it must be less; `at_most`, the highest value allowed.

    Returns:
        The value as a float.

    Raises:
        TypeError: it is not a number (or is a bool).
        ValueError: it is NaN or out of bounds.
    """
    if not _is_a(numbers.Real, value):
        raise TypeError(
            f"`{name}` must be an int or a float. Received: {name}={value!r} "
            f"(of type {type(value)})"
        )
    if not (all(_HOLDS[how](value, to) for how, to in bounds.items()) and math.isfinite(value)):
        words = " and ".join(f"{how.replace('_', ' ')} {bound:g}" for how, bound in bounds.items())
        raise ValueError(f"`{name}` must be finite and {words}. Received: {name}={value!r}")
    return float(value)


def _is_a(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def integer(name: str, value: int, below: int = 2**63, at_least: int = 1) -> int:
    """Checks that an argument is a whole number within bounds.

    Args:
        name: str. The argument's name, for the message.
        value: the argument.
        below: int. The value must be less. Defaults to 2**63: an int64 holds it.
        at_least: int. Lowest value allowed. Defaults to 1.

    Returns:
        The value as an int.

    Raises:
        TypeError: it is not a whole number (or is a bool).
        ValueError: it is out of bounds.
    """
    if not _is_a(numbers.Integral, value):
        raise TypeError(
            f"`{name}` must be an int. Received: {name}={value!r} (of type {type(value)})"
        )
    if not at_least <= value < below:
        raise ValueError(
            f"`{name}` must be at least {at_least} and below {below}. Received: {name}={value!r}"
        )
    return int(value)


def integer_or_none(name: str, value: int | None) -> int | None:
    """Checks that an argument is None, or a whole number of at least 1."""
    return None if value is None else integer(name, value)


def boolean(name: str, value: bool) -> bool:
    """Checks that an argument is True or False.

    Args:
        name: str. The argument's name, for the message.
        value: the argument.

    Returns:
        The value.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be a bool. Received: {name}={value!r}")
    return value
