"""The operations that `FirstBadOperation` watches, which of them is the first, and its report.

A row says what an operation is, where it comes from and what uses its result. What it returned is
kept beside the table: `EagerRecorder` measures it at once, `graph_recorder` in the graph.
"""

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.numerics import origins
from keras_mp.numerics.origins import Origin
from keras_mp.numerics.results import begun
from keras_mp.support import op_table

# How many operations run in eager before the rows are read.
_EAGER_ROWS = 2**12

# Operations that test numbers, and do not compute with them.
_ONLY_LOOKS = op_table.ops("comparisons", "tests", "shapes")

# Operations that bring arguments into a graph.
PASSED_IN = op_table.ops("arguments", "data")

READS = op_table.ops("reads of variables")

# Results that are not finite where nothing is wrong: what the kernel keeps for the backward pass,
# and what has no value yet.
_NOT_CHECKED = op_table.ops("empty tensors", "variables")
_FIRST_OUTPUT_ONLY = ("FusedBatchNorm",)


@dataclasses.dataclass
class Range:
    """An operation, and the range of the numbers that it returned.

    Attributes:
        operation: str. Its type, "MatMul" say.
        layer: str. The path of its layer, such as "encoder/dense", if the model was passed; the
            name of the model for what it computes between its layers; else the name scopes.
        line: str or None. The line that it comes from, such as "model.py:12".
        dtype: str. The dtype of the numbers.
        is_gradient: bool. Whether it is a part of a gradient.
        low: float. The smallest finite number; Inf if there is none.
        high: float. The largest finite number; -Inf if there is none.
        bad: int. How many numbers are Inf or NaN.
    """

    operation: str
    layer: str
    line: str | None
    dtype: str
    is_gradient: bool
    low: float = math.inf
    high: float = -math.inf
    bad: int = 0

    @property
    def size(self) -> float:
        """The largest magnitude of a finite number; 0 if there is none."""
        return max(-self.low, self.high, 0.0) if self.low <= self.high else 0.0

    def __str__(self) -> str:
        where = f" in {self.layer}" if self.layer else ""
        line = f", {self.line}" if self.line else ""
        bad = f", {self.bad:,} not finite" if self.bad else ""
        numbers = f"{self.low:.3g} to {self.high:.3g}" if self.low <= self.high else "none finite"
        return f"{self.operation}{where} ({self.dtype}{line}): {numbers}{bad}"


class NotFiniteError(ArithmeticError):
    """The first operation whose result is not finite.

    Attributes:
        operation: Range of the operation.
        inputs: list of Range, of the operations whose results it takes.
        history: list of Range, for each layer before it the operation with the largest numbers,
            oldest first.
        device: str. The device that it ran on, which tells replicas apart; "" in eager.

    Example:

    >>> step = tf.function(lambda x: tf.sqrt(x - 1))
    >>> try:
    ...     with keras_mp.numerics.watch():
    ...         step(tf.constant(0.0))
    ... except keras_mp.numerics.NotFiniteError as error:
    ...     print(error.operation.operation, error.inputs[0].low)
    Sqrt -1.0
    """

    def __init__(
        self,
        operation: Range,
        inputs: Sequence[Range],
        history: Sequence[Range],
        device: str,
        advice: str,
    ) -> None:
        self.operation, self.inputs, self.history = operation, list(inputs), list(history)
        self.device = device
        way = "backward" if operation.is_gradient else "forward"
        lines = [
            f"The first operation whose result is not finite, in the {way} pass"
            f"{f' on {device}' if device else ''}:",
            f"  {operation}",
        ]
        if self.inputs:
            lines += ["Its inputs, from their smallest to their largest number:"]
            lines += [f"  {each}" for each in self.inputs]
        if self.history:
            lines += ["The layers before it, the last one last:"]
            lines += [f"  {each}" for each in self.history]
        super().__init__("\n".join([*lines, advice] if advice else lines))


@dataclasses.dataclass
class OperationRow(Range):
    """An operation, and what uses its result.

    Attributes:
        inputs: the rows of the operations whose results it takes.
        is_given: whether its result was there before: an argument, a weight, a constant.
        is_used: whether an operation with a row uses its result.
        is_used_elsewhere: whether an operation without a row uses its result.
        is_passed_on: whether its result is given to a function, which has rows of its own.
    """

    inputs: list[int] = dataclasses.field(default_factory=list)
    is_given: bool = False
    is_used: bool = False
    is_used_elsewhere: bool = False
    is_passed_on: bool = False

    def range(self, measured: np.ndarray) -> Range:
        """Returns the operation with the range of what it returned.

        Args:
            measured: array of the number of values that were not finite, the smallest and the
                largest finite one, and whether something began to be not finite here.
        """
        bad, low, high, _ = map(float, measured)
        return dataclasses.replace(self, low=low, high=high, bad=int(bad))


# A device, its operations, and an array of what was measured of each, as `range` takes it.
Read = tuple[str, list[OperationRow], np.ndarray]


