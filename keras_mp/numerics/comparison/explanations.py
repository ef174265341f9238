"""Finds the operation that went wrong inside of one call of a layer, and explains it."""

import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.numerics.comparison.layer_calls import is_floating, shape_of
from keras_mp.numerics.comparison.runs import array
from keras_mp.numerics.distances import SMALLEST, UNIT_ROUNDOFF, relative, rms, underflow
from keras_mp.numerics.operations.kept import KeptOperation, KeptOperations
from keras_mp.support import op_table
from keras_mp.support.messages import Line

_REDUCTIONS = op_table.ops("sums over axes", "sums of tensors", "gradients of biases")
_PRODUCTS = op_table.ops("matrix products", "matrix products into another dtype") | {"Conv2D"}
_POLES = op_table.ops("divisions", "reciprocals", "powers") | {"Log"}
_DIFFERENCES = op_table.ops("additions", "squared differences")

# A difference that is so many times smaller than its inputs is called a cancellation.
_CANCELS = 32


# A smaller share of zeros is not mentioned.
_FEW_ZEROS = 0.01


class Explanation(NamedTuple):
    """The explanation of a finding.

    Attributes:
        what: str. The operation and its error.
        line: the line of the program, or None.
    """

    what: str
    line: Line | None


def explain(
    narrow: KeptOperations, wide: KeptOperations, side: str, dtype: str
) -> Explanation | None:
    """Finds the first operation that does not do in 16 bits what it does in float32.

    Args:
        narrow: what ran in 16 bits.
        wide: what ran in float32, of the same call on the same inputs.
        side: "forward" or "backward".
        dtype: the one of 16 bits.

    Returns:
        Explanation, or None where all operations agree.
    """
    worst, most = None, 0.0
    ops, wide_ops = (
        [op for op in each.operations if op.is_gradient == (side == "backward")]
        for each in (narrow, wide)
    )
    for i, j in matches(ops, wide_ops):
        op, exact = ops[i], wide_ops[j]
        before, after = _apart(op.inputs, exact.inputs), _apart(op.outputs, exact.outputs)
        lost = _lost_inputs(op, exact, dtype, narrow)
        if lost is not None:
            return Explanation(lost, op.line)
        if math.isinf(after) and not math.isinf(before):
            return Explanation(_not_finite(op, exact, dtype), op.line)
        rise = after / max(before, UNIT_ROUNDOFF[dtype])
        if rise > most:
            worst, most = (op, exact), rise
    if worst is None or most <= 2:
        return None
    return Explanation(_inexact(*worst, dtype), worst[0].line)


def matches(
    narrow: Sequence[KeptOperation], wide: Sequence[KeptOperation]
) -> Iterator[tuple[int, int]]:
    """Yields the indices of the operations that two runs have in common."""
    kinds = [[(op.type, op.is_gradient) for op in ops] for ops in (narrow, wide)]
    matcher = difflib.SequenceMatcher(None, *kinds, autojunk=False)
    for start, other, count in matcher.get_matching_blocks():
        yield from zip(range(start, start + count), range(other, other + count))


def _arrays(tensors: Iterable[tf.Tensor]) -> list[np.ndarray]:
    return [array(value) for value in tensors if is_floating(value)]


