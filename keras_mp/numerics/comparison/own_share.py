"""The errors of each layer alone: it runs again in both dtypes, on its inputs in 16 bits."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.numerics.causes import CURES
from keras_mp.numerics.comparison import runs
from keras_mp.numerics.comparison.calls import Call, Called, kept
from keras_mp.numerics.comparison.compared import ComparedLayer
from keras_mp.numerics.comparison.differences import (
    TooFar,
    cure_in,
    distances,
    explain,
    largest_gradients,
)
from keras_mp.numerics.comparison.noise import NOISE, NOISY_RUNS, Noise
from keras_mp.numerics.comparison.records import SIDES, LayerRecord
from keras_mp.numerics.comparison.records import explain as explain_by_noise
from keras_mp.numerics.comparison.runs import Replay, Run
from keras_mp.numerics.distances import LIMIT, Distance, relative, rms
from keras_mp.numerics.results import Finding
from keras_mp.support.messages import Line

# A layer amplifies rounding if its outputs move so many times as far as its inputs, and if on this
# batch the outputs of the two runs are so many times further apart than the inputs.
_AMPLIFIES, _RISES = 64.0, 16.0

UNSCALED = "a gradient that ignores the loss scale"
# A gradient does not grow with the loss scale if it is further from that, as a share of its size.
_NOT_LINEAR = 0.1


class _Own(NamedTuple):
    """How far a layer is off, given the same inputs in both dtypes.

    Attributes:
        forward: Distance, or None.
        backward: Distance, or None.
        amplification: float. How many times as far as its inputs noise moves its outputs.
    """

    forward: Distance | None = None
    backward: Distance | None = None
    amplification: float = 0.0


def judge(
    rows: Sequence[ComparedLayer], run: Run, other: Run
) -> tuple[list[ComparedLayer], list[Finding]]:
    """Runs each layer again, and says which of them lose more than rounding explains.

    Args:
        rows: of each call of the run, as far as it is known.
        run: Run in 16 bits.
        other: Run in float32.

    Returns:
        The rows, with each layer's own distances; and the findings, the forward pass first. Of
        nested layers, the innermost is named. A layer whose inputs are not finite is not blamed.
    """
    unscaled = [] if run.loss_scale == 1 else _unscaled(rows, run, other)
    judged: list[ComparedLayer] = []
    forward: list[TooFar] = []
    backward: list[TooFar] = []
    for row, call, wide in zip(rows, run.calls, other.calls):
        own = _own(call, wide)
        judged.append(dataclasses.replace(row, own_output=own.forward, own_gradient=own.backward))
        if any(call.contains(culprit.layer) for culprit in forward):
            continue
        if own.forward is not None and own.forward.units > LIMIT:
            # Max pooling turns NaN into finite numbers, which are no evidence either.
            if not forward or _off_before(call, wide) <= 1:
                forward.append(TooFar(call, wide, "forward", own.forward))
            continue
        if not any(call.contains(each) for each in run.calls):
            text = _amplification(call, wide, row, own.amplification)
            if row.output is not None and text is not None:
                forward.append(TooFar(call, wide, "forward", row.output, text))
        is_inside = any(call.contains(culprit.layer) for culprit in backward)
        if own.backward is not None and own.backward.units > LIMIT and not is_inside:
            backward.append(TooFar(call, wide, "backward", own.backward))
    if unscaled:
        backward.clear()  # What comes of gradients of another size is no finding of its own.
    # Gradients come in reverse order. A cell that is called for each time step is named once.
    first: dict[tuple[str, str], TooFar] = {}
    for culprit in (*forward, *reversed(backward)):
        first.setdefault((culprit.layer.path, culprit.side), culprit)
    findings = [_finding(culprit, run) for culprit in first.values()]
    return judged, [*findings, *unscaled]


def _unscaled(rows: Sequence[ComparedLayer], run: Run, other: Run) -> list[Finding]:
    """Returns findings about calls whose gradients do not grow with the loss scale.

    That is tried with twice the upstream gradient, if gradients are off. Of nested calls, the
    innermost is named.
    """
    if not any(row.gradient is not None and row.gradient.units > LIMIT for row in rows):
        return []
    found: list[Call] = []
    findings = []
    for call, wide in zip(run.calls, other.calls):
        upstream = call.gradients
        if any(map(call.contains, found)) or not runs.are_finite([*call.inputs, *upstream]):
            continue
        doubled = [None if each is None else 2 * each for each in upstream]
        with kept() as operations:
            once, twice = (
                runs.replay(call, wide.layer, each, "float32").gradients
                for each in (upstream, doubled)
            )
        growth = _growth(once, twice)
        if growth is None:
            continue
        found.append(call)
        lines = (each.line for each in operations.operations if each.is_gradient and each.line)
        at = next(lines, None)
        findings.append(
            Finding(
                UNSCALED,
                f"{call.path} ({call.kind})",
                at,
                f"With twice the upstream gradient, the gradient of its {growth.name} is "
                f"{growth.times:.3g} times as large, not 2. So it is not multiplied by the loss "
                f"scale, {run.loss_scale:g}, by which it is divided later.",
                CURES["unscaled"],
            )
        )
    return findings


class _Growth(NamedTuple):
    """How many times as large a gradient is with twice the upstream gradient."""

    name: str
    times: float


def _growth(once: Mapping[str, tf.Tensor], twice: Mapping[str, tf.Tensor]) -> _Growth | None:
    """Returns the gradient that is furthest from being twice as large, if one is far from it."""
    worst, furthest = None, _NOT_LINEAR
    for name, gradient in once.items():
        one, two = runs.array(gradient), runs.array(twice[name])
        size = rms(one) if np.isfinite(one).all() else 0.0
        if size and relative(two, 2 * one) > furthest:
            worst, furthest = _Growth(name, rms(two) / size), relative(two, 2 * one)
    return worst


def _own(call: Call, wide: Call) -> _Own:
    upstream = call.gradients
    narrow = runs.replay(call, call.layer, upstream)
    pairs = zip(map(runs.array, call.outputs), map(runs.array, narrow.outputs))
    is_same = all(np.array_equal(before, again, equal_nan=True) for before, again in pairs)
    if not is_same or not runs.are_finite(call.inputs):
        # The layer draws random numbers in a way of its own or has a state, or its inputs are
        # spoilt already.
        return _Own()

    def in_float32(noise: Noise | None = None) -> LayerRecord:
        return _layer(call, runs.replay(call, wide.layer, upstream, "float32", noise))

    layer, exact = _layer(call, narrow), in_float32()
    for seed in range(NOISY_RUNS):
        explain_by_noise([exact], [in_float32(Noise(call.unit, seed))])
    largest = largest_gradients([exact])
    forward, backward = (
        Distance.worst(list(distances(layer, exact, side, largest).values())) for side in SIDES
    )
    moved = [
        each.explained / size
        for each in exact.forward.values()
        if (size := rms(each.values[np.isfinite(each.values)]))
    ]
    return _Own(
        forward,
        backward if runs.are_finite(upstream) else None,
        max(moved, default=0.0) / (NOISE * call.unit),
    )


def _layer(call: Call, replay: Replay) -> LayerRecord:
    gradients = {name: runs.array(each) for name, each in replay.gradients.items()}
    return LayerRecord.of(call, replay.outputs, gradients)


def _amplification(call: Call, wide: Call, row: ComparedLayer, amplification: float) -> str | None:
    """Describes how much a layer amplifies the distance of its inputs, if it does."""
    if amplification <= _AMPLIFIES or row.output is None:
        return None
    before = _off_before(call, wide)
    if row.output.relative <= _RISES * max(before, call.unit):
        return None
    return (
        f"cancellation: it amplifies rounding by {amplification:,.0f}; its inputs are off by "
        f"{before:.2%}, its outputs by {row.output.relative:.1%}"
    )


def _off_before(call: Call, wide: Call) -> float:
    """Returns how far the inputs of a call are apart in the two runs."""
    pairs = zip(call.inputs, wide.inputs)
    return max((relative(runs.array(n), runs.array(w)) for n, w in pairs), default=0.0)


def _finding(culprit: TooFar, run: Run) -> Finding:
    call, wide = culprit.layer, culprit.other
    what, line = culprit.what or _of_other_weights(call.layer, wide.layer), None
    if not what:
        what, line = _explanation(call, wide, culprit.side)
    return culprit._replace(what=what, line=line).finding(cure_in(run.model, call))


def _of_other_weights(layer: Called, wide: Called) -> str:
    pairs = zip(getattr(layer, "weights", ()), getattr(wide, "weights", ()))
    found = [relative(runs.array(narrow), runs.array(other)) for narrow, other in pairs]
    if not any(found):
        return ""
    return f"its weights differ from those of the reference by up to {max(found):.2%}"


def _explanation(call: Call, wide: Call, side: str) -> tuple[str, Line | None]:
    with kept() as narrow:
        runs.replay(call, call.layer, call.gradients)
    with kept() as exact:
        runs.replay(call, wide.layer, call.gradients, "float32")
    unknown = f"its output in {call.dtype} is further off than rounding explains", None
    return explain(narrow, exact, side, call.dtype) or unknown
