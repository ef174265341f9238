"""How far two runs are apart, layer by layer, and which layer is the first that is too far."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from keras_mp.numerics.comparison import ComparedLayer, Difference
from keras_mp.numerics.distances import LIMIT, Distance, kind_of_gradient, rms, underflow
from keras_mp.numerics.records import SIDES, LayerRecord, Quantity
from keras_mp.numerics.runs import LOSS

# A gradient of which so many numbers are zero only in 16 bits has underflowed. In sound models a
# few become zero, too; a scale that grows keeps them.
MANY_ZEROS = 0.05


def compare_layers(
    pairs: Sequence[tuple[LayerRecord, LayerRecord]],
) -> tuple[list[ComparedLayer], list[Difference]]:
    """Compares two runs, and names the first layer that is too far.

    Args:
        pairs: sequence of the same layers in a run and in the reference.

    Returns:
        A row for each layer, and no finding or one.
    """
    largest = largest_gradients(other for _, other in pairs)
    rows: list[ComparedLayer] = []
    too_far: dict[str, list[Difference]] = {side: [] for side in SIDES}
    for layer, other in pairs:
        worst = []
        for side in SIDES:
            found = distances(layer, other, side, largest)
            distance = Distance.worst(list(found.values()))
            worst.append(distance)
            if distance is not None and distance.units > LIMIT:
                name = next(name for name in found if found[name] is distance)
                what = _what(layer, other, side, name)
                too_far[side].append(Difference(layer.path, layer.kind, side, what, None, distance))
        rows.append(ComparedLayer(layer.path, layer.kind, layer.dtype, *worst))
    # Variables and arguments of a function are behind its operations.
    backward = [each for each in too_far["backward"] if each.kind not in ("variable", "argument")]
    return rows, too_far["forward"][:1] or (backward or too_far["backward"])[-1:]


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
