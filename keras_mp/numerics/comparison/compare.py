"""Compares a model in two dtypes on the same batch, and tells defects from rounding.

A model in 16 bits drifts away from the same model in float32, and more so the deeper it is. Two
measurements tell whether that is a defect.

The layer's own share: each layer runs again in float32, on the inputs and upstream gradients that
it had in 16 bits. The results differ by the errors of this layer alone.

What rounding explains: the float32 model runs with inputs, weights and outputs that are moved at
random by as much as rounding moves them. Layers that amplify such errors, or a ReLU whose input
changes its sign, do so in these runs as well. Distances are given in units of the largest effect
in a few such runs.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.numerics import batches, own_thread
from keras_mp.numerics.batches import Structure
from keras_mp.numerics.calls import Call, Called, RandomNumbers
from keras_mp.numerics.causes import CURES, Hazard, Observed, Said
from keras_mp.numerics.comparison import differences, records
from keras_mp.numerics.comparison.compared import ComparedLayer, Comparison
from keras_mp.numerics.comparison.differences import FAR, TooFar, cure_in
from keras_mp.numerics.comparison.records import SIDES, LayerRecord, Record
from keras_mp.numerics.distances import (
    LIMIT,
    NOISE,
    NOISY_RUNS,
    UNIT_ROUNDOFF,
    Distance,
    Noise,
    are_finite,
    array,
    relative,
    rms,
)
from keras_mp.numerics.results import Finding
from keras_mp.numerics.run import (
    GivenLoss,
    Run,
    Runner,
    check_finite,
    check_same_calls,
    forward_of,
    replay,
)
from keras_mp.support.messages import Line
from keras_mp.support.progress import Progress

# A layer amplifies rounding if its outputs move so many times as far as its inputs, and if on this
# batch the outputs of the two runs are so many times further apart than the inputs.
_AMPLIFIES, _RISES = 64.0, 16.0

IGNORES_THE_SCALE = "a gradient that ignores the loss scale"
# A gradient does not grow with the loss scale if it is further from that, as a share of its size.
_NOT_LINEAR = 0.1


def compare(narrow: Runner, wide: Runner) -> Comparison:
    """Runs a model in 16 bits and in float32, and says where the two part.

    Both runs have the same weights, the same batch and the same random numbers, and go forwards and
    backwards. Each layer is then run once more, in both dtypes, on what it got in the first run, so
    that what it does itself is told from what it was given. All of it runs in eager, functions that
    `tf.function` made included. Weights and states are put back.

    Distances are in units of what rounding explains, which is measured: the float32 model is run
    with inputs, weights and outputs that are moved at random by up to two unit roundoffs of the
    narrow dtype. More than 16 units are a finding. So a deep model may drift as far as its rounding
    errors take it, and a layer that loses more than that is named, with what it does.

    The loss is multiplied by the loss scale that the model is trained with: the current one of its
    optimizer, or the one that the policy starts with, or 2 ** 15 in float16. If gradients overflow,
    it is halved until they do not, as training would do.

    Args:
        narrow: Runner of the model.
        wide: Runner of the reference, with the same random numbers.

    Returns:
        A `Comparison`: `findings` is empty if rounding explains everything, `str` is a table.

    Raises:
        ValueError: the two do not call the same layers, or numbers of the batch are not finite and
            so the loss is not either.
    """
    with Progress("compare", parts=4) as progress:
        progress.begin("in 16 bits")
        run = narrow.run_as_trained()
        progress.begin("the reference")
        other = wide.run()
        check_finite(other, wide.batch, needs_loss=False)
        check_same_calls(run, other)
        progress.begin("the reference, with noise")
        references = records.explained_layers(wide, other, UNIT_ROUNDOFF[run.dtype])
        pairs = list(zip(records.layers_of(run), references))
        layers, first = differences.compare_layers(pairs, narrow.model)
        progress.begin("each layer by itself")
        layers, own = _by_themselves(layers, run, other)
    findings = own or [*FAR.findings(first)]
    losses = run.loss, other.loss
    return Comparison(narrow.name, wide.name, layers, findings, losses, run.loss_scale)


def record(
    model: tf.keras.Model,
    x: Structure,
    y: Structure = None,
    sample_weight: Structure = None,
    *,
    loss: GivenLoss | None = None,
    step: Callable[..., tf.Tensor] | None = None,
    training: bool = True,
    seed: int = 0,
) -> Record:
    """Runs a model and keeps what each layer returned, and the gradients, to compare them later.

    Use it for runs that cannot be made side by side: of two commits, two machines, two versions of
    TensorFlow, two checkpoints. Save the record, and pass it to `check` with another one.
    Of a large tensor, a sample of 65,536 numbers is kept.

    Args:
        model: of `tf.keras`. It is run as it is.
        x: the inputs of a batch.
        y: its labels. Without them, or without a loss, the loss is a sum of the outputs with random
            signs.
        sample_weight: weights for the loss.
        loss: as for `check`.
        step: as for `check`.
        training: as for `check`.
        seed: int, of the random numbers, which two dtypes take different ones of: record both runs
            with `training=False`, or in the same dtype, or use `check`. Those of the program go on
            as if nothing had been recorded.

    Returns:
        A `Record`.

    Example:

    >>> import os, tempfile
    >>> model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(2)])
    >>> path = os.path.join(tempfile.mkdtemp(), "today.npz")
    >>> keras_mp.numerics.record(model, tf.ones([3, 4])).save(path)
    >>> today = keras_mp.numerics.Record.load(path)
    >>> now = keras_mp.numerics.record(model, tf.ones([3, 4]))
    >>> keras_mp.numerics.check(now, reference=today).findings
    ()
    """
    batch = batches.as_fit_takes_it(model, (x, y, sample_weight))
    if step is None:
        batches.build(model, batch)
    with own_thread.random_numbers(seed):
        forward = forward_of(model, model, batch, loss, step, training)
        runner = Runner(model, batch, forward, numbers=RandomNumbers())
        run = runner.run_as_trained()
        check_finite(run, batch, needs_loss=False)
        layers = records.explained_layers(runner, run, UNIT_ROUNDOFF[run.dtype])
    return Record(runner.name, layers, run.loss, run.loss_scale)


def compare_records(run: Record, reference: Record) -> Comparison:
    """Compares two recorded runs, and says where they part.

    A layer's own errors cannot be told from those of its inputs. So the finding is the first layer
    whose outputs are further apart than rounding explains; if there is none, it is the first layer
    of the backward pass whose gradients are.

    Args:
        run: what `record` returned, or `Record.load`.
        reference: the same, of the run to compare with.

    Returns:
        A `Comparison`.

    Raises:
        ValueError: the two have no layer in common.

    Example:

    >>> model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(2, name="dense")])
    >>> before = keras_mp.numerics.record(model, tf.ones([3, 4]))
    >>> model.layers[0].set_weights([2 * weight for weight in model.layers[0].get_weights()])
    >>> after = keras_mp.numerics.record(model, tf.ones([3, 4]))
    >>> keras_mp.numerics.comparison.compare.compare_records(after, before).findings[0].path
    'dense'
    """
    layers, first = differences.compare_layers(_pairs(run, reference))
    if not layers:
        raise ValueError(
            "The two records have no layer in common. Expected layers such as "
            f"{[layer.path for layer in reference.layers[:5]]}. "
            f"Received: {[layer.path for layer in run.layers[:5]]}"
        )
    findings = [*FAR.findings(first)]
    losses = run.loss, reference.loss
    return Comparison(run.name, reference.name, layers, findings, losses, run.loss_scale)


def _pairs(run: Record, reference: Record) -> list[tuple[LayerRecord, LayerRecord]]:
    if [each.path for each in run.layers] == [each.path for each in reference.layers]:
        return list(zip(run.layers, reference.layers))
    others = {layer.path: layer for layer in reference.layers}
    return [(each, others[each.path]) for each in run.layers if each.path in others]


def _by_themselves(
    rows: Sequence[ComparedLayer], run: Run, other: Run
) -> tuple[list[ComparedLayer], list[Finding]]:
    """Runs each layer again, and says which of them lose more than rounding explains.

    Args:
        rows: what is known so far of each call of the run.
        run: Run in 16 bits.
        other: Run in float32.

    Returns:
        The rows, with each layer's own distances; and the findings, the forward pass first. Of
        nested layers, the innermost is named. A layer whose inputs are not finite is not blamed.
    """
    unscaled_ones = [*UNSCALED.findings((rows, run, other))]
    judged: list[ComparedLayer] = []
    forward: list[TooFar] = []
    backward: list[TooFar] = []
    for row, call, wide in zip(rows, run.calls, other.calls):
        is_innermost = not any(call.contains(each) for each in run.calls)
        alone, amplifies = _alone(row, call, wide, is_innermost)
        own, of_gradients = alone.own_output, alone.own_gradient
        judged.append(alone)
        if any(call.contains(culprit.layer) for culprit in forward):
            continue
        if own is not None and own.units > LIMIT:
            # Max pooling turns NaN into finite numbers, which are no evidence either.
            if not forward or _off_before(call, wide) <= 1:
                forward.append(TooFar(call, wide, "forward", own))
            continue
        if row.output is not None and amplifies:
            forward.append(TooFar(call, wide, "forward", row.output, amplifies))
        is_inside = any(call.contains(culprit.layer) for culprit in backward)
        if of_gradients is not None and of_gradients.units > LIMIT and not is_inside:
            backward.append(TooFar(call, wide, "backward", of_gradients))
    if unscaled_ones:
        backward.clear()  # What comes of gradients of another size is no finding of its own.
    # Gradients come in reverse order. A cell that is called for each time step is named once.
    first: dict[tuple[str, str], TooFar] = {}
    for culprit in (*forward, *reversed(backward)):
        first.setdefault((culprit.layer.path, culprit.side), culprit)
    explained = (_explained(culprit, run) for culprit in first.values())
    return judged, [*FAR.findings(explained), *unscaled_ones]


def unscaled(seen: tuple[Sequence[ComparedLayer], Run, Run]) -> Iterator[Observed]:
    """The gradients of a call do not grow with the loss scale.

    That is tried with twice the upstream gradient, if gradients are off. Of nested calls, the
    innermost is named.
    """
    rows, run, other = seen
    is_off = any(row.gradient is not None and row.gradient.units > LIMIT for row in rows)
    found: list[Call] = []
    for call, wide in zip(run.calls, other.calls) if is_off and run.loss_scale != 1 else ():
        upstream = call.gradients
        if any(map(call.contains, found)) or not are_finite([*call.inputs, *upstream]):
            continue
        doubled = [None if each is None else 2 * each for each in upstream]
        once, twice = (
            replay(call, wide.layer, each, "float32", keeps=True) for each in (upstream, doubled)
        )
        growth = _growth(once.gradients, twice.gradients)
        if not growth:
            continue
        found.append(call)
        lines = (each.line for each in once.kept.operations if each.is_gradient and each.line)
        at, scale = f"{call.path} ({call.kind})", run.loss_scale
        yield Observed(at, next(lines, None), **growth, loss_scale=scale)


def judge_unscaled(name: str, times: float, loss_scale: float) -> Said:
    """Such a gradient is divided by a scale that it was not multiplied by."""
    return Said(
        IGNORES_THE_SCALE,
        f"With twice the upstream gradient, the gradient of its {name} is {times:.3g} times as "
        f"large, not 2. So it is not multiplied by the loss scale, {loss_scale:g}, by which it is "
        "divided later.",
        CURES["unscaled"],
    )


UNSCALED = Hazard(unscaled, judge_unscaled)


def _growth(once: Mapping[str, tf.Tensor], twice: Mapping[str, tf.Tensor]) -> dict[str, Any]:
    """Returns which gradient is furthest from being twice as large, if one is far from it.

    Returns:
        dict of its name, and of how many times as large it is; empty if there is none.
    """
    worst, furthest = {}, _NOT_LINEAR
    for name, gradient in once.items():
        one, two = array(gradient), array(twice[name])
        size = rms(one) if np.isfinite(one).all() else 0.0
        if size and relative(two, 2 * one) > furthest:
            worst, furthest = {"name": name, "times": rms(two) / size}, relative(two, 2 * one)
    return worst


def _alone(
    row: ComparedLayer, call: Call, wide: Call, is_innermost: bool
) -> tuple[ComparedLayer, str]:
    """Makes a call again in both dtypes, on the same inputs.

    Args:
        row: what is known of it so far.
        call: in 16 bits.
        wide: in float32.
        is_innermost: bool. Whether no other call was made inside of it.

    Returns:
        The row, with the call's own distances; and words for how far it amplifies the distance of
        its inputs, "" if it does not.
    """
    upstream = call.gradients
    narrow = replay(call, call.layer, upstream)
    before, again = ([each.numpy().tobytes() for each in of.outputs] for of in (call, narrow))
    if before != again or not are_finite(call.inputs):
        # The layer draws random numbers in a way of its own or has a state, or its inputs are
        # spoilt already.
        return row, ""

    def in_float32(noise: Noise | None = None) -> LayerRecord:
        return _recorded(replay(call, wide.layer, upstream, "float32", noise))

    def distances() -> list[Distance | None]:
        largest = differences.largest_gradients([exact])
        each = (differences.distances(layer, exact, side, largest).values() for side in SIDES)
        return [Distance.worst(list(found)) for found in each]

    layer, exact = _recorded(narrow), in_float32()
    own, taken, made = distances(), 0.0, 0.0
    if is_innermost and row.output is not None:
        taken, made = _off_before(call, wide), row.output.relative
    rises = made > _RISES * max(taken, call.unit)
    # What one rounding explains needs no noise.
    if rises or any(each is not None and each.units > 1 for each in own):
        for seed in range(NOISY_RUNS):
            records.explain([exact], [in_float32(Noise(call.unit, seed))])
        own = distances()
    moved = [
        each.explained / size
        for each in exact.forward.values()
        if (size := rms(each.values[np.isfinite(each.values)]))
    ]
    times, amplifies = max(moved, default=0.0) / (NOISE * call.unit), ""
    if rises and times > _AMPLIFIES:
        amplifies = (
            f"cancellation: it amplifies rounding by {times:,.0f}; its inputs are off by "
            f"{taken:.2%}, its outputs by {made:.1%}"
        )
    of_gradients = own[1] if are_finite(upstream) else None
    return dataclasses.replace(row, own_output=own[0], own_gradient=of_gradients), amplifies


def _recorded(replayed: Run) -> LayerRecord:
    return LayerRecord.of(replayed.calls[-1], replayed.gradients)


def _off_before(call: Call, wide: Call) -> float:
    """Returns how far the inputs of a call are apart in the two runs."""
    pairs = zip(call.inputs, wide.inputs)
    return max((relative(array(n), array(w)) for n, w in pairs), default=0.0)


def _explained(culprit: TooFar, run: Run) -> TooFar:
    call, wide = culprit.layer, culprit.other
    what, line = culprit.what or _of_other_weights(call.layer, wide.layer), None
    if not what:
        what, line = _explanation(call, wide, culprit.side)
    return culprit._replace(what=what, line=line, in_float32=cure_in(run.model, call))


def _of_other_weights(layer: Called, wide: Called) -> str:
    pairs = zip(getattr(layer, "weights", ()), getattr(wide, "weights", ()))
    found = [relative(array(narrow), array(other)) for narrow, other in pairs]
    if not any(found):
        return ""
    return f"its weights differ from those of the reference by up to {max(found):.2%}"


def _explanation(call: Call, wide: Call, side: str) -> tuple[str, Line | None]:
    narrow = replay(call, call.layer, call.gradients, keeps=True)
    exact = replay(call, wide.layer, call.gradients, "float32", keeps=True)
    unknown = f"its output in {call.dtype} is further off than rounding explains", None
    return differences.explain(narrow.kept, exact.kept, side, call.dtype) or unknown
