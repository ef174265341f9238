"""Warnings of keras_mp: one category, raised at the user's own line."""

import contextlib
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

_PACKAGES = ("keras_mp", "tensorflow", "keras", "tf_keras")
_AUTOGRAPH = "__autograph_generated_file"

# By file: the registry in which Python's filters note the warnings that they have shown.
_registries: dict[str, dict[Any, Any]] = {}


class MixedPrecisionWarning(UserWarning):
    """The category of all warnings of keras_mp.

    One filter reaches all of them.

    Example:

    >>> import warnings
    >>> warnings.filterwarnings("ignore", category=keras_mp.MixedPrecisionWarning)
    """


class Line(NamedTuple):
    """A line of a user's program.

    Attributes:
        file: name of the file.
        number: number of the line.
    """

    file: str
    number: int

    @property
    def short(self) -> str:
        """Such as "model.py:12"."""
        return f"{os.path.basename(self.file)}:{self.number}"


def users_line() -> Line:
    """Returns the line of the first caller outside the libraries."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno)


def warn(message: str, line: Line | None = None) -> None:
    """Warns with `MixedPrecisionWarning`, pointing at the user's line.

    Args:
        message: str. The problem and the cure.
        line: Line. The line to point at; by default the one that is being executed.
    """
    if _thread.is_unheard:
        return
    file, number = line or users_line()
    registry = _registries.setdefault(file, {})
    warnings.warn_explicit(message, MixedPrecisionWarning, file, number, registry=registry)


class _Thread(threading.local):
    """Whether this thread leaves out warnings."""

    is_unheard = False


_thread = _Thread()


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Leaves out the warnings of this thread inside of the block.

    Python's own filter, which `warnings.catch_warnings` sets, applies to all threads.
    """
    before, _thread.is_unheard = _thread.is_unheard, True
    try:
        yield
    finally:
        _thread.is_unheard = before


def is_library(filename: str) -> bool:
    """Whether a file is one of TensorFlow, Keras, AutoGraph or this package."""
    if filename.endswith("__main__.py"):
        return False
    loaded = (sys.modules.get(package) for package in _PACKAGES)
    files = [module.__file__ for module in loaded if module is not None]
    folders = [os.path.dirname(file) for file in files if file is not None]
    return (
        _AUTOGRAPH in filename
        or filename == contextlib.__file__
        or any(filename.startswith(folder + os.sep) for folder in folders)
    )
