"""Whole runs: what each layer left, how far that is apart, and how far rounding may move it."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.numerics import runs
from keras_mp.numerics.batches import Batch
from keras_mp.numerics.comparison import ComparedLayer, Finding
from keras_mp.numerics.distances import (
    LIMIT,
    Distance,
    apart,
    is_of_weight,
    rms,
    underflow,
)
from keras_mp.numerics.layer_calls import RandomNumbers
from keras_mp.numerics.noise import NOISY_RUNS, Noise, run_with_noise
from keras_mp.numerics.records import Layer, Quantity, Record
from keras_mp.numerics.runs import Run, dtype_of, unit_of

# A gradient of which so many numbers are zero only in 16 bits has underflowed.
_MANY_ZEROS = 0.05

Arrays = dict[str, np.ndarray]


class _Sides(NamedTuple):
    """The tensors of one call.

    Attributes:
        forward: what it returned, by name.
        backward: the gradients, by name.
    """

    forward: Arrays
    backward: Arrays


def _sides(model: tf.keras.Model, run: Run) -> Iterator[_Sides]:
    """Yields what each call of a run left."""
    owners = {id(weight): name for name, weight in runs.named_weights(model).items()}
    of_weights = run.weight_gradients()
    for call in run.calls:
        outputs = enumerate(map(runs.array, runs.floating(call.outputs)))
        gradients = enumerate(run.gradients[call.position])
        backward = {
            f"output {i}": runs.array(gradient) / run.loss_scale
            for i, gradient in gradients
            if gradient is not None
        }
        for weight in getattr(call.layer, "trainable_weights", ()):
            # What is inside comes first, and takes its weights away from what is around it.
            name = owners.pop(id(weight), None)
            if name in of_weights:
                backward[name] = of_weights[name]
        yield _Sides({f"output {i}": value for i, value in outputs}, backward)


def explain_by_noise(
    model: tf.keras.Model,
    batch: Batch,
    loss: Callable[..., tf.Tensor],
    step: Any,
    numbers: RandomNumbers,
    training: bool,
    unit: float,
    exact: Run,
) -> dict[tuple[int, str, str], float]:
    """Runs a model with noise, and says how far that moves each tensor of each call.

    Args:
        model: what was run.
        batch: Batch.
        loss: as for `runs.run`.
        step: as for `runs.run`.
        numbers: RandomNumbers of the run.
        training: bool.
        unit: float. The unit roundoff of what is to be explained.
        exact: Run without noise.

    Returns:
        dict of root mean squares, by the number of the call, the side, and the tensor's name.
    """
    known = list(_sides(model, exact))
    largest: dict[tuple[int, str, str], float] = {}
    for seed in range(NOISY_RUNS):
        noisy = run_with_noise(
            Noise(unit, seed),
            model,
            batch,
            loss,
            step=step,
            numbers=numbers,
            training=training,
            loss_scale=exact.loss_scale,
        )
        for i, (before, after) in enumerate(zip(known, _sides(model, noisy))):
            for side in _Sides._fields:
                for name, value in getattr(before, side).items():
                    other = getattr(after, side).get(name)
                    # What a layer both returns and uses has no gradient as the moved output.
                    moved = math.inf if other is None else apart(other, value)
                    key = (i, side, name)
                    largest[key] = max(largest.get(key, 0.0), moved)
    return largest


def make_record(
    name: str, model: tf.keras.Model, run: Run, explained: Mapping[tuple[int, str, str], float]
) -> Record:
    """Makes a record of a run of a model."""
    layers = []
    for i, (call, sides) in enumerate(zip(run.calls, _sides(model, run))):
        kept = [
            {
                key: Quantity.of(values, explained.get((i, side, key), 0.0))
                for key, values in getattr(sides, side).items()
            }
            for side in _Sides._fields
        ]
        layers.append(
            Layer(call.path, runs.kind_of(call.layer), dtype_of(call), unit_of(call), *kept)
        )
    return Record(name, layers, run.loss, run.loss_scale)


def compare_layers(
    run: Record, reference: Record, by_position: bool = False
) -> tuple[list[ComparedLayer], list[Finding]]:
    """Compares what is known of two runs, and names the first layer that is too far."""
    if not by_position and [x.path for x in run.layers] != [x.path for x in reference.layers]:
        others = {layer.path: layer for layer in reference.layers}
        pairs = [(each, others[each.path]) for each in run.layers if each.path in others]
    else:
        pairs = list(zip(run.layers, reference.layers))
    rows, too_far = [], {"forward": [], "backward": []}
    largest = max((_largest(layer.backward, True) for layer in reference.layers), default=0.0)
    for layer, other in pairs:
        distances = {}
        for side in _Sides._fields:
            found = {}
            for name, quantity in getattr(layer, side).items():
                if name not in getattr(other, side):
                    continue
                beside = 0.0
                if side == "backward":
                    beside = largest if is_of_weight(name) else _largest(other.backward, False)
                unit = max(layer.unit, other.unit)
                found[name] = _distance(quantity, getattr(other, side)[name], unit, beside)
            distance = distances[side] = Distance.worst(list(found.values()))
            if distance is not None and distance.units > LIMIT:
                name = next(name for name in found if found[name] is distance)
                quantities = getattr(layer, side)[name], getattr(other, side)[name]
                what = _what(*quantities, layer.dtype, _title(side, name))
                if layer.path == runs.LOSS and layer.kind != other.kind:
                    what = f"different losses: a {layer.kind}, and a {other.kind} in the reference"
                too_far[side].append(Finding(layer.path, layer.kind, side, what, None, distance))
        rows.append(ComparedLayer(layer.path, layer.kind, layer.dtype, *distances.values()))
    first = too_far["forward"][:1] or too_far["backward"][-1:]
    return rows, first


def _largest(gradients: Mapping[str, Quantity], of_weights: bool) -> float:
    of_kind = [each.values for k, each in gradients.items() if is_of_weight(k) == of_weights]
    return max((rms(values[np.isfinite(values)]) for values in of_kind), default=0.0)


def _distance(quantity: Quantity, other: Quantity, unit: float, largest: float) -> Distance:
    if quantity.not_finite and not other.not_finite:
        return Distance(math.inf, math.inf)
    explained = max(quantity.explained, other.explained)
    return Distance.of_gradient(quantity.values, other.values, explained, unit, largest)


def _title(side: str, name: str) -> str:
    if not name.startswith("output"):
        return f"the gradient of {name}"
    return "the output" if side == "forward" else "the gradient of the output"


def _what(quantity: Quantity, other: Quantity, dtype: str, title: str) -> str:
    if quantity.values.shape != other.values.shape:
        return f"{title} has another shape"
    if quantity.not_finite and not other.not_finite:
        return f"{title} has {quantity.not_finite:,} numbers that are not finite"
    zeros = underflow(quantity.values, other.values)
    if zeros > _MANY_ZEROS:
        return f"underflow: {zeros:.0%} of {title} is 0 in {dtype} and not in the reference"
    return f"{title} drifts further than rounding explains"
