"""Compares a model in two dtypes on the same batch, and tells defects from rounding.

Both runs have the same weights, the same batch and the same random numbers. A layer that is off
runs again in both dtypes, on what it got in 16 bits, so that what it does itself is told from what
it was given. More than 16 units of what rounding explains are a finding.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import tensorflow as tf

from keras_mp.conversion import paths_in_config
from keras_mp.models.layer_paths import layers_by_path, variables_by_path
from keras_mp.numerics import origins
from keras_mp.numerics.histogram import Histogram
from keras_mp.numerics.operation_table import ByTensor
from keras_mp.numerics.records import (
    LIMIT,
    NOISE,
    NOISY_RUNS,
    SIDES,
    SMALLEST,
    UNIT_ROUNDOFF,
    ComparedLayer,
    Comparison,
    Distance,
    Noise,
    are_finite,
    array,
    relative,
    rms,
    sample,
    underflow,
)
from keras_mp.numerics.report import MANY_ZEROS, Report, Row
from keras_mp.numerics.results import Finding
from keras_mp.numerics.run import (
    LOSS,
    Call,
    Run,
    Runner,
    check_same_calls,
    first_scale,
    is_floating,
    named_weights,
    replay,
    shape_of,
)
from keras_mp.support import op_callbacks, op_table
from keras_mp.support.messages import Line
from keras_mp.support.progress import Progress

# A layer amplifies rounding if its outputs move so many times as far as its inputs, and if on this
# batch the outputs of the two runs are so many times further apart than the inputs.
_AMPLIFIES, _RISES = 64.0, 16.0
# A layer that is less far off in the whole run is not run by itself.
_LOOKED_AT = 2.0
# If outputs rise so and are off by a larger share of their size than `tune` tolerates, that is a
# finding even where noise does the same, as where a rounded number is no longer that of a mask.
_OFF = 0.05

_REDUCTIONS = op_table.ops("sums over axes", "sums of tensors", "gradients of biases")

_PRODUCTS = op_table.ops("matrix products", "matrix products into another dtype") | {"Conv2D"}

_POLES = op_table.ops("divisions", "reciprocals", "powers") | {"Log"}

_DIFFERENCES = op_table.ops("additions", "squared differences")

# A difference that is so many times smaller than its inputs is called a cancellation.
_CANCELS = 32

# A smaller share of zeros is not mentioned.
_FEW_ZEROS = 0.01


class TooFar(NamedTuple):
    """A call of a layer that is further from the reference than rounding explains.

    Attributes:
        call: Call.
        wide: the same of the reference.
        side: "forward" or "backward".
        distance: Distance, of what is furthest.
        what: str. What it does; "" if its operations have to tell.
    """

    call: Call
    wide: Call
    side: str
    distance: Distance
    what: str = ""


@dataclasses.dataclass
class Operation:
    """An operation that ran in eager.

    Attributes:
        kind: str. Its type.
        inputs: the tensors that it took.
        outputs: list of the tensors that it returned. One whose result is only rounded to 16 bits,
            as a sum in float32 is, has the rounded result.
        is_gradient: whether it ran for a gradient.
        line: the line of the program that it came from; None where only libraries had to do with
            it.
    """

    kind: str
    inputs: Sequence[tf.Tensor]
    outputs: list[tf.Tensor]
    is_gradient: bool
    line: Line | None


class KeptOperations(ByTensor):
    """Operations that ran and have computed floating-point numbers.

    Attributes:
        operations: list of Operation, in their order. What is known of a tensor is the one that
            computed it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def keep(
        self,
        kind: str | bytes,
        inputs: Sequence[tf.Tensor],
        _: object,
        outputs: Sequence[tf.Tensor],
        *__: object,
        **___: object,
    ) -> None:
        """Keeps an operation; `op_callbacks.observed` calls it."""
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if not any(value.dtype.is_floating for value in outputs):
            return
        makers = self.of(inputs)
        if not origins.is_safe(kind, outputs):
            origin = origins.running()
            made = Operation(kind, inputs, list(outputs), origin.is_gradient, origin.line)
            self.operations.append(made)
            self.note(outputs, made)
        elif makers:
            if kind == "Cast" and outputs[0].dtype.size < inputs[0].dtype.size:
                made = makers[0].outputs
                made[:] = [outputs[0] if each is inputs[0] else each for each in made]
            self.note(outputs, makers[0])


