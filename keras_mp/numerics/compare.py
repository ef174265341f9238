"""Compares a model in two dtypes on the same batch, and tells defects from rounding.

Both runs have the same weights, the same batch and the same random numbers. A layer that is off
runs again in both dtypes, on what it got in 16 bits, so that what it does itself is told from what
it was given. More than 16 units of what rounding explains are a finding.
"""

import dataclasses
import difflib
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.conversion import paths_in_config
from keras_mp.models.layer_paths import layers_by_path, variables_by_path
from keras_mp.numerics import graph, histogram, operation_table, origins, records
from keras_mp.numerics import run as runs
from keras_mp.numerics.records import LIMIT, NOISE, SIDES, UNIT_ROUNDOFF, Distance, smallest_of
from keras_mp.numerics.report import MANY_ZEROS, Report, Row
from keras_mp.numerics.results import DIFFERENCES, Finding, Result, listed, of_batches
from keras_mp.numerics.run import LOSS, Call, Run, Runner
from keras_mp.support import op_callbacks, op_table, text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
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
_POLES = op_table.ops("divisions", "reciprocals", "powers") | {"Log"}
_DIFFERENCES = op_table.ops("additions", "squared differences")
# A difference that is so many times smaller than its inputs is called a cancellation, and a larger
# share of zeros an underflow.
_CANCELS, _FEW_ZEROS = 32, 0.01


# The same call in 16 bits and in the reference.
_Pair: TypeAlias = tuple[Call, Call]


class ComparedLayer(NamedTuple):
    """One call of a layer.

    Attributes:
        path: str. The names of the layers from below the model to this one; of the model its name.
        kind: str. Its class.
        dtype: str. The narrowest dtype that it computes in or returns.
        output: Distance of what it returned, all layers before it included; None where it returned
            no floating point number.
        gradient: Distance of the gradients of what it returned and of its weights, whichever is
            further, all layers after it included.
    """

    path: str
    kind: str
    dtype: str
    output: Distance | None = None
    gradient: Distance | None = None

    @property
    def units(self) -> float:
        """The larger one of the distances, in units of what rounding explains."""
        return max((each.units for each in (self.output, self.gradient) if each), default=0.0)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Result):
    """Where two runs part. Its `str` is a table.

    Attributes:
        name: str. The run that was looked at.
        reference: str. The one that it was compared with.
        layers: list of ComparedLayer, in the order in which the layers returned.
        findings: list of `Finding`, in the order in which things happened: the forward pass first.
            Layers that only pass on what another one did are not among them. Empty where rounding
            explains all.
        losses: the loss of the run and that of the reference.
        loss_scale: float. What the loss was multiplied by in the run.
        batches: int. Of how many batches it is the one that is furthest off, with the findings of
            all.

    Example:

    >>> from keras_mp.numerics.compare import Comparison
    >>> comparison = Comparison("16 bits", "float32", [], [], (0.5, 0.5), 1.0)
    >>> print(comparison)
    Rounding explains all differences. 16 bits, compared with float32
    """

    name: str
    reference: str
    layers: list[ComparedLayer]
    findings: list[Finding]
    losses: tuple[float, float]
    loss_scale: float
    batches: int = 1

    @classmethod
    def of_batches(cls, found: "Sequence[Comparison]") -> "Comparison":
        """Returns the comparison that is furthest off, with the worst finding of each place."""
        furthest = max(
            found,
            key=lambda one: (one.is_judged, max((row.units for row in one.layers), default=0)),
        )
        findings = of_batches([one.findings for one in found])
        return dataclasses.replace(furthest, findings=findings, batches=len(found))

    @property
    def is_judged(self) -> bool:
        """Whether the reference has a finite loss, or there are findings.

        Example:

        >>> nan = float("nan")
        >>> from keras_mp.numerics.compare import Comparison
        >>> Comparison("16 bits", "float32", [], [], (nan, nan), 1.0).is_judged
        False
        """
        return bool(self.findings) or math.isfinite(self.losses[1])

    def _lines(self, rows: int | None) -> Iterator[str]:
        is_sound = self.is_judged and not self.findings
        verdict = "Rounding explains all differences."
        if not is_sound:
            verdict = "Further apart than rounding explains:"
        if not self.is_judged:
            verdict = "Nothing can be said: the loss of the reference is not finite either."
        scope = f", the worst of {self.batches} batches" if self.batches > 1 else ""
        head = f"{verdict} {self.name}, compared with {self.reference}{scope}"
        yield from text_tables.wrapped(head, "    ")
        if is_sound and rows is not None:
            return
        first, second = self.losses
        yield f"Loss: {first:.6g} and {second:.6g}, at a loss scale of {self.loss_scale:g}"
        yield from [*listed(self.findings, rows), ""]
        cells, named = [], {finding.path for finding in self.findings}
        for row in self.layers:
            is_named, both = row.path in named, (row.output, row.gradient)
            texts = (f"{row.path} ({row.kind})", row.dtype, *map(_cell, both))
            alike = row.kind, row.dtype, is_named, row.units > LIMIT
            cells.append(text_tables.RankedRow(texts, (is_named, row.units), alike))
        header = ("Layer", "Dtype", "Output", "Gradient")
        yield from text_tables.shortened(header, cells, rows, left=(0, 1))
        yield "\nRelative distances, and in parentheses in units of what rounding explains."


