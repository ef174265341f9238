"""What each layer itself loses: it is run again in both dtypes, on what it got in 16 bits."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.numerics import operations, runs
from keras_mp.numerics.comparison import ComparedLayer, Finding
from keras_mp.numerics.distances import LIMIT, Distance, apart, is_of_weight, relative, rms
from keras_mp.numerics.explanations import Explanation, explain
from keras_mp.numerics.layer_calls import Call, RandomNumbers
from keras_mp.numerics.noise import NOISE, NOISY_RUNS, Noise
from keras_mp.numerics.runs import Run

# A layer amplifies rounding if what it returns moves by that many times what its inputs do, and if
# in this batch the two runs are so many times further apart behind it than before.
_AMPLIFIES, _RISES = 64.0, 16.0


class _Own(NamedTuple):
    """What a layer does to the same inputs.

    Attributes:
        forward: Distance, or None.
        backward: Distance, or None.
        amplification: float. How much further than its inputs noise moves its outputs.
    """

    forward: Distance | None
    backward: Distance | None
    amplification: float


class _Culprit(NamedTuple):
    """A call that loses more than rounding explains.

    Attributes:
        call: in 16 bits.
        wide: the same in float32.
        distance: Distance.
        text: what it does, where that is known already.
    """

    call: Call
    wide: Call
    distance: Distance
    text: str | None = None


def judge(
    rows: list[ComparedLayer], run: Run, other: Run, numbers: RandomNumbers
) -> tuple[list[ComparedLayer], list[Finding]]:
    """Runs each layer again, and says which of them lose more than rounding explains.

    Args:
        rows: of each call of the run, as far as it is known.
        run: Run in 16 bits.
        other: Run in float32.
        numbers: RandomNumbers that both drew.

    Returns:
        The rows, with what is each layer's own; and the findings, in the order in which things
        happened. Of layers inside of each other the innermost is named, and what gets numbers that
        are not finite is not blamed for what it makes of them.
    """
    judged: list[ComparedLayer] = []
    forward: list[_Culprit] = []
    backward: list[_Culprit] = []
    for row, call, wide in zip(rows, run.calls, other.calls):
        own = _own(call, wide, run, numbers)
        judged.append(dataclasses.replace(row, own_output=own.forward, own_gradient=own.backward))
        if any(call.contains(culprit.call) for culprit in forward):
            continue
        if own.forward is not None and own.forward.units > LIMIT:
            # A pooling with the maximum makes finite numbers of NaN, which say nothing either.
            if not forward or _off_before(call, wide) <= 1:
                forward.append(_Culprit(call, wide, own.forward))
            continue
        if not any(call.contains(each) for each in run.calls):
            text = _amplification(call, wide, row, own.amplification)
            if row.output is not None and text is not None:
                forward.append(_Culprit(call, wide, row.output, text))
        is_inside = any(call.contains(culprit.call) for culprit in backward)
        if own.backward is not None and own.backward.units > LIMIT and not is_inside:
            backward.append(_Culprit(call, wide, own.backward))
    # The gradients came the other way.
    sides = {"forward": forward, "backward": backward[::-1]}
    # A cell that is called for each time step is named once.
    first = {
        (culprit.call.path, side): culprit for side in sides for culprit in reversed(sides[side])
    }
    return judged, [
        _finding(culprit, side, run, numbers)
        for side in sides
        for culprit in sides[side]
        if first[culprit.call.path, side] is culprit
    ]


def _own(call: Call, wide: Call, run: Run, numbers: RandomNumbers) -> _Own:
    upstream = run.gradients[call.position]
    narrow = runs.replay(call, call.layer, upstream, numbers=numbers)
    before = map(runs.array, runs.floating(call.outputs))
    inputs = runs.floating((call.args, call.kwargs))
    if not _are_finite(inputs) or not all(map(_same, before, map(runs.array, narrow.outputs))):
        # It draws numbers in a way of its own, or remembers something, or only passes on what
        # another one has done.
        return _Own(None, None, 0.0)
    exact = runs.replay(call, wide.layer, upstream, numbers=numbers, dtype="float32")
    unit = runs.unit_of(call)
    noisy = []
    for seed in range(NOISY_RUNS):
        noise = Noise(unit, seed)
        with noise.on_weights(wide.layer):
            noisy.append(
                runs.replay(
                    call,
                    wide.layer,
                    upstream,
                    numbers=numbers,
                    dtype="float32",
                    move=noise,
                    change=noise.both_ways,
                )
            )
    sides = [[each.forward() for each in (narrow, exact, *noisy)]]
    sides.append([each.backward() for each in (narrow, exact, *noisy)])
    forward, backward = (
        _worst(*values, unit=unit, are_gradients=i == 1) for i, values in enumerate(sides)
    )
    moved = [
        relative(each.forward()[name], value)
        for name, value in exact.forward().items()
        for each in noisy
    ]
    if not _are_finite(upstream):
        backward = None
    return _Own(forward, backward, max(moved, default=0.0) / (NOISE * unit))


def _are_finite(tensors: Iterable[tf.Tensor | None]) -> bool:
    return all(np.isfinite(runs.array(value)).all() for value in tensors if value is not None)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=True)


def _worst(
    narrow: dict[str, np.ndarray],
    exact: dict[str, np.ndarray],
    *noisy: dict[str, np.ndarray],
    unit: float,
    are_gradients: bool,
) -> Distance | None:
    distances = []
    for name in narrow.keys() & exact.keys():
        explained = max(apart(each[name], exact[name]) for each in noisy)
        values = narrow[name], exact[name], explained, unit
        if are_gradients:
            # Those of inputs and of weights have sizes of their own.
            beside = [v for each, v in exact.items() if is_of_weight(each) == is_of_weight(name)]
            largest = max(rms(each[np.isfinite(each)]) for each in beside)
            distances.append(Distance.of_gradient(*values, largest))
        else:
            distances.append(Distance.of(*values))
    return Distance.worst(distances)


def _amplification(call: Call, wide: Call, row: ComparedLayer, amplification: float) -> str | None:
    """Says so if a layer blows up what the runs were apart before."""
    unit = runs.unit_of(call)
    if amplification <= _AMPLIFIES or row.output is None or row.output.relative <= _RISES * unit:
        return None
    before = _off_before(call, wide)
    if row.output.relative <= _RISES * max(before, unit):
        return None
    return (
        f"cancellation: it amplifies rounding by {amplification:,.0f}; what goes in is off by "
        f"{before:.2%}, what comes out by {row.output.relative:.1%}"
    )


def _off_before(call: Call, wide: Call) -> float:
    """How far what goes in is apart in the two runs."""
    inputs = [runs.floating((each.args, each.kwargs)) for each in (call, wide)]
    return max([relative(runs.array(n), runs.array(w)) for n, w in zip(*inputs)] or [0.0])


def _finding(culprit: _Culprit, side: str, run: Run, numbers: RandomNumbers) -> Finding:
    call, wide, distance, text = culprit
    reason = Explanation(text, None) if text else _explanation(call, wide, side, run, numbers)
    kind = runs.kind_of(call.layer)
    return Finding(call.path, kind, side, reason.what, reason.line, distance)


def _of_other_weights(layer: tf.keras.layers.Layer, wide: Any) -> str | None:
    pairs = zip(getattr(layer, "weights", ()), getattr(wide, "weights", ()))
    distances = [relative(runs.array(narrow), runs.array(other)) for narrow, other in pairs]
    if not any(distances):
        return None
    return f"its weights are others than in the reference, up to {max(distances):.2%} off"


def _explanation(
    call: Call, wide: Call, side: str, run: Run, numbers: RandomNumbers
) -> Explanation:
    other = _of_other_weights(call.layer, wide.layer)
    if other is not None:
        return Explanation(other, None)
    upstream = run.gradients[call.position]
    dtype = runs.dtype_of(call)
    with operations.kept() as narrow:
        runs.replay(call, call.layer, upstream, numbers=numbers)
    with operations.kept() as exact:
        runs.replay(call, wide.layer, upstream, numbers=numbers, dtype="float32")
    return explain(narrow, exact, side, dtype) or Explanation(
        f"what it returns in {dtype} is further off than rounding explains", None
    )
