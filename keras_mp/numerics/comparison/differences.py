"""How far two runs are apart, which layer is the first that is too far, and what it does.

Inside of a layer, the operations of both runs tell that: the first that goes wrong.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.conversion import policy_path
from keras_mp.numerics.calls import Call, KeptOperations, is_floating, shape_of
from keras_mp.numerics.causes import CURES, IN_FLOAT32, Hazard, Observed, Said
from keras_mp.numerics.comparison.compared import ComparedLayer
from keras_mp.numerics.comparison.records import SIDES, LayerRecord, Quantity
from keras_mp.numerics.distances import (
    LIMIT,
    SMALLEST,
    UNIT_ROUNDOFF,
    Distance,
    array,
    kind_of_gradient,
    relative,
    rms,
    underflow,
)
from keras_mp.numerics.run import LOSS
from keras_mp.support import op_table
from keras_mp.support.messages import Line

# A gradient of which so many numbers are zero only in 16 bits has underflowed. In sound models a
# few become zero, too; a scale that grows keeps them.
MANY_ZEROS = 0.05

_REDUCTIONS = op_table.ops("sums over axes", "sums of tensors", "gradients of biases")
_PRODUCTS = op_table.ops("matrix products", "matrix products into another dtype") | {"Conv2D"}
_POLES = op_table.ops("divisions", "reciprocals", "powers") | {"Log"}
_DIFFERENCES = op_table.ops("additions", "squared differences")

# A difference that is so many times smaller than its inputs is called a cancellation.
_CANCELS = 32

# A smaller share of zeros is not mentioned.
_FEW_ZEROS = 0.01


class TooFar(NamedTuple):
    """A layer or operation that is further from the reference than rounding explains.

    Attributes:
        layer: LayerRecord or Call.
        other: the same of the reference.
        side: "forward" or "backward".
        distance: Distance, of what is furthest.
        what: str. What it does.
        line: the line of the program where it does that, or None.
        in_float32: str. What else to do than to change the line.
    """

    layer: Any
    other: Any
    side: str
    distance: Distance
    what: str = ""
    line: Line | None = None
    in_float32: str = ""


def far(found: Iterable[TooFar]) -> Iterator[Observed]:
    """A layer or an operation is further from the reference than rounding explains."""
    for layer, _, side, distance, what, line, in_float32 in found:
        at = f" ({line.short})" if line else ""
        numbers = {"what": what, "units": distance.units, "in_float32": in_float32}
        yield Observed(f"{layer.path} ({layer.kind}){at}", line, side=side, **numbers)


def judge_far(side: str, what: str, units: float, in_float32: str) -> Said:
    """What it does is known by now; how far it is off is told where that is a number."""
    why = what[0].upper() + what[1:]
    if 1 <= units < math.inf:
        why += f": {units:,.0f} times as far off as rounding explains"
    hazard, cure = f"a difference in the {side} pass", CURES["off"].format(in_float32=in_float32)
    return Said(hazard, f"{why}.", cure, units)


FAR = Hazard(far, judge_far)


def cure_in(model: tf.keras.Model | None, layer: LayerRecord | Call) -> str:
    """Returns what lets a layer compute in float32, as words that follow "or".

    Args:
        model: whose layer it is; None if it is not known.
        layer: LayerRecord or Call.
    """
    if layer.path == LOSS:
        return IN_FLOAT32["a loss"]
    path = layer.path if model is None else policy_path(model, layer.path)
    if path is None or layer.kind == "Sequential":
        return IN_FLOAT32["no layer of its own"]
    return IN_FLOAT32["a layer"].format(path=path)


def compare_layers(
    pairs: Sequence[tuple[LayerRecord, LayerRecord]], model: tf.keras.Model | None = None
) -> tuple[list[ComparedLayer], list[TooFar]]:
    """Compares two runs, and finds the first layer that is too far.

    Args:
        pairs: sequence of the same layers in a run and in the reference.
        model: whose layers they are; None if it is not known.

    Returns:
        A row for each layer; and the first one that is too far, if there is one.
    """
    largest = largest_gradients(other for _, other in pairs)
    rows: list[ComparedLayer] = []
    too_far: dict[str, list[TooFar]] = {side: [] for side in SIDES}
    for layer, other in pairs:
        worst = []
        for side in SIDES:
            found = distances(layer, other, side, largest)
            distance = Distance.worst(list(found.values()))
            worst.append(distance)
            if distance is not None and distance.units > LIMIT:
                name = next(name for name in found if found[name] is distance)
                what = _what(layer, other, side, name)
                culprit = TooFar(layer, other, side, distance, what)
                too_far[side].append(culprit._replace(in_float32=cure_in(model, layer)))
        rows.append(ComparedLayer(layer.path, layer.kind, layer.dtype, *worst))
    forward, backward = (too_far[side] for side in SIDES)
    # Variables and arguments of a function are behind its operations.
    operations = [each for each in backward if each.layer.kind not in ("variable", "argument")]
    return rows, [*forward, *reversed(operations), *reversed(backward)][:1]


def distances(
    layer: LayerRecord, other: LayerRecord, side: str, largest: Mapping[str, float]
) -> dict[str, Distance]:
    """Measures how far the quantities of a layer are apart, by their names.

    Args:
        layer: LayerRecord.
        other: the same of the reference.
        side: "forward" or "backward".
        largest: what `largest_gradients` says of all gradients that are known.
    """
    unit = max(layer.unit, other.unit)
    values, others = getattr(layer, side), getattr(other, side)
    largest_here = largest_gradients([other])
    found = {}
    for name, value in values.items():
        if name not in others:
            continue
        reference = others[name]
        beside = 0.0
        if side == "backward":
            kind = kind_of_gradient(name)
            beside = (largest_here if kind in ("input", "output") else largest)[kind]
        explained = max(value.explained, reference.explained)
        distance = Distance.of(value.values, reference.values, explained, unit, beside)
        if value.not_finite and not reference.not_finite:
            # Those may not be in the sample of a large tensor.
            distance = dataclasses.replace(distance, relative=math.inf, units=math.inf)
        found[name] = distance
    return found


def largest_gradients(layers: Iterable[LayerRecord]) -> dict[str, float]:
    """Returns the root mean square of the largest gradient of each kind."""
    largest: dict[str, float] = {}
    for layer in layers:
        for name, quantity in layer.backward.items():
            kind, values = kind_of_gradient(name), quantity.values
            largest[kind] = max(largest.get(kind, 0.0), rms(values[np.isfinite(values)]))
    return largest


def _what(layer: LayerRecord, other: LayerRecord, side: str, name: str) -> str:
    """Returns what is wrong with a quantity of a layer, as far as its numbers tell."""
    if layer.path == LOSS and layer.kind != other.kind:
        return f"different losses: a {layer.kind}, and a {other.kind} in the reference"
    value: Quantity = getattr(layer, side)[name]
    reference: Quantity = getattr(other, side)[name]
    title = "the output" if side == "forward" else "the gradient of the output"
    if not name.startswith("output"):
        title = f"the gradient of {name}"
    if value.values.shape != reference.values.shape:
        return f"{title} has another shape"
    if value.not_finite and not reference.not_finite:
        return f"{title} has {value.not_finite:,} numbers that are not finite"
    zeros = underflow(value.values, reference.values)
    if zeros > MANY_ZEROS:
        return f"underflow: {zeros:.0%} of {title} is 0 in {layer.dtype} and not in the reference"
    return f"{title} drifts further than rounding explains"


def explain(
    narrow: KeptOperations, wide: KeptOperations, side: str, dtype: str
) -> tuple[str, Line | None] | None:
    """Finds the first operation that does not do in 16 bits what it does in float32.

    Args:
        narrow: what ran in 16 bits.
        wide: what ran in float32, of the same call on the same inputs.
        side: "forward" or "backward".
        dtype: the one of 16 bits.

    Returns:
        What it does, and its line; None where all operations agree.
    """
    worst, most = None, 0.0
    ops, wide_ops = (
        [op for op in each.operations if op.is_gradient == (side == "backward")]
        for each in (narrow, wide)
    )
    for i, j in matches(ops, wide_ops):
        op, exact = ops[i], wide_ops[j]
        before, after = _apart(op.args, exact.args), _apart(op.outputs, exact.outputs)
        lost = _lost_inputs(op, exact, dtype, narrow)
        if lost is not None:
            return lost, op.line
        if math.isinf(after) and not math.isinf(before):
            return _not_finite(op, exact, dtype), op.line
        rise = after / max(before, UNIT_ROUNDOFF[dtype])
        if rise > most:
            worst, most = (op, exact), rise
    if worst is None or most <= 2:
        return None
    return _inexact(*worst, dtype), worst[0].line


def matches(narrow: Sequence[Call], wide: Sequence[Call]) -> Iterator[tuple[int, int]]:
    """Yields the indices of the operations that two runs have in common."""
    kinds = [[(op.kind, op.is_gradient) for op in ops] for ops in (narrow, wide)]
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


def _lost_inputs(op: Call, exact: Call, dtype: str, operations: KeptOperations) -> str | None:
    """Describes an input that 16 bits do not hold, unless an operation has computed it."""
    pairs = [(n, w) for n, w in zip(op.args, exact.args) if not operations.is_computed(n)]
    for n, w in _both(*zip(*pairs)) if pairs else ():
        largest = np.abs(w).max(initial=0)
        takes, are = "takes numbers", "which are"
        if w.size == 1:
            takes, are = "takes a constant", "which is"
        what = f"{op.kind} {takes} of {largest:.1g}, {are}"
        if 0 < largest < SMALLEST[dtype] and not n.any():
            return f"{what} 0 in {dtype}: its smallest number is {SMALLEST[dtype]:.1g}"
        if np.isfinite(largest) and not np.isfinite(n).all():
            return f"{what} infinite in {dtype}: its largest number is {_largest(dtype)}"
    return None


def _largest(dtype: str) -> str:
    return f"{float(tf.as_dtype(dtype).max):,.0f}" if dtype == "float16" else "3.4e38"


def _not_finite(op: Call, exact: Call, dtype: str) -> str:
    kind, terms = op.kind, _terms(op)
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
    if kind in _POLES and any((values == 0).any() for values in _arrays(op.args)):
        return f"{kind} of zero: {bad} in {dtype}"
    if terms > 1:
        only = f"though the result is only {reached:.3g}"
        return f"overflow inside of {kind}{of_terms} {only}: {bad} in {dtype}"
    return f"{kind}: {bad} in {dtype}; in float32 they reach {reached:.3g}"


def _inexact(op: Call, exact: Call, dtype: str) -> str:
    kind, terms = op.kind, _terms(op)
    outputs = list(_both(op.outputs, exact.outputs))
    narrow, wide = max(outputs, key=lambda values: relative(*values))
    off, size = relative(narrow, wide), rms(wide)
    inputs = _arrays(exact.args)
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


def _terms(operation: Call) -> int:
    """Returns how many terms are summed for each result."""
    sizes = [math.prod(shape_of(v)) for v in operation.args if is_floating(v)]
    result = max(math.prod(shape_of(v)) for v in operation.outputs)
    if not sizes or not result:
        return 1
    if operation.kind == "Cumsum":
        return max(operation.args[0].shape)
    if operation.kind in _REDUCTIONS:
        return sum(sizes) // result
    if operation.kind in _PRODUCTS and len(sizes) == 2:
        return max(1, round(math.sqrt(sizes[0] * sizes[1] / result)))
    return 1