class ByTensor:
    """What is known of tensors, for as long as each of them is there."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, weakref.ref[tf.Tensor]]] = {}

    def note(self, tensors: Iterable[tf.Tensor], what: object) -> None:
        """Notes something about tensors."""
        for each in tensors:
            # When it is no more, another one may get its id.
            forget = functools.partial(self._forget, id(each))
            self._known[id(each)] = what, weakref.ref(each, forget)

    def of(self, tensors: Iterable[tf.Tensor]) -> list[Any]:
        """Returns what was noted about those of which something was."""
        return [self._known[id(each)][0] for each in tensors if id(each) in self._known]

    def _forget(self, key: int, _: object) -> None:
        self._known.pop(key, None)


class OperationTable:
    """Operations, in the order in which they ran or became part of a graph.

    Attributes:
        rows: list of OperationRow.
        row_of: ByTensor, the number of the row that a tensor is the result of.
    """

    def __init__(self) -> None:
        self.rows: list[OperationRow] = []
        self.row_of = ByTensor()

    def outputs_to_check(
        self, kind: str, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns those results of an operation that should be finite; if there are any, add it.

        Args:
            kind: the type of the operation.
            inputs: what it takes.
            outputs: what it returns.
        """
        known = self.row_of.of(inputs)
        if origins.is_safe(kind, outputs):
            # The result is as good as what goes in.
            if known:
                self.row_of.note(outputs, known[0])
            return []
        checked = [value for value in outputs if value.dtype.is_floating]
        if kind in _NOT_CHECKED:
            checked = []
        elif kind.startswith(_FIRST_OUTPUT_ONLY):
            checked = checked[:1]
        if not checked and kind not in _ONLY_LOOKS:
            for i in known:
                self.rows[i].is_used_elsewhere = True
        return checked

    def add(
        self,
        kind: str,
        origin: Origin,
        values: Sequence[tf.Tensor],
        inputs: list[int],
        is_given: bool = False,
    ) -> int:
        """Adds an operation.

        Args:
            kind: its type.
            origin: where it comes from.
            values: tensors that it returned.
            inputs: the rows of what went in.
            is_given: as in `OperationRow`.

        Returns:
            The number of the row.
        """
        index = len(self.rows)
        # What is made of gradients, such as their sum over replicas, overflows as they do.
        is_gradient = origin.is_gradient or any(self.rows[i].is_gradient for i in inputs)
        dtype, line = values[0].dtype.name, origin.line and origin.line.short
        row = OperationRow(kind, origin.layer, line, dtype, is_gradient)
        row.inputs, row.is_given = inputs, is_given
        self.rows.append(row)
        for i in inputs:
            self.rows[i].is_used = True
        self.row_of.note(values, index)
        return index


class EagerRecorder(OperationTable):
    """Watches the operations that run in eager.

    Attributes:
        measured: list of what each row's operation returned, as `OperationRow.range` takes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.measured: list[tuple[float, ...]] = []

    def read(self) -> Iterator[Read]:
        """Yields what was measured since the last time."""
        if self.rows:
            yield "", self.rows, np.array(self.measured)
            self.rows, self.measured, self.row_of = [], [], ByTensor()

    def record(self, kind: str, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]) -> None:
        """Records an operation that has run."""
        checked = self.outputs_to_check(kind, inputs, outputs)
        if not checked:
            return
        origin = origins.running()
        if origin.is_of_a_tool:
            return
        known = self.row_of.of(inputs)
        self.add(kind, origin, checked, known)
        numbers = np.concatenate([value.numpy().ravel() for value in checked])
        numbers = numbers.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        bad = numbers.size - finite.size
        low, high = finite.min(initial=math.inf), finite.max(initial=-math.inf)
        begins_here = bad > 0 and not any(self.measured[i][0] for i in known)
        self.measured.append((bad, low, high, begins_here))

    def is_full(self) -> bool:
        """Whether to read the rows, but not before what is not finite may have been used."""
        return len(self.rows) >= _EAGER_ROWS and not self.measured[-1][0]

    def pass_on(self, inputs: Sequence[tf.Tensor]) -> None:
        """Records what was given to a function, which has rows of its own."""
        for i in self.row_of.of(inputs):
            self.rows[i].is_passed_on = True


def first_bad(
    rows: list[OperationRow], measured: np.ndarray, is_checked: Callable[[OperationRow], bool]
) -> int | None:
    """Returns the first row where something begins to be not finite and reaches what matters.

    Args:
        rows: list of OperationRow.
        measured: array with a row for each, as `OperationRow.range` takes it.
        is_checked: whether a row may be the first. What comes of one that may not can be.
    """
    bad, begins_here = measured[:, 0] > 0, measured[:, 3] > 0
    for i in map(int, np.flatnonzero(bad)):
        sources = [j for j in rows[i].inputs if bad[j]]
        came_unchecked = bool(sources) and not any(is_checked(rows[j]) for j in sources)
        begins_here[i] = is_checked(rows[i]) and (begins_here[i] or came_unchecked)
    ends = [row.is_used_elsewhere or not (row.is_used or row.is_passed_on) for row in rows]
    culprits = begun([row.inputs for row in rows], bad, np.array(ends), begins_here)
    # What is given to a graph inside of another one, to a loop's body, has been computed outside.
    results = [i for i in culprits if not rows[i].is_given]
    return min(results or culprits, default=None)
