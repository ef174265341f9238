"""What went wrong inside of one call of a layer: the operation, and what it did to its numbers."""

import difflib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.numerics import runs
from keras_mp.numerics.distances import UNIT_ROUNDOFF, relative, rms, underflow
from keras_mp.numerics.operations import Kept, KeptOperation
from keras_mp.support import op_table

_REDUCTIONS = op_table.ops("sums over axes", "sums of tensors", "gradients of biases")
_PRODUCTS = op_table.ops("matrix products", "matrix products into another dtype") | {"Conv2D"}
_POLES = op_table.ops("divisions", "reciprocals", "powers") | {"Log"}
_DIFFERENCES = op_table.ops("additions", "squared differences")

# A result that is that much smaller than what it is computed from has lost that many units.
_CANCELS = 32

# The smallest number above zero, a subnormal one.
_SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}

# A smaller share of zeros is not worth a word.
_FEW_ZEROS = 0.01


class Explanation(NamedTuple):
    """What was found in a call.

    Attributes:
        what: str. The operation, and what it did.
        line: str or None. The line that it comes from.
    """

    what: str
    line: str | None


class _Pair(NamedTuple):
    """The same operation in 16 bits and in float32."""

    narrow: KeptOperation
    wide: KeptOperation


def explain(narrow: Kept, wide: Kept, side: str, dtype: str) -> Explanation | None:
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
    of_side = [
        [op for op in each.operations if op.is_gradient == (side == "backward")]
        for each in (narrow, wide)
    ]
    for pair in _pairs(*of_side):
        before = max([_apart(n, w) for n, w in zip(pair.narrow.inputs, pair.wide.inputs)] or [0.0])
        after = max([_apart(n, w) for n, w in zip(pair.narrow.outputs, pair.wide.outputs)] or [0.0])
        lost = _lost_inputs(pair, dtype, narrow)
        if lost is not None:
            return Explanation(lost, pair.narrow.line)
        if math.isinf(after) and not math.isinf(before):
            return Explanation(_not_finite(pair, dtype), pair.narrow.line)
        rise = after / max(before, UNIT_ROUNDOFF[dtype])
        if rise > most:
            worst, most = pair, rise
    if worst is None or most <= 2:
        return None
    return Explanation(_inexact(worst, dtype), worst.narrow.line)


def matches(
    narrow: Sequence[KeptOperation], wide: Sequence[KeptOperation]
) -> Iterator[tuple[int, int]]:
    """Yields which operations of two runs are the same, by their places in both."""
    kinds = [[(op.type, op.is_gradient) for op in ops] for ops in (narrow, wide)]
    matcher = difflib.SequenceMatcher(None, *kinds, autojunk=False)
    for start, other, count in matcher.get_matching_blocks():
        yield from zip(range(start, start + count), range(other, other + count))


def _pairs(narrow: list[KeptOperation], wide: list[KeptOperation]) -> Iterator[_Pair]:
    return (_Pair(narrow[i], wide[j]) for i, j in matches(narrow, wide))