def _cell(distance: Distance | None) -> str:
    if distance is None:
        return "-"
    is_number = 0 < distance.relative < math.inf
    return records.share_off(distance.relative) + f" ({distance.units:,.1f})" * is_number


class TooFar(NamedTuple):
    """A call of a layer that is further from the reference than rounding explains.

    Attributes:
        call: Call.
        wide: the same of the reference.
        side: "forward" or "backward".
        units: float. How far off is what is furthest.
        what: str. What it does; "" if its operations have to tell.
    """

    call: Call
    wide: Call
    side: str
    units: float
    what: str = ""


class Operation(NamedTuple):
    """An operation that ran in eager.

    Attributes:
        kind: str. Its type.
        inputs: the tensors that it took.
        outputs: list of the tensors that it returned. One whose result is only rounded to 16 bits,
            as a sum in float32 is, has the rounded result.
        equation: str. That of an Einsum; "" for others.
        origin: Origin. Where it came from.
    """

    kind: str
    inputs: Sequence[tf.Tensor]
    outputs: list[tf.Tensor]
    equation: str
    origin: origins.Origin


class KeptOperations(operation_table.ByTensor):
    """Operations that ran and have computed floating-point numbers.

    Attributes:
        operations: list of Operation, in their order. What is known of a tensor is the one that
            computed it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def keep(self, kind: Any, inputs: Any, attrs: Any, outputs: Any, *_: Any, **__: Any) -> None:
        """Keeps an operation; `op_callbacks.observed` calls it."""
        kind = tf.compat.as_str(kind)
        if not any(value.dtype.is_floating for value in outputs):
            return
        if not origins.is_safe(kind, outputs):
            equation = attrs[1 + attrs.index("equation")] if kind == "Einsum" else ""
            made = [*outputs], tf.compat.as_str(equation), origins.running()
            self.operations.append(Operation(kind, inputs, *made))
            self.note(outputs, self.operations[-1])
        elif makers := self.of(inputs):
            if kind == "Cast" and outputs[0].dtype.size < inputs[0].dtype.size:
                made = makers[0].outputs
                made[:] = [outputs[0] if each is inputs[0] else each for each in made]
            self.note(outputs, makers[0])


def policy_of(model: tf.keras.Model) -> str:
    """Returns the policy of most layers, of those in 16 bits if there are any.

    That of the model itself is the global one where Keras has loaded it.
    """
    layers = [each for each in keras_api.flatten_layers(model) if not keras_api.layers_inside(each)]
    narrow = [each for each in layers if each.compute_dtype in LOW_PRECISION_NAMES]
    names = [each.dtype_policy.name for each in narrow or layers if narrow or each.weights]
    return max(names, key=names.count, default=model.dtype_policy.name)


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
        if len(run.calls) != len(other.calls):
            raise ValueError(
                "A model in 16 bits and its reference do not call the same layers. Expected "
                f"{[c.path for c in other.calls]}. Received: {[c.path for c in run.calls]}"
            )
        progress.begin("the reference, with noise")
        unit = UNIT_ROUNDOFF[run.dtype]
        calls = runs.explain(other.measured(), lambda noise: wide.run(noise=noise).measured(), unit)
        progress.begin("layers that are off, by themselves")
        pairs = [*zip(run.measured(), calls)]
        report = _report(run, other, runs.first_scale(narrow.model))
        rows = [
            ComparedLayer(a.path, a.kind, a.dtype, *(a.distance(b, side) for side in SIDES))
            for a, b in pairs
        ]
        # Noise may explain as much, where nothing is left of a gradient.
        always = any((row.lost or 0) > MANY_ZEROS for row in report.rows)
        culprits = _culprits(pairs, rows, unit, always)
    findings = [_finding(each, run.model) for each in culprits]
    first, second = (f"{each.model.name} in {policy_of(each.model)}" for each in (narrow, wide))
    both = run.loss, other.loss
    return Comparison(first, second, rows, findings, both, run.loss_scale), report


def _is_far(distance: Distance | None) -> TypeGuard[Distance]:
    return distance is not None and distance.units > LIMIT


def _culprits(
    pairs: Sequence[_Pair], rows: Sequence[ComparedLayer], least: float, always: bool
) -> list[TooFar]:
    """Names the calls that are off by themselves.

    Of nested layers, the innermost is named. A layer whose inputs are not finite is not blamed. If
    none is off by itself, it is the first one that is.

    Args:
        pairs: the calls in 16 bits, and those of the reference.
        rows: how far each is off.
        least: float. The unit roundoff of the run in 16 bits. A distance of few does no harm.
        always: bool. Whether to make all calls again.
    """
    always = always or any(_is_far(row.gradient) for row in rows)
    forward: list[TooFar] = []
    backward: list[TooFar] = []
    for i, ((call, wide), row) in enumerate(zip(pairs, rows)):
        if any(culprit.call in call.inside for culprit in forward):
            continue
        made, has_numbers = row.output or Distance(0.0, 0.0), records.are_finite(call.inputs)
        if _is_far(made) and not has_numbers and not forward and records.are_finite(wide.inputs):
            what = f"What it takes is beyond {call.dtype}"
            forward.append(TooFar(call, wide, "forward", made.units, what))
        before = records.off(call.inputs, wide.inputs)
        rises = not call.inside and made.relative > _RISES * max(before, least)
        is_suspect = always or rises or made.units > _LOOKED_AT
        alone = _alone(call, wide) if has_numbers and is_suspect else None
        if alone is None:
            continue
        output, gradient, times = alone
        if _is_far(output):
            # Max pooling turns NaN into finite numbers, which are no evidence either.
            if not forward or before <= 1:
                forward.append(TooFar(call, wide, "forward", output.units))
        elif rises and (times > _AMPLIFIES or made.relative > _OFF):
            what = (
                f"`{call.path}` amplifies rounding by {times:,.0f}; its inputs are off by "
                f"{before:.2%}, its outputs by {made.relative:.1%} of their size"
            )
            forward.append(TooFar(*_maker(pairs[: i + 1]), "forward", made.units, what))
        # The gradient that a layer is to blame for is that of what it takes.
        elif _is_far(gradient) and not any(each.call in call.inside for each in backward):
            backward.append(TooFar(call, wide, "backward", gradient.units))
    far = [(pair, row) for pair, row in zip(pairs, rows) if row.units > LIMIT]
    if far and not forward and not backward:
        # The first output, or else the gradient that came first.
        (pair, row) = next((each for each in far if _is_far(each[1].output)), far[-1])
        return [TooFar(*pair, SIDES[not _is_far(row.output)], row.units)]
    # Gradients come in reverse order. A cell that is called for each time step is named once.
    culprits: dict[tuple[str, str], TooFar] = {}
    for culprit in (*forward, *reversed(backward)):
        culprits.setdefault((culprit.call.path, culprit.side), culprit)
    return list(culprits.values())


def _alone(call: Call, wide: Call) -> tuple[Distance | None, Distance | None, float] | None:
    """Makes a call again in both dtypes, on the inputs in 16 bits.

    Returns:
        How far its outputs and its gradients are off by themselves, and how many times as far as
        its inputs its outputs move. None if that tells nothing: the layer draws random numbers in a
        way of its own or has a state, or what it takes is spoilt already.
    """

    def again(layer: Any, dtype: str | None = None, noise: records.Noise | None = None) -> Call:
        run = runs.replay(call, layer, call.gradients, dtype, noise)
        return run.calls[-1].measure(run.gradients)

    own, unit = again(call.layer), UNIT_ROUNDOFF[call.dtype]
    first, second = ([each.numpy().tobytes() for each in of.outputs] for of in (call, own))
    if first != second:
        return None
    exact = again(wide.layer, "float32")
    runs.explain([exact], lambda noise: [again(wide.layer, "float32", noise)], unit)
    # Gradients that are missing tell nothing here: they may be so upstream.
    kept = {key: each for key, each in exact.quantities.items() if key in own.quantities}
    exact.quantities = kept
    outputs = (each for (side, _), each in kept.items() if side == "forward")
    moved = max((each.explained / each.size for each in outputs if each.size), default=0.0)
    output, gradient = (own.distance(exact, side) for side in SIDES)
    gradient = gradient if records.are_finite(call.gradients) else None
    return output, gradient, moved / (NOISE * unit)


def _maker(pairs: Sequence[_Pair]) -> _Pair:
    """Returns the last call; if it is float32, the layer that has rounded what it takes."""
    # Where nothing is cast, a layer gets the very tensor that another one returned.
    wanted = {id(each) for each in pairs[-1][1].outputs}
    for call, wide in reversed(pairs if hasattr(pairs[-1][0].layer, "compute_dtype") else ()):
        if wanted.isdisjoint(map(id, wide.outputs)) or isinstance(call.layer, tf.keras.Model):
            continue
        if getattr(call.layer, "compute_dtype", None) in LOW_PRECISION_NAMES:
            return call, wide
        wanted.update(map(id, wide.inputs))
    return pairs[-1]


def _finding(culprit: TooFar, model: tf.keras.Model) -> Finding:
    """Says what a call does, and how far it is off where that is a number."""
    call, units, why, line = culprit.call, culprit.units, culprit.what, None
    both = (getattr(each.layer, "weights", ()) for each in (call, culprit.wide))
    weights = [records.relative(*map(records.array, each)) for each in zip(*both)]
    if not why and any(weights):
        why = f"Its weights differ from those of the reference by up to {max(weights):.2%}"
    if not why:
        why, line = _explanation(culprit)
    if 1 <= units < math.inf:
        why += f": {units:,.0f} times as far off as rounding explains"
    cure = 'Compute it in float32: cast there, or create the layer with dtype="float32".'
    if call.path == LOSS:
        cure = "Cast to float32 in the loss: tf.cast(predictions, tf.float32)."
    elif call.kind != "Sequential" and (own := policy_path(model, call.path)):
        cure = f'Run the layer in float32: keras_mp.convert(model, {{"{own}": "float32"}}).'
    where, cure = f"{call.path} ({call.kind})", "Change that line. Or: " * bool(line) + cure
    return Finding(DIFFERENCES[culprit.side], where, line, f"{why}.", cure, units)


def _explanation(culprit: TooFar) -> tuple[str, Line | None]:
    """Finds the first operation that does not do in 16 bits what it does in float32.

    Returns:
        What it does, and its line; None for the line where all operations agree.
    """
    call, dtype, is_backward = culprit.call, culprit.call.dtype, culprit.side == "backward"
    kept = KeptOperations(), KeptOperations()
    for operations, layer, to in zip(kept, (call.layer, culprit.wide.layer), (None, "float32")):
        with op_callbacks.observed(operations.keep):
            runs.replay(call, layer, call.gradients, to)
    narrow, wide = (
        [op for op in each.operations if op.origin.is_gradient == is_backward] for each in kept
    )
    kinds = ([op.kind for op in ops] for ops in (narrow, wide))
    blocks = difflib.SequenceMatcher(None, *kinds, autojunk=False).get_matching_blocks()
    pairs = (pair for i, j, count in blocks for pair in zip(narrow[i : i + count], wide[j:]))
    about = "gradient" if is_backward else "output"
    unknown = f"Its {about} in {dtype} is missing, or further off than rounding explains"
    told = ((*_told(op, exact, kept[0], dtype), op.origin.line) for op, exact in pairs)
    return max([(2.0, unknown, None), *told], key=operator.itemgetter(0))[1:]


def _told(op: Operation, exact: Operation, kept: KeptOperations, dtype: str) -> tuple[float, str]:
    """Describes what an operation does in 16 bits.

    Args:
        op: Operation, in 16 bits.
        exact: the same in the reference.
        kept: what is known of the tensors that operations in 16 bits have computed.
        dtype: str. The dtype of 16 bits.

    Returns:
        How many times as far off its results are as its inputs, infinite if these are lost; and
        what is wrong.
    """
    kind, most = op.kind, float(tf.as_dtype(dtype).max)
    held = f"{dtype}, which holds {smallest_of(dtype):.1g} to {most:.5g}"
    inputs, outputs = _both(op.inputs, exact.inputs), _both(op.outputs, exact.outputs)
    for _, narrow, wide, tensor in inputs:
        largest = np.abs(wide).max(initial=0)
        is_zero = 0 < largest < smallest_of(dtype) and not narrow.any()
        is_lost = is_zero or (np.isfinite(largest) and not np.isfinite(narrow).all())
        if is_lost and not kept.of([tensor]):
            what = f"{'a constant' if wide.size == 1 else 'numbers'} of {largest:.1g}"
            became = "0" if is_zero else "infinite"
            return math.inf, f"{kind} takes {what}: {became} in {held}"
    if not outputs:
        return 0.0, ""
    before = max((each[0] for each in inputs), default=0.0)
    after, narrow, wide, _ = max(outputs, key=operator.itemgetter(0))
    terms, finite = _terms(op), wide[np.isfinite(wide)]
    summed = f"{kind} (a sum over {terms:,} values)" if terms > 1 else kind
    if math.isinf(after) and not math.isinf(before):
        reached, bad = np.abs(finite).max(initial=0), np.count_nonzero(~np.isfinite(narrow))
        begin = "Overflow: " if reached > most else "Overflow inside of " if terms > 1 else ""
        if kind in _POLES and any((each[1] == 0).any() for each in inputs):
            begin, summed = "", f"{summed} of zero"
        what = f"{bad:,} of {narrow.size:,} results are not finite in {held}"
        return after, f"{begin}{summed} reaches {reached:.3g} in float32; {what}"
    size, zeros = records.rms(finite), records.underflow(narrow, wide)
    taken = max((records.rms(each[1][np.isfinite(each[1])]) for each in inputs), default=0.0)
    # The distance between neighbouring numbers of this size.
    spacing = math.ldexp(UNIT_ROUNDOFF[dtype], math.frexp(taken)[1])
    is_small = kind in _DIFFERENCES and len(inputs) == 2 and taken > _CANCELS * size
    begin = "Cancellation: " if is_small else "Underflow: " if zeros > _FEW_ZEROS else ""
    return after / max(before, UNIT_ROUNDOFF[dtype]), (
        f"{begin}{summed} of numbers of about {taken:.3g}, which are multiples of {spacing:.1g} in "
        f"{dtype}, is off by {after:.2%} of {size:.1g}, and {zeros:.0%} of the results of {kind} "
        f"are 0 in {dtype} and not in float32"
    )


def _both(narrow: Iterable[Any], wide: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns the floating-point tensors with the same shape in both."""
    pairs = ((n, w) for n, w in zip(narrow, wide) if runs.is_floating(n) and runs.is_floating(w))
    arrays = ((records.array(n), records.array(w), n) for n, w in pairs if n.shape == w.shape)
    return [(records.relative(n, w), n, w, tensor) for n, w, tensor in arrays]


