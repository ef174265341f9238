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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.conversion import convert
from keras_mp.numerics import batches, own_thread
from keras_mp.numerics.batches import Batch, Structure
from keras_mp.numerics.causes import CURES
from keras_mp.numerics.comparison import differences, records, runs
from keras_mp.numerics.comparison.calls import Call, Called, RandomNumbers, kept
from keras_mp.numerics.comparison.compared import ComparedLayer, Comparison
from keras_mp.numerics.comparison.differences import TooFar, cure_in
from keras_mp.numerics.comparison.noise import NOISE, NOISY_RUNS, Noise
from keras_mp.numerics.comparison.records import SIDES, LayerRecord, Record
from keras_mp.numerics.comparison.runs import Run, Runner
from keras_mp.numerics.comparison.training_loss import GivenLoss, loss_of
from keras_mp.numerics.distances import LIMIT, UNIT_ROUNDOFF, Distance, relative, rms
from keras_mp.numerics.results import Finding
from keras_mp.support.messages import Line
from keras_mp.support.progress import Progress

# A layer amplifies rounding if its outputs move so many times as far as its inputs, and if on this
# batch the outputs of the two runs are so many times further apart than the inputs.
_AMPLIFIES, _RISES = 64.0, 16.0

UNSCALED = "a gradient that ignores the loss scale"
# A gradient does not grow with the loss scale if it is further from that, as a share of its size.
_NOT_LINEAR = 0.1


def runners(
    model: tf.keras.Model,
    batch: Batch,
    reference: Any = "float32",
    loss: GivenLoss | None = None,
    step: Callable[..., tf.Tensor] | None = None,
    training: bool = True,
) -> tuple[Runner, Runner]:
    """Returns what runs a model, and what runs its reference, with the same random numbers.

    Args:
        model: of `tf.keras`, built.
        batch: Batch.
        reference: a policy for a copy of the model, or a model with the same layers.
        loss: as for `check`.
        step: as for `check`.
        training: as for `check`.
    """
    numbers = RandomNumbers()

    def runner(each: tf.keras.Model, is_a_copy: bool) -> Runner:
        value = loss_of(each, model, batch, loss, is_a_copy)
        return Runner(each, batch, value, numbers=numbers, step=step, training=training)

    is_given = isinstance(reference, tf.keras.Model)
    wide = reference if is_given else convert(model, reference)
    return runner(model, False), runner(wide, not is_given)


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
        runs.check_finite(other, wide.batch, needs_loss=False)
        runs.check_same_calls(run, other)
        progress.begin("the reference, with noise")
        references = records.explained_layers(wide, other, UNIT_ROUNDOFF[run.dtype])
        layers, first = differences.compare_layers(list(zip(records.layers_of(run), references)))
        progress.begin("each layer by itself")
        layers, own = _by_themselves(layers, run, other)
    findings = own or ([first.finding(cure_in(narrow.model, first.layer))] if first else [])
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
        value, numbers = loss_of(model, model, batch, loss, is_a_copy=False), RandomNumbers()
        runner = Runner(model, batch, value, numbers=numbers, step=step, training=training)
        run = runner.run_as_trained()
        runs.check_finite(run, batch, needs_loss=False)
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
    findings = [first.finding(cure_in(None, first.layer))] if first else []
    losses = run.loss, reference.loss
    return Comparison(run.name, reference.name, layers, findings, losses, run.loss_scale)


def _pairs(run: Record, reference: Record) -> list[tuple[LayerRecord, LayerRecord]]:
    if [each.path for each in run.layers] == [each.path for each in reference.layers]:
        return list(zip(run.layers, reference.layers))
    others = {layer.path: layer for layer in reference.layers}
    return [(each, others[each.path]) for each in run.layers if each.path in others]


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
        records.explain([exact], [in_float32(Noise(call.unit, seed))])
    largest = differences.largest_gradients([exact])
    forward, backward = (
        Distance.worst(list(differences.distances(layer, exact, side, largest).values()))
        for side in SIDES
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


def _layer(call: Call, replay: runs.Replay) -> LayerRecord:
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
    return differences.explain(narrow, exact, side, call.dtype) or unknown
