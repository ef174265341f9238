"""How far two runs are apart, layer by layer, and which layer is the first that is too far."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.conversion import policy_path
from keras_mp.numerics.causes import CURES
from keras_mp.numerics.comparison.compared import ComparedLayer
from keras_mp.numerics.comparison.explanations import Explanation
from keras_mp.numerics.comparison.layer_calls import LayerCall
from keras_mp.numerics.comparison.records import SIDES, LayerRecord, Quantity
from keras_mp.numerics.comparison.runs import LOSS
from keras_mp.numerics.distances import LIMIT, Distance, kind_of_gradient, rms, underflow
from keras_mp.numerics.results import Finding

# A gradient of which so many numbers are zero only in 16 bits has underflowed. In sound models a
# few become zero, too; a scale that grows keeps them.
MANY_ZEROS = 0.05


class TooFar(NamedTuple):
    """A layer that is further from the reference than rounding explains.

    Attributes:
        layer: LayerRecord.
        other: the same of the reference.
        side: "forward" or "backward".
        name: str. The quantity that is furthest.
        distance: Distance of that.
    """

    layer: LayerRecord
    other: LayerRecord
    side: str
    name: str
    distance: Distance

    def finding(self, model: tf.keras.Model | None = None) -> Finding:
        """Returns what is wrong, as far as what the layer returned tells."""
        reason = Explanation(_what(self), None)
        return difference(self.layer, self.side, reason, self.distance, cure_in(model, self.layer))


def difference(
    layer: LayerRecord | LayerCall,
    side: str,
    reason: Explanation,
    distance: Distance,
    in_float32: str,
) -> Finding:
    """Returns the finding that a layer differs from the reference.

    Args:
        layer: LayerRecord or LayerCall.
        side: "forward" or "backward".
        reason: Explanation.
        distance: Distance.
        in_float32: str. What else to do than to change the line.
    """
    at = f" ({reason.line.short})" if reason.line else ""
    why = reason.what[0].upper() + reason.what[1:]
    if 1 <= distance.units < math.inf:
        why += f": {distance.units:,.0f} times as far off as rounding explains"
    return Finding(
        f"a difference in the {side} pass",
        f"{layer.path} ({layer.kind}){at}",
        reason.line,
        f"{why}.",
        CURES["off"].format(in_float32=in_float32),
        distance.units,
    )


def cure_in(model: tf.keras.Model | None, layer: LayerRecord | LayerCall) -> str:
    """Returns what lets a layer compute in float32, as words that follow "or".

    Args:
        model: whose layer it is; None if it is not known.
        layer: LayerRecord or LayerCall.
    """
    if layer.path == LOSS:
        return "cast to float32 in the loss: tf.cast(predictions, tf.float32)"
    path = layer.path if model is None else policy_path(model, layer.path)
    if path is None or layer.kind == "Sequential":
        return 'compute it in float32: cast there, or create the layer with dtype="float32"'
    return f'run the layer in float32: keras_mp.convert(model, {{"{path}": "float32"}})'


def compare_layers(
    pairs: Sequence[tuple[LayerRecord, LayerRecord]],
) -> tuple[list[ComparedLayer], TooFar | None]:
    """Compares two runs, and finds the first layer that is too far.

    Args:
        pairs: sequence of the same layers in a run and in the reference.

    Returns:
        A row for each layer, and the first one that is too far, if there is one.
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
                too_far[side].append(TooFar(layer, other, side, name, distance))
        rows.append(ComparedLayer(layer.path, layer.kind, layer.dtype, *worst))
    forward, backward = (too_far[side] for side in SIDES)
    # Variables and arguments of a function are behind its operations.
    operations = [each for each in backward if each.layer.kind not in ("variable", "argument")]
    return rows, next(iter([*forward, *reversed(operations), *reversed(backward)]), None)


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


def _what(too_far: TooFar) -> str:
    layer, other, side, name, _ = too_far
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