def _terms(op: Any) -> int:
    """Returns how many terms are summed for each result of an operation."""
    shapes, made = [[*each.shape] for each in op.inputs], [*op.outputs[0].shape]
    if op.kind == "Cumsum":
        return max(shapes[0], default=1)
    terms = (graph.work(op.kind, [*shapes, made], op.equation) or 0) // 2
    if op.kind in _REDUCTIONS:
        terms = sum(math.prod(each.shape) for each in op.inputs if each.dtype.is_floating)
    return terms // max(math.prod(made), 1)


def _report(run: Run, other: Run, scale: float) -> Report:
    """Returns the exponents of the reference, each with the dtype that it has in 16 bits.

    Args:
        run: Run in 16 bits.
        other: Run in float32.
        scale: float. The loss scale that training begins with.
    """
    layers, rows = layers_by_path(run.model), []
    names = {id(weight): name for name, weight in runs.named_weights(run.model).items()}
    of_weights = {
        names[id(weight)]: ("gradient", path, layer.compute_dtype)
        for path, (weight, layer) in variables_by_path(run.model).items()
    }
    # If the run had to lower the loss scale, gradients overflow at the one before.
    at = 2 * run.loss_scale if run.loss_scale < scale else math.inf
    at = at if records.are_finite(run.all_gradients()) else run.loss_scale
    for call, wide in zip(run.calls, other.calls):
        is_shown = call.path in layers and not isinstance(call.layer, tf.keras.Model)
        for (side, name), exact in wide.quantities.items():
            value = call.quantities.get((side, name))
            if value is None or not (is_shown or name in of_weights):
                continue
            of_output = "output" if side == "forward" else "output gradient"
            what = of_weights.get(name, (of_output, call.path, value.tensor.dtype.name))
            row = Row(*what, histogram.Histogram.count(exact.tensor))
            if row.is_scaled:
                lost = records.underflow(value.values, exact.values)
                row = row._replace(overflowed_at=at, is_noise=exact.is_noise, lost=lost)
            rows.append(row)
    return Report(rows, step=0, counted=1, loss_scale=scale)