def _both(
    narrow: Iterable[tf.Tensor], wide: Iterable[tf.Tensor]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the floating-point tensors with the same shape in both, as arrays."""
    for n, w in zip(narrow, wide):
        if is_floating(n) and is_floating(w) and n.shape == w.shape:
            yield array(n), array(w)


def _apart(narrow: Iterable[tf.Tensor], wide: Iterable[tf.Tensor]) -> float:
    return max((relative(n, w) for n, w in _both(narrow, wide)), default=0.0)


def _lost_inputs(
    op: KeptOperation, exact: KeptOperation, dtype: str, operations: KeptOperations
) -> str | None:
    """Describes an input that 16 bits do not hold, unless an operation has computed it."""
    pairs = [(n, w) for n, w in zip(op.inputs, exact.inputs) if not operations.is_computed(n)]
    for n, w in _both(*zip(*pairs)) if pairs else ():
        largest = np.abs(w).max(initial=0)
        takes, are = "takes numbers", "which are"
        if w.size == 1:
            takes, are = "takes a constant", "which is"
        what = f"{op.type} {takes} of {largest:.1g}, {are}"
        if 0 < largest < SMALLEST[dtype] and not n.any():
            return f"{what} 0 in {dtype}: its smallest number is {SMALLEST[dtype]:.1g}"
        if np.isfinite(largest) and not np.isfinite(n).all():
            return f"{what} infinite in {dtype}: its largest number is {_largest(dtype)}"
    return None


def _largest(dtype: str) -> str:
    return f"{float(tf.as_dtype(dtype).max):,.0f}" if dtype == "float16" else "3.4e38"


def _not_finite(op: KeptOperation, exact: KeptOperation, dtype: str) -> str:
    kind, terms = op.type, _terms(op)
    wide = np.concatenate([values.ravel() for values in _arrays(exact.outputs)])
    narrow = np.concatenate([values.ravel() for values in _arrays(op.outputs)])
    reached = np.abs(wide[np.isfinite(wide)]).max(initial=0)
    bad = f"{np.count_nonzero(~np.isfinite(narrow)):,} of {narrow.size:,} results are not finite"
    of_terms = f", a sum over {terms:,} values," if terms > 1 else ""
    if reached > float(tf.as_dtype(dtype).max):
        return (
            f"overflow: {kind}{of_terms} reaches {reached:.3g}; the largest {dtype} is "
            f"{_largest(dtype)}"
        )
    if kind in _POLES and any((values == 0).any() for values in _arrays(op.inputs)):
        return f"{kind} of zero: {bad} in {dtype}"
    if terms > 1:
        only = f"though the result is only {reached:.3g}"
        return f"overflow inside of {kind}{of_terms} {only}: {bad} in {dtype}"
    return f"{kind}: {bad} in {dtype}; in float32 they reach {reached:.3g}"


def _inexact(op: KeptOperation, exact: KeptOperation, dtype: str) -> str:
    kind, terms = op.type, _terms(op)
    outputs = list(_both(op.outputs, exact.outputs))
    narrow, wide = max(outputs, key=lambda values: relative(*values))
    off, size = relative(narrow, wide), rms(wide)
    inputs = _arrays(exact.inputs)
    largest = max((rms(values[np.isfinite(values)]) for values in inputs), default=0.0)
    of_numbers = (
        f"{kind} of numbers of about {largest:.3g}, which are multiples of "
        f"{_spacing(largest, dtype):.1g} in {dtype}"
    )
    if kind in _DIFFERENCES and len(inputs) == 2 and largest > _CANCELS * size:
        return f"cancellation: {of_numbers}, leaves {size:.1g}, off by {off:.1%}"
    zeros = underflow(narrow, wide)
    if zeros > _FEW_ZEROS:
        return (
            f"underflow: {zeros:.0%} of the results of {kind} are 0 in {dtype} and not in "
            f"float32, where they are about {size:.1g}"
        )
    if terms > 1:
        return f"{kind}, a sum over {terms:,} values in {dtype}, is off by {off:.2%}"
    return f"{of_numbers}, is off by {off:.2%}"


def _spacing(size: float, dtype: str) -> float:
    """Returns the distance between neighbouring numbers of a dtype that are about so large."""
    if not 0 < size < math.inf:
        return 0.0
    return 2.0 ** math.floor(math.log2(size)) * 2 * UNIT_ROUNDOFF[dtype]


def _terms(operation: KeptOperation) -> int:
    """Returns how many terms are summed for each result."""
    sizes = [math.prod(shape_of(v)) for v in operation.inputs if is_floating(v)]
    result = max(math.prod(shape_of(v)) for v in operation.outputs)
    if not sizes or not result:
        return 1
    if operation.type == "Cumsum":
        return max(operation.inputs[0].shape)
    if operation.type in _REDUCTIONS:
        return sum(sizes) // result
    if operation.type in _PRODUCTS and len(sizes) == 2:
        return max(1, round(math.sqrt(sizes[0] * sizes[1] / result)))
    return 1
