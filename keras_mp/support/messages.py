"""Warnings of keras_mp: one category, raised at the user's own line."""

import functools
import inspect
import os
import re
import sys
import warnings
from typing import Any, NamedTuple

_PACKAGES = ("keras_mp", "tensorflow", "keras", "tf_keras")
_PYTHON = os.path.dirname(os.__file__) + os.sep
# Both Kerases call a layer by way of optree or tree.
_OTHERS = re.compile(r"__autograph_generated_file|site-packages[\\/](optree|tree)[\\/]")

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
    file, number = line or users_line()
    registry = _registries.setdefault(file, {})
    warnings.warn_explicit(message, MixedPrecisionWarning, file, number, registry=registry)


def is_library(filename: str) -> bool:
    """Whether a file is one of Python, TensorFlow, Keras, AutoGraph or this package."""
    return library_of(filename) is not None


@functools.cache
def library_of(filename: str) -> str | None:
    """Returns the package of a library's file, or "python"; None for a program's."""
    if filename.endswith("__main__.py"):
        return None
    for package in _PACKAGES:
        file = getattr(sys.modules.get(package), "__file__", None)
        if file and filename.startswith(os.path.dirname(file) + os.sep):
            return package
    is_python = filename.startswith(_PYTHON) and "-packages" not in filename
    return "python" if is_python or _OTHERS.search(filename) else None
