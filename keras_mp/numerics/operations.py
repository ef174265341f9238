"""Operations as they run, or as they become part of a graph."""

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.support import messages, op_callbacks, op_table

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
    os.path.join("keras_mp", "op_autocast", "promotion.py"),
    os.path.join("keras_mp", "kernels", "backward.py"),
    os.sep + "contextlib.py",
)

_DATA_FOLDER = os.path.join("tensorflow", "python", "data", "")

# They call every layer.
_BASE_LAYERS = ("layer.py", "base_layer.py")

# Operations that move or rename numbers, and compute none.
SAFE = op_table.ops(
    *("arguments", "constants", "reads of variables", "fills", "no numbers"),
    *op_table.SAME_NUMBERS,
)


class KeptOperation(NamedTuple):
    """An operation that ran.

    Attributes:
        type: its type, "MatMul" say.
        inputs: the tensors that went in.
        outputs: those that came out.
        is_gradient: whether it ran for a gradient.
        line: the line of the program that it came from, "model.py:12"; None where only libraries
            had to do with it.
        scope: the name scope that it ran in.
    """

    type: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    is_gradient: bool
    line: str | None
    scope: str


class KeptOperations:
    """Operations that ran, in their order.

    Attributes:
        operations: list of KeptOperation. Those that compute floating-point numbers. One whose
            result is only rounded to 16 bits, as a sum in float32 is, has the rounded result.
    """

    def __init__(self) -> None:
        self.operations: list[KeptOperation] = []
        # The operation that computed a tensor, by the tensor's id, and the tensors, which are held
        # so that no other one gets the id.
        self._makers: dict[int, int] = {}
        self._held: list[Any] = []

    def is_computed(self, value: tf.Tensor) -> bool:
        """Whether one of the operations has computed a tensor."""
        return id(value) in self._makers

    def keep(
        self,
        kind: str | bytes,
        inputs: Sequence[tf.Tensor],
        attrs: object,
        outputs: Sequence[tf.Tensor],
        *_: Any,
        **__: Any,
    ) -> None:
        """Keeps an operation; `op_callbacks.observed` calls it."""
        del attrs
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if not any(value.dtype.is_floating for value in outputs):
            return
        if kind not in SAFE:
            maker = len(self.operations)
            where = place()
            self.operations.append(
                KeptOperation(
                    kind,
                    tuple(inputs),
                    tuple(outputs),
                    where.is_gradient,
                    where.line,
                    tf.get_current_name_scope(),
                )
            )
        else:
            maker = next((self._makers[id(v)] for v in inputs if self.is_computed(v)), None)
            if maker is None:
                return
            if kind == "Cast" and outputs[0].dtype.size < inputs[0].dtype.size:
                made = self.operations[maker]
                rounded = tuple(outputs[0] if v is inputs[0] else v for v in made.outputs)
                self.operations[maker] = made._replace(outputs=rounded)
        self._makers.update((id(value), maker) for value in outputs)
        self._held.extend(outputs)


@contextlib.contextmanager
def kept() -> Iterator[KeptOperations]:
    """Keeps the operations of the block."""
    seen = KeptOperations()
    with op_callbacks.observed(seen.keep):
        yield seen


class CallSite(NamedTuple):
    """Where an operation comes from.

    Attributes:
        is_gradient: whether it is a part of a gradient.
        line: the innermost line that is the user's own or that of a layer of Keras, as
            "model.py:12", or None.
        is_data: whether it belongs to a pipeline of `tf.data`.
        is_of_a_tool: whether a tool of this subpackage made it, such as histograms that count.
    """

    is_gradient: bool
    line: str | None
    is_data: bool
    is_of_a_tool: bool


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
            line = f"{os.path.basename(file)}:{number}"
        is_gradient = is_gradient or kind == "gradient"
        is_data = is_data or kind == "data"
    return CallSite(is_gradient, line, is_data, bool(is_of_a_tool))


@functools.cache
def _kind_of_file(file: str) -> str:
    if file == __file__:
        return "library"
    if os.path.dirname(file) == os.path.dirname(__file__):
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