def _is_number(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def _apart(narrow: Any, wide: Any) -> float:
    if not (_is_number(narrow) and _is_number(wide) and narrow.shape == wide.shape):
        return 0.0
    return relative(runs.array(narrow), runs.array(wide))


def _lost_inputs(pair: _Pair, dtype: str, kept: Kept) -> str | None:
    """Whether an input that no operation has computed is missing in 16 bits."""
    for narrow, wide in zip(pair.narrow.inputs, pair.wide.inputs):
        is_known = kept.is_computed(narrow) or not (_is_number(narrow) and _is_number(wide))
        if is_known or narrow.shape != wide.shape:
            continue
        n, w = runs.array(narrow), runs.array(wide)
        largest = np.abs(w).max(initial=0)
        what = f"{pair.narrow.type}: {'a constant' if w.size == 1 else 'numbers'} of {largest:.1g}"
        if 0 < largest < _SMALLEST[dtype] and not n.any():
            return f"{what} that goes in is 0 in {dtype}, which ends at {_SMALLEST[dtype]:.1g}"
        if np.isfinite(largest) and not np.isfinite(n).all():
            return f"{what} that goes in is infinite in {dtype}, which ends at {_largest(dtype)}"
    return None


def _largest(dtype: str) -> str:
    return f"{float(tf.as_dtype(dtype).max):,.0f}" if dtype == "float16" else "3.4e38"


def _not_finite(pair: _Pair, dtype: str) -> str:
    kind = pair.narrow.type
    wide = np.concatenate([runs.array(v).ravel() for v in pair.wide.outputs if _is_number(v)])
    narrow = np.concatenate([runs.array(v).ravel() for v in pair.narrow.outputs if _is_number(v)])
    reached = np.abs(wide[np.isfinite(wide)]).max(initial=0)
    bad = np.count_nonzero(~np.isfinite(narrow))
    terms = _terms(pair.narrow)
    of_terms = f", a sum over {terms:,} values," if terms > 1 else ""
    if reached > float(tf.as_dtype(dtype).max):
        return (
            f"overflow: {kind}{of_terms} reaches {reached:.3g}; {dtype} ends at {_largest(dtype)}"
        )
    inputs = [runs.array(v) for v in pair.narrow.inputs if _is_number(v)]
    if kind in _POLES and any((values == 0).any() for values in inputs):
        return f"{kind} of zero: {bad:,} of {narrow.size:,} results are not finite in {dtype}"
    if terms > 1:
        return (
            f"overflow inside of {kind}, a sum over {terms:,} values, though the result is only "
            f"{reached:.3g}: {bad:,} of {narrow.size:,} results are not finite in {dtype}"
        )
    return (
        f"{kind}: {bad:,} of {narrow.size:,} results are not finite in {dtype}; in float32 they "
        f"reach {reached:.3g}"
    )


def _inexact(pair: _Pair, dtype: str) -> str:
    kind, terms = pair.narrow.type, _terms(pair.narrow)
    outputs = [
        (runs.array(n), runs.array(w))
        for n, w in zip(pair.narrow.outputs, pair.wide.outputs)
        if _is_number(n) and _is_number(w) and n.shape == w.shape
    ]
    narrow, wide = max(outputs, key=lambda values: relative(*values))
    off = relative(narrow, wide)
    inputs = [runs.array(v) for v in pair.wide.inputs if _is_number(v)]
    largest = max([rms(values[np.isfinite(values)]) for values in inputs] or [0.0])
    if kind in _DIFFERENCES and len(inputs) == 2 and largest > _CANCELS * rms(wide):
        return (
            f"cancellation: {kind} of numbers of about {largest:.3g}, which are multiples of "
            f"{_spacing(largest, dtype):.1g} in {dtype}, leaves {rms(wide):.1g}, off by {off:.1%}"
        )
    zeros = underflow(narrow, wide)
    if zeros > _FEW_ZEROS:
        return (
            f"underflow: {zeros:.0%} of what {kind} returns is 0 in {dtype} and not in float32, "
            f"where it is about {rms(wide):.1g}"
        )
    if terms > 1:
        return f"{kind}, a sum over {terms:,} values in {dtype}, is off by {off:.2%}"
    return (
        f"{kind} of numbers of about {largest:.3g}, which are multiples of "
        f"{_spacing(largest, dtype):.1g} in {dtype}, is off by {off:.2%}"
    )


def _spacing(size: float, dtype: str) -> float:
    """How far the numbers of a dtype are apart that are about so large."""
    if not 0 < size < math.inf:
        return 0.0
    return 2.0 ** math.floor(math.log2(size)) * 2 * UNIT_ROUNDOFF[dtype]


def _terms(operation: KeptOperation) -> int:
    """Of how many terms each result is the sum."""
    sizes = [int(np.prod(v.shape)) for v in operation.inputs if _is_number(v)]
    result = max(int(np.prod(v.shape)) for v in operation.outputs)
    if not sizes or not result:
        return 1
    if operation.type == "Cumsum":
        return max(operation.inputs[0].shape)
    if operation.type in _REDUCTIONS:
        return sum(sizes) // result
    if operation.type in _PRODUCTS and len(sizes) == 2:
        return max(1, round(math.sqrt(sizes[0] * sizes[1] / result)))
    return 1