def policy_path(model: tf.keras.Model, path: str) -> str | None:
    """Returns the path by which `convert` can give a layer another policy.

    It is the layer's own path, or that of the layer around it which has its policy.

    Args:
        model: A model of `tf.keras`.
        path: str. The path of a layer.

    Returns:
        The path; None if there is no such layer, or if the model has no config.
    """
    try:
        in_config = paths_in_config(model)
    except Exception:  # A user's class may raise anything.
        return None
    layers = layers_by_path(model)
    while path and not (path in layers and path in in_config):
        path = path.rpartition("/")[0]
    return path or None


def cure_in(model: tf.keras.Model, path: str, kind: str) -> str:
    """Returns what lets a layer compute in float32, as words that follow "or".

    Args:
        model: whose layer it is.
        path: str. Of the layer.
        kind: str. Its class.
    """
    if path == LOSS:
        return "cast to float32 in the loss: tf.cast(predictions, tf.float32)"
    own = policy_path(model, path)
    if own is None or kind == "Sequential":
        return 'compute it in float32: cast there, or create the layer with dtype="float32"'
    return f'run the layer in float32: keras_mp.convert(model, {{"{own}": "float32"}})'


def compare(narrow: Runner, wide: Runner) -> tuple[Comparison, Report]:
    """Runs a model in 16 bits and in float32, and says where the two part, and what is lost.

    Both go forwards and backwards in eager, functions that `tf.function` made included; the float32
    model also with noise, which tells what rounding explains. The loss is multiplied by the loss
    scale that the model is trained with; if gradients overflow, it is halved until they do not, as
    training would do. Weights and states are put back.

    Args:
        narrow: Runner of the model.
        wide: Runner of the reference, with the same random numbers.

    Returns:
        A `Comparison`: `findings` is empty if rounding explains everything. And a `Report` of the
        exponents in the reference, which tells what any loss scale would lose.

    Raises:
        ValueError: the two do not call the same layers.
    """
    with Progress("compare", parts=4) as progress:
        progress.begin("in 16 bits")
        run = narrow.run_as_trained()
        progress.begin("the reference")
        other = wide.run()
        check_same_calls(run, other)
        progress.begin("the reference, with noise")
        unit, calls = UNIT_ROUNDOFF[run.dtype], other.measured()
        for seed in range(NOISY_RUNS):
            moved = wide.run(other.loss_scale, Noise(unit, seed)).measured()
            if [each.path for each in calls] == [each.path for each in moved]:
                for call, again in zip(calls, moved):
                    call.explain(again)
        progress.begin("layers that are off, by themselves")
        pairs = list(zip(run.measured(), calls))
        report = _report(run, other, first_scale(narrow.model))
        rows, culprits = _compare_calls(pairs, unit, report)
    findings = [_finding(each, run.model) for each in culprits]
    losses = run.loss, other.loss
    found = Comparison(narrow.name, wide.name, rows, findings, losses, run.loss_scale)
    return found, report


def _largest_gradient(calls: Iterable[Call]) -> float:
    """Returns the size of the largest gradient."""
    quantities = (each for call in calls for each in call.quantities.items())
    return max((each.size for (side, _), each in quantities if side == "backward"), default=0.0)


