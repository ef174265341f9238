"""The first operation whose result is not finite: which one it is, and what led to it.

It is judged by the rows of a table of operations (`operation_table.py`), which `watch` fills.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from keras_mp.numerics import results as causes
from keras_mp.numerics.operation_table import Range, Read
from keras_mp.support import op_table

# Operations that bring arguments into a graph.
_PASSED_IN = op_table.ops("arguments", "data")
READS = op_table.ops("reads of variables")
_CONSTANTS = op_table.ops("constants")

# How many of the layers before the first bad operation a message shows.
_HISTORY = 12


@dataclasses.dataclass(eq=False, repr=False)
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

    operation: Range
    inputs: list[Range]
    history: list[Range]
    device: str
    advice: dataclasses.InitVar[str]

    def __post_init__(self, advice: str) -> None:
        way = "backward" if self.operation.is_gradient else "forward"
        on = f" on {self.device}" if self.device else ""
        first = f"The first operation whose result is not finite, in the {way} pass{on}:"
        parts = {
            first: [self.operation],
            "Its inputs, from their smallest to their largest number:": self.inputs,
            "The layers before it, the last one last:": self.history,
        }
        texts = ("\n  ".join([what, *map(str, of)]) for what, of in parts.items() if of)
        super().__init__("\n".join([*texts, advice]).rstrip())


def first_error(
    reads: Iterable[Read], is_checked: Callable[[Range], bool], is_scaled: bool, is_named: bool
) -> NotFiniteError | None:
    """Returns an error about the operation where something begins to be not finite.

    Args:
        reads: what was measured on each device.
        is_checked: whether an operation may be the first.
        is_scaled: whether a dynamic loss scale is known, which may fall.
        is_named: whether the model is known, which `check` takes.

    Returns:
        The error; None if nothing is not finite that reaches what matters.
    """
    found = [(first, read) for read in reads for first in _firsts(*read[1:], is_checked)]
    if not found:
        return None
    # What replicas do together comes after what each of them has done.
    first, (device, rows, measured) = min(found, key=operator.itemgetter(0))
    ranges = [
        dataclasses.replace(row, low=low, high=high, bad=int(bad))
        for row, (bad, low, high, _) in zip(rows[: first + 1], measured.tolist())
    ]
    bad, layers = ranges[first], dict[str, Range]()
    for seen in ranges:
        has_run = (seen.low or seen.high) and not seen.bad and not seen.is_given
        if has_run and seen.layer != bad.layer:
            before = layers.pop(seen.layer, seen)
            layers[seen.layer] = max(before, seen, key=lambda each: each.size)
    inputs = [ranges[i] for i in bad.inputs]
    behind = [bad, *inputs, *(ranges[j] for each in inputs for j in each.inputs)]
    advice = _advice(bad, inputs, behind, is_scaled, is_named)
    return NotFiniteError(bad, inputs, list(layers.values())[-_HISTORY:], device, advice)


def _firsts(
    rows: Sequence[Range], measured: np.ndarray, is_checked: Callable[[Range], bool]
) -> list[int]:
    """Returns the first row where something begins to be not finite; none if that goes nowhere."""
    bad, begins_here = measured[:, 0] > 0, measured[:, 3] > 0
    for i in map(int, np.flatnonzero(bad)):
        # What comes of an operation that may not be the first can be.
        sources = [j for j in rows[i].inputs if bad[j]]
        came_unchecked = bool(sources) and not any(is_checked(rows[j]) for j in sources)
        begins_here[i] = is_checked(rows[i]) and (begins_here[i] or came_unchecked)
    ends = np.array([row.is_used_elsewhere or not row.is_used for row in rows])
    culprits = causes.begun([row.inputs for row in rows], bad, ends, begins_here)
    # What is given to a graph inside of another one, to a loop's body, was computed outside.
    return ([i for i in culprits if not rows[i].is_given] or culprits)[:1]


def _advice(
    found: Range, inputs: list[Range], behind: list[Range], is_scaled: bool, is_named: bool
) -> str:
    """Returns what the numbers of an operation, and of those behind it, say about the cause."""
    weights = [each for each in behind if each.operation in READS]
    size = max((math.inf if each.bad else each.size for each in weights), default=0.0)
    are = f"reach {size:.3g}" if math.isfinite(size) else "are not finite"
    is_input = found.operation == "Cast" and any(of.operation in _PASSED_IN for of in inputs)
    said = {
        "It was already not finite when it was passed in.": found.operation in _PASSED_IN,
        "If a dynamic loss scale skips such steps, pass the model or the optimizer to `watch`, "
        "which then goes on.": found.is_gradient and not is_scaled,
        f"Weights {are}: if training has made them so, it has diverged. Lower the learning rate, "
        "and restart from earlier weights.": size >= causes.LARGE["Weights"],
        f"This input is too large for {found.dtype}: normalize it first, in float32.": is_input,
        f"This constant is too large for {found.dtype}. For a mask, use the lowest number of the "
        "dtype, or tf.where on the result.": found.operation in _CONSTANTS,
        "print(keras_mp.numerics.check(model, (x, y))), with this batch, names the cure.": is_named,
    }
    return next((text for text, is_so in said.items() if is_so), "")
