"""What is known of each operation that is watched: a row, whether it ran in eager or in a graph."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.numerics import operations, watching
from keras_mp.numerics.not_finite import Range
from keras_mp.support import op_table

# After so many operations in eager the rows are read.
_EAGER_ROWS = 2**12

# Operations that look at numbers that are not finite, and do not use them.
ONLY_LOOKS = op_table.ops("comparisons", "tests", "shapes")

# They bring arguments into a graph.
PASSED_IN = op_table.ops("arguments", "data")

# Results that are not finite where nothing is wrong: what the kernel keeps for the backward pass,
# and what has no value yet.
_NOT_LOOKED_AT = op_table.ops("empty tensors", "variables")
_FIRST_OUTPUT_ONLY = ("FusedBatchNorm",)


@dataclasses.dataclass
class OperationRow:
    """What is known of an operation while it is not run."""

    operation: str
    layer: str
    line: str | None
    dtype: str
    is_gradient: bool
    inputs: list[int]
    # Whether it was there before: an argument, a weight, a constant.
    is_given: bool = False
    # The rows of the operations that use its result; and whether one without a row does.
    users: list[int] = dataclasses.field(default_factory=list)
    is_used_elsewhere: bool = False
    # Whether it is given to a function, which watches for itself what comes of it.
    is_passed_on: bool = False

    def seen(self, values: Sequence[float]) -> Range:
        """What it returned when it ran.

        Args:
            values: how many of the numbers were bad, the smallest and the largest finite one, and
                whether something began to be bad here.
        """
        bad, low, high, _ = values
        return Range(
            self.operation,
            self.layer,
            self.line,
            self.dtype,
            float(low),
            float(high),
            int(bad),
            self.is_gradient,
        )


class EagerRecorder:
    """Watches the operations that run in eager.

    Attributes:
        rows: list of OperationRow, since rows were last taken.
    """

    def __init__(self) -> None:
        self.rows: list[OperationRow] = []
        self._values: list[tuple[float, ...]] = []
        self._row_of: dict[int, int] = {}
        self._held: list[Any] = []

    def see(self, kind: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Takes note of an operation that has run."""
        known = [self._row_of[id(value)] for value in inputs if id(value) in self._row_of]
        checked = checked_outputs(kind, outputs)
        if kind in operations.SAFE:
            if known:
                self._row_of.update((id(value), known[0]) for value in outputs)
                self._held.extend(outputs)
            return
        if not checked:
            for i in known if kind not in ONLY_LOOKS else ():
                self.rows[i].is_used_elsewhere = True
            return
        place = operations.place()
        if place.is_of_a_tool:
            return
        layer = watching.running_layer() or layers_of_scope(tf.get_current_name_scope())
        index = append(self.rows, kind, layer, place, checked[0], known)
        self._row_of.update((id(value), index) for value in checked)
        self._held.extend(outputs)
        numbers = np.concatenate([value.numpy().ravel() for value in checked])
        numbers = numbers.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        bad = numbers.size - finite.size
        low, high = finite.min(initial=math.inf), finite.max(initial=-math.inf)
        begins_here = bad > 0 and not any(self._values[i][0] for i in known)
        self._values.append((bad, low, high, begins_here))

    def is_full(self) -> bool:
        """Whether it is time to look. What was just computed has to be used first, if it is bad."""
        return len(self.rows) >= _EAGER_ROWS and not self._values[-1][0]

    def pass_on(self, inputs: Sequence[Any]) -> None:
        """Takes note of what was given to a function, which watches for itself."""
        for value in inputs:
            if id(value) in self._row_of:
                self.rows[self._row_of[id(value)]].is_passed_on = True

    def take(self) -> tuple[list[OperationRow], np.ndarray]:
        """Returns the rows so far with their values, and begins anew."""
        rows, values = self.rows, np.array(self._values)
        self.__init__()
        return rows, values


def append(
    rows: list[OperationRow],
    kind: str,
    layer: str,
    place: operations.CallSite,
    value: Any,
    known: list[int],
    is_given: bool = False,
) -> int:
    """Appends a row.

    Args:
        rows: list of OperationRow.
        kind: str. The type of the operation.
        layer: str.
        place: CallSite.
        value: tensor that it returned.
        known: list of int. The rows of what went in.
        is_given: bool. Whether it was there before: an argument, a weight, a constant.

    Returns:
        int. The index of the row.
    """
    index = len(rows)
    # What is made of gradients, such as their sum over replicas, overflows as they do.
    is_gradient = place.is_gradient or any(rows[i].is_gradient for i in known)
    row = OperationRow(kind, layer, place.line, value.dtype.name, is_gradient, known, is_given)
    rows.append(row)
    for i in set(known):
        rows[i].users.append(index)
    return index


def checked_outputs(kind: str, outputs: Sequence[Any]) -> list[Any]:
    """Of what an operation returned, the tensors that should be finite."""
    if kind in _NOT_LOOKED_AT:
        return []
    floating = [value for value in outputs if value.dtype.is_floating]
    return floating[:1] if kind.startswith(_FIRST_OUTPUT_ONLY) else floating


def first_bad(
    rows: list[OperationRow], values: np.ndarray, is_checked: Callable[[OperationRow], bool]
) -> int | None:
    """The first row where something begins to be bad that goes on to somewhere that matters.

    Args:
        rows: list of OperationRow.
        values: array, what `OperationRow.seen` takes of each.
        is_checked: whether a row may be the first. What comes of one that may not can be.
    """
    bad, begins_here = values[:, 0] > 0, values[:, 3] > 0
    for i in map(int, np.flatnonzero(bad)):
        sources = [j for j in rows[i].inputs if bad[j]]
        came_unchecked = bool(sources) and not any(is_checked(rows[j]) for j in sources)
        begins_here[i] = is_checked(rows[i]) and (begins_here[i] or came_unchecked)
    reaches = np.zeros(len(rows), bool)
    for i in reversed(range(len(rows))):
        if bad[i]:
            row = rows[i]
            is_last = not row.users and not row.is_passed_on
            reaches[i] = row.is_used_elsewhere or is_last or reaches[row.users].any()
    culprits = [int(i) for i in np.flatnonzero(reaches & begins_here)]
    # What is given to a graph inside of another one, to a loop's body, has been computed outside.
    made = [i for i in culprits if not rows[i].is_given]
    return min(made or culprits, default=None)


def layers_of_scope(scope: str) -> str:
    """The layers of a name scope; that of a gradient is the one of its forward pass."""
    return re.sub(r"(^|/)(gradient_tape|replica_\d+)(?=/|$)", "", scope).strip("/")