def _compare_calls(
    pairs: Sequence[tuple[Call, Call]], least: float, report: Report
) -> tuple[list[ComparedLayer], list[TooFar]]:
    """Measures how far each call is off, and names those that are so by themselves.

    Of nested layers, the innermost is named. A layer whose inputs are not finite is not blamed. If
    none is off by itself, it is the first one that is.

    Args:
        pairs: the calls in 16 bits, and those of the reference.
        least: float. The unit roundoff of the run in 16 bits.
        report: Report of both.
    """
    largest = _largest_gradient(wide for _, wide in pairs)
    rows: list[ComparedLayer] = []
    first: dict[str, list[TooFar]] = {side: [] for side in SIDES}
    for call, wide in pairs:
        worst = []
        for side in SIDES:
            found = call.distances(wide, side, largest)
            distance = Distance.worst(list(found.values()))
            worst.append(distance)
            if _is_far(distance):
                name = next(name for name in found if found[name] is distance)
                what = _what(call, wide, side, name)
                first[side].append(TooFar(call, wide, side, distance, what))
        rows.append(ComparedLayer(call.path, call.kind, call.dtype, *worst))
    # Noise may explain as much, where nothing is left of a gradient.
    always = bool(first["backward"]) or any((row.lost or 0) > MANY_ZEROS for row in report.rows)
    forward: list[TooFar] = []
    backward: list[TooFar] = []
    for i, (call, wide) in enumerate(pairs):
        row = rows[i]
        if any(culprit.call in call.inside for culprit in forward):
            continue
        if _is_far(row.output) and not are_finite(call.inputs) and are_finite(wide.inputs):
            before = (each.output for each in rows[:i] if each.output is not None)
            if all(math.isfinite(each.units) for each in before):
                what = f"what it takes is beyond {call.dtype}"
                forward.append(TooFar(call, wide, "forward", row.output, what))
            continue
        # The gradient that a layer is to blame for is that of what it takes.
        rows[i], amplifies = _alone(row, call, wide, least, always)
        output, gradient = rows[i].own_output, rows[i].own_gradient
        if _is_far(output):
            # Max pooling turns NaN into finite numbers, which are no evidence either.
            if not forward or _off_before(call, wide) <= 1:
                forward.append(TooFar(call, wide, "forward", output))
        elif row.output is not None and amplifies:
            forward.append(TooFar(call, wide, "forward", row.output, amplifies))
        elif _is_far(gradient) and not any(each.call in call.inside for each in backward):
            backward.append(TooFar(call, wide, "backward", gradient))
    if not forward and not backward:
        return rows, [*first["forward"], *reversed(first["backward"])][:1]
    # Gradients come in reverse order. A cell that is called for each time step is named once.
    culprits: dict[tuple[str, str], TooFar] = {}
    for culprit in (*forward, *reversed(backward)):
        culprits.setdefault((culprit.call.path, culprit.side), culprit)
    return rows, list(culprits.values())


def _is_far(distance: Distance | None) -> TypeGuard[Distance]:
    return distance is not None and distance.units > LIMIT


def _alone(
    row: ComparedLayer, call: Call, wide: Call, least: float, always: bool
) -> tuple[ComparedLayer, str]:
    """Makes a call that is off again in both dtypes, on the same inputs.

    Args:
        row: what is known of it so far.
        call: in 16 bits.
        wide: in float32.
        least: float. The unit roundoff of the run. A distance of few roundings does no harm.
        always: bool. Whether to do so in any case.

    Returns:
        The row, with the call's own distances; and words for how far it amplifies the distance of
        its inputs, "" if it does not.
    """
    upstream, taken, made = call.gradients, 0.0, 0.0
    if row.output is not None and not call.inside:
        taken, made = _off_before(call, wide), row.output.relative
    rises = made > _RISES * max(taken, least)
    is_off = row.output is not None and row.output.units > _LOOKED_AT
    if not (always or rises or is_off):
        return row, ""
    narrow = replay(call, call.layer, upstream)
    before, again = ([each.numpy().tobytes() for each in of.outputs] for of in (call, narrow))
    if before != again or not are_finite(call.inputs):
        # The layer draws random numbers in a way of its own or has a state, or its inputs are
        # spoilt already.
        return row, ""

    def measured(replayed: Run) -> Call:
        return replayed.calls[-1].measure(replayed.gradients)

    own, exact = measured(narrow), measured(replay(call, wide.layer, upstream, "float32"))
    for seed in range(NOISY_RUNS):
        noise = Noise(UNIT_ROUNDOFF[call.dtype], seed)
        exact.explain(measured(replay(call, wide.layer, upstream, "float32", noise)))
    found = (own.distances(exact, side, _largest_gradient([exact])) for side in SIDES)
    output, gradient = (Distance.worst(list(each.values())) for each in found)
    outputs = (each for (side, _), each in exact.quantities.items() if side == "forward")
    moved = [each.explained / each.size for each in outputs if each.size]
    times, amplifies = max(moved, default=0.0) / (NOISE * UNIT_ROUNDOFF[call.dtype]), ""
    if rises and (times > _AMPLIFIES or made > _OFF):
        amplifies = (
            f"it amplifies rounding by {times:,.0f}; its inputs are off by {taken:.2%}, its "
            f"outputs by {made:.1%} of their size"
        )
    gradient = gradient if are_finite(upstream) else None
    return dataclasses.replace(row, own_output=output, own_gradient=gradient), amplifies


