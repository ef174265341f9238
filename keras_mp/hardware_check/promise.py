"""What is promised, and whether it is kept."""

from collections.abc import Callable
from typing import NamedTuple


class Promise(NamedTuple):
    """A promise on this machine.

    Attributes:
        name: str. What is promised.
        kept: bool.
        figure: str. What was found.
    """

    name: str
    kept: bool
    figure: str


def judge(name: str, find: Callable[[], tuple[bool, str]]) -> Promise:
    """Finds out whether a promise is kept. One that raises is not.

    Args:
        name: str. What is promised.
        find: returns whether it is kept, and what was found.
    """
    try:
        kept, figure = find()
    except Exception as error:  # Whatever is wrong with one, the others are to be judged, too.
        first = next(iter(str(error).splitlines()), "")
        return Promise(name, False, f"{type(error).__name__}: {first}")
    return Promise(name, bool(kept), figure)
