"""Where an operation comes from, and whether it computes the numbers that it returns."""

import functools
import inspect
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_mp.support import messages, op_table

# Functions of these files call gradient functions.
_GRADIENT_FILES = tuple(
    os.path.join("tensorflow", "python", *path)
    for path in (("eager", "backprop.py"), ("ops", "gradients_util.py"))
)

# Tools of keras_mp make their own operations through these files, two of which replace functions of
# TensorFlow that make any operation of a graph.
_BELOW_TOOLS = (
    os.path.join("tensorflow", "python", ""),
    os.path.join("keras_mp", "support", ""),
    os.path.join("keras_mp", "hooks", ""),
    os.path.join("keras_mp", "op_autocast", "promotion.py"),
    os.path.join("keras_mp", "kernels", "backward.py"),
    os.sep + "contextlib.py",
)

_DATA_FOLDER = os.path.join("tensorflow", "python", "data", "")

# They call every layer.
_BASE_LAYERS = ("layer.py", "base_layer.py")

_NUMERICS = os.path.dirname(os.path.dirname(__file__)) + os.sep


# Operations that move or rename numbers, and compute none.
SAFE = op_table.ops(
    *("arguments", "constants", "reads of variables", "fills", "no numbers"),
    *op_table.SAME_NUMBERS,
)


def is_safe(kind: str, outputs: Sequence[tf.Tensor]) -> bool:
    """Whether an operation returns the numbers that it takes: a cast to 8 bits changes many."""
    return kind in SAFE and not any(each.dtype.size == 1 for each in outputs)


class CallSite(NamedTuple):
    """Where an operation comes from.

    Attributes:
        is_gradient: whether it is a part of a gradient.
        at: the innermost line that is the user's own or that of a layer of Keras, or None.
        is_data: whether it belongs to a pipeline of `tf.data`.
        is_of_a_tool: whether a tool of this subpackage made it, such as histograms that count.
    """

    is_gradient: bool
    at: messages.Line | None
    is_data: bool
    is_of_a_tool: bool

    @property
    def line(self) -> str | None:
        """The line, as "model.py:12"."""
        return self.at and self.at.short


def place() -> CallSite:
    """Returns the origin of the operation that is running."""
    return place_in(_frames())


def _frames() -> Iterator[tuple[str, int]]:
    here = inspect.currentframe()
    frame = here and here.f_back
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def place_in(frames: Iterable[tuple[str, int]]) -> CallSite:
    """Finds the origin of an operation in a stack.

    Args:
        frames: names of files and numbers of lines, the innermost first.
    """
    is_gradient, is_data, line = False, False, None
    # The operation belongs to the caller of TensorFlow. In eager, this runs inside of TensorFlow.
    was_below, is_of_a_tool = False, None
    for file, number in frames:
        kind = _kind_of_file(file)
        if any(part in file for part in _BELOW_TOOLS):
            was_below = True
        elif was_below and is_of_a_tool is None:
            is_of_a_tool = kind == "end"
        # A gradient has a line only if it is a custom one; the line below is that of the tool.
        if kind == "end" and (line is not None or is_gradient):
            break
        if kind == "shown" and line is None:
            line = messages.Line(file, number)
        is_gradient = is_gradient or kind == "gradient"
        is_data = is_data or kind == "data"
    return CallSite(is_gradient, line, is_data, bool(is_of_a_tool))


@functools.cache
def _kind_of_file(file: str) -> str:
    if file == __file__:
        return "library"
    if file.startswith(_NUMERICS):
        # The frames below are those of code that called a tool of this subpackage.
        return "end"
    if file.endswith(_GRADIENT_FILES):
        return "gradient"
    if _DATA_FOLDER in file:
        return "data"
    if file == threading.__file__:  # in which replicas run
        return "library"
    is_layer = f"{os.sep}layers{os.sep}" in file and not file.endswith(_BASE_LAYERS)
    return "shown" if is_layer or not messages.is_library(file) else "library"