def _off_before(call: Call, wide: Call) -> float:
    """Returns how far the inputs of a call are apart in the two runs."""
    pairs = zip(call.inputs, wide.inputs)
    return max((relative(sample(narrow), sample(exact)) for narrow, exact in pairs), default=0.0)


def _finding(culprit: TooFar, model: tf.keras.Model) -> Finding:
    """Says what a call does, and how far it is off where that is a number."""
    call, units, line = culprit.call, culprit.distance.units, None
    why = culprit.what or _of_other_weights(culprit)
    if not why:
        why, line = _explanation(culprit)
    if 1 <= units < math.inf:
        why += f": {units:,.0f} times as far off as rounding explains"
    at = f"{call.path} ({call.kind})" + (f" ({line.short})" if line else "")
    cure = cure_in(model, call.path, call.kind)
    cure = f"Change that line, or {cure}" if line else cure
    hazard = f"a difference in the {culprit.side} pass"
    return Finding(hazard, at, line, f"{_sentence(why)}.", f"{_sentence(cure)}.", units)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _what(call: Call, wide: Call, side: str, name: str) -> str:
    """Returns what is wrong with a tensor of a layer, as far as its numbers tell."""
    value, reference = call.quantities[side, name], wide.quantities[side, name]
    title = "the output" if side == "forward" else "the gradient of the output"
    if not name.startswith("output"):
        title = f"the gradient of {name}"
    if value.values.size != reference.values.size:
        return f"{title} has another shape"
    if value.not_finite and not reference.not_finite:
        return f"{title} has {value.not_finite:,} numbers that are not finite"
    zeros = underflow(value.values, reference.values)
    if zeros > MANY_ZEROS:
        return f"underflow: {zeros:.0%} of {title} is 0 in {call.dtype} and not in the reference"
    return f"{title} drifts further than rounding explains"


def _of_other_weights(culprit: TooFar) -> str:
    both = (getattr(each.layer, "weights", ()) for each in (culprit.call, culprit.wide))
    found = [relative(array(narrow), array(other)) for narrow, other in zip(*both)]
    if not any(found):
        return ""
    return f"its weights differ from those of the reference by up to {max(found):.2%}"


def _explanation(culprit: TooFar) -> tuple[str, Line | None]:
    """Finds the first operation that does not do in 16 bits what it does in float32.

    Returns:
        What it does, and its line; None for the line where all operations agree.
    """
    call, dtype = culprit.call, culprit.call.dtype
    kept = KeptOperations(), KeptOperations()
    for operations, layer, to in zip(kept, (call.layer, culprit.wide.layer), (None, "float32")):
        with op_callbacks.observed(operations.keep):
            replay(call, layer, call.gradients, to)
    ops = (
        [op for op in each.operations if op.is_gradient == (culprit.side == "backward")]
        for each in kept
    )
    worst, most = None, 2.0
    for op, exact in _matches(*ops):
        before, after = _apart(op.inputs, exact.inputs), _apart(op.outputs, exact.outputs)
        lost = _lost_inputs(op, exact, dtype, kept[0])
        if lost is not None:
            return lost, op.line
        if math.isinf(after) and not math.isinf(before):
            return _not_finite(op, exact, dtype), op.line
        rise = after / max(before, UNIT_ROUNDOFF[dtype])
        if rise > most:
            worst, most = (op, exact), rise
    if worst is None:
        return f"its output in {dtype} is further off than rounding explains", None
    return _inexact(*worst, dtype), worst[0].line


def _matches(
    narrow: Sequence[Operation], wide: Sequence[Operation]
) -> Iterator[tuple[Operation, Operation]]:
    """Yields the operations that two runs have in common."""
    kinds = ([op.kind for op in ops] for ops in (narrow, wide))
    matcher = difflib.SequenceMatcher(None, *kinds, autojunk=False)
    for start, other, count in matcher.get_matching_blocks():
        yield from zip(narrow[start : start + count], wide[other : other + count])


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
    op: Operation, exact: Operation, dtype: str, operations: KeptOperations
) -> str | None:
    """Describes an input that 16 bits do not hold, unless an operation has computed it."""
    pairs = [(n, w) for n, w in zip(op.inputs, exact.inputs) if not operations.of([n])]
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


def _not_finite(op: Operation, exact: Operation, dtype: str) -> str:
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
    if terms > 1:
        only = f"though the result is only {reached:.3g}"
        return f"overflow inside of {kind}{of_terms} {only}: {bad} in {dtype}"
    is_pole = kind in _POLES and any((values == 0).any() for values in _arrays(op.inputs))
    of_zero = " of zero" if is_pole else ""
    return f"{kind}{of_zero}: {bad} in {dtype}; in float32 they reach {reached:.3g}"


def _inexact(op: Operation, exact: Operation, dtype: str) -> str:
    kind, terms = op.kind, _terms(op)
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


def _terms(operation: Operation) -> int:
    """Returns how many terms are summed for each result."""
    sizes = [math.prod(shape_of(v)) for v in operation.inputs if is_floating(v)]
    result = max(math.prod(shape_of(v)) for v in operation.outputs)
    if not sizes or not result:
        return 1
    if operation.kind == "Cumsum":
        return max(shape_of(operation.inputs[0]))
    if operation.kind in _REDUCTIONS:
        return sum(sizes) // result
    if operation.kind in _PRODUCTS and len(sizes) == 2:
        return max(1, round(math.sqrt(sizes[0] * sizes[1] / result)))
    return 1


def _report(run: Run, other: Run, scale: float) -> Report:
    """Returns the exponents of the reference, each with the dtype that it has in 16 bits.

    Args:
        run: Run in 16 bits.
        other: Run in float32.
        scale: float. The loss scale that training begins with.
    """
    layers, rows = layers_by_path(run.model), {}
    # If the run had to lower the loss scale, gradients overflow at the one before.
    at = 2 * run.loss_scale if run.loss_scale < scale else math.inf
    at = at if are_finite(run.all_gradients()) else run.loss_scale

    def add(kind: str, path: str, dtype: str, tensor: Any, *both: Any) -> None:
        row = Row(kind, path, dtype, Histogram.count(tensor))
        if both:
            value, exact = both
            is_same = value.values.shape == exact.values.shape
            lost = underflow(value.values, exact.values) if is_same else 1.0
            row = row._replace(overflowed_at=at, is_noise=exact.is_noise, lost=lost)
        rows[row.key] = rows[row.key] + row if row.key in rows else row

    names = {id(weight): name for name, weight in named_weights(run.model).items()}
    both = {
        key[1]: (call.quantities[key], exact)
        for call, wide in zip(run.calls, other.calls)
        for key, exact in wide.quantities.items()
        if key[0] == "backward" and key in call.quantities
    }
    for path, (weight, layer) in variables_by_path(run.model).items():
        if (name := names[id(weight)]) in both:
            add("gradient", path, layer.compute_dtype, other.gradients[name], *both[name])
    for call, wide in zip(run.calls, other.calls):
        if call.path not in layers or isinstance(call.layer, tf.keras.Model):
            continue
        for i, (output, tensor) in enumerate(zip(call.outputs, wide.outputs)):
            key, dtype = ("backward", f"output {i}"), output.dtype.name
            add("output", call.path, dtype, tensor)
            found = call.quantities.get(key), wide.quantities.get(key)
            if all(found):
                add("output gradient", call.path, dtype, wide.gradients[i], *found)
    return Report(
        list(rows.values()), step=0, counted=1, loss_scale=scale, takers=_takers(other.calls)
    )


def _takers(calls: Iterable[Call]) -> dict[str, set[str]]:
    """Returns the paths of the layers that take the outputs of each layer."""
    # Where nothing is cast, a layer gets the very tensor that another layer returned, or that an
    # operation of a functional model of Keras 3 has computed from it.
    made_by: dict[int, set[str]] = {}
    takers: dict[str, set[str]] = {}
    for call in calls:
        if isinstance(call.layer, tf.keras.Model):
            continue
        makers = set().union(*(made_by.get(id(each), ()) for each in call.inputs))
        if isinstance(call.layer, tf.keras.layers.Layer):
            for maker in makers:
                takers.setdefault(maker, set()).add(call.path)
            makers = {call.path}
        made_by |= {id(output): makers for output in call.outputs}
    return takers
