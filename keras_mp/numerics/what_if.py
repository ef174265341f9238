"""Runs one batch at several loss scales, and measures what is lost in 16 bits."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from keras_mp.conversion import units_by_path
from keras_mp.layer_paths import layers_by_path, variables_by_path
from keras_mp.numerics.distances import relative
from keras_mp.numerics.exponents import Histogram, exponent_of
from keras_mp.numerics.layer_calls import LayerCall, floating
from keras_mp.numerics.lost import Lost, WhatIf
from keras_mp.numerics.noise import RMS_OF_JITTER, is_noise, jitter
from keras_mp.numerics.report_rows import GRADIENT, OUTPUT, OUTPUT_GRADIENT, Row, RowKey
from keras_mp.numerics.reports import Report
from keras_mp.numerics.runs import Run, Runner, array, check_finite, named_weights
from keras_mp.numerics.training_loss import scale_in_training
from keras_mp.step.schedule import INITIAL_LOSS_SCALE
from keras_mp.support.progress import Progress

# The values of each row of a run, and the dtype that they were computed in.
_Values = dict[RowKey, tuple[np.ndarray, str]]


def what_if(narrow: Runner, wide: Runner, dtype: str, scales: Sequence[float]) -> WhatIf:
    """Runs a batch forwards and backwards in float32, and in 16 bits at several loss scales.

    The runs are real ones. Each starts from the same weights and the same random numbers, so that
    they differ by rounding only. They run eagerly, and each value is compared with that of the run
    in float32.

    Args:
        narrow: Runner of the model in 16 bits.
        wide: Runner of the same in float32, with the same random numbers.
        dtype: "float16" or "bfloat16", in which layers of the model compute.
        scales: sequence of float, powers of two, in ascending order.

    Raises:
        ValueError: a scale is no power of two, or the loss in float32 is infinite or NaN, as where
            an input is.
    """
    exponents = [exponent_of(scale) for scale in scales]
    with Progress("what_if", parts=2 + len(scales)) as progress:
        runs: dict[float, _Values] = {}
        # The first run draws the random numbers, of which wider dtypes hold those of narrow ones.
        for scale, exponent in zip(scales, exponents):
            progress.begin(f"in {dtype} at 2^{exponent}")
            runs[scale] = _values(narrow.run(scale))
        progress.begin("in float32")
        reference = wide.run()
        check_finite(reference, wide.batch)
        expected = _values(reference)
        consumers = _consumers(reference.calls)
        progress.begin("in float32, with noise")
        moved = _values(wide.run(noise=jitter()))
    noise = {
        row
        for row, (values, _) in expected.items()
        if row[0] != OUTPUT and row in moved and is_noise(values, moved[row][0])
    }
    lost = {
        scale: {
            row: Lost.of(*values[row], of_float32, 1.0 if row[0] == OUTPUT else scale)
            for row, (of_float32, _) in expected.items()
            if row in values
        }
        for scale, values in runs.items()
    }
    rows = [Row(*row, of, Histogram.of(values)) for row, (values, of) in expected.items()]
    return WhatIf(
        Report(rows, step=1, counted=1, loss_scale=1.0),
        dtype,
        lost,
        {row: of for row, (_, of) in runs[scales[-1]].items()},
        consumers,
        noise,
        loss_scale=scale_in_training(narrow.model) or INITIAL_LOSS_SCALE,
        units=_units(reference.model),
        amplification=_amplification(expected, moved, consumers),
        largest_input=max((_largest(x) for x in floating(narrow.batch.x)), default=0.0),
        largest_weights=_largest_weights(reference.model),
    )


def _largest_weights(model: tf.keras.Model) -> dict[str, float]:
    """Returns the largest weight of each layer with a policy of its own."""
    of = {
        path: [_largest(weight) for weight in layer.trainable_weights]
        for path, layer in units_by_path(model).items()
    }
    return {path: max(found) for path, found in of.items() if found}


def _largest(values: tf.Tensor | tf.Variable) -> float:
    return float(np.max(np.abs(array(values)), initial=0.0))


def _units(model: tf.keras.Model) -> dict[str, str]:
    """Returns the layers without a policy of their own, each with the layer that has it."""
    units = units_by_path(model)
    paths = layers_by_path(model)
    return {path: unit for unit in units for path in paths if path.startswith(f"{unit}/")}


def _values(run: Run) -> _Values:
    """Returns the values of a run; gradients are multiplied by its loss scale."""
    tensors: dict[RowKey, list[tf.Tensor | None]] = {}
    dtypes: dict[RowKey, str] = {}
    names = {id(weight): name for name, weight in named_weights(run.model).items()}
    for path, (variable, layer) in variables_by_path(run.model).items():
        tensors[GRADIENT, path] = [run.weights.get(names[id(variable)])]
        dtypes[GRADIENT, path] = layer.compute_dtype
    calls = [call for call in run.calls if _is_of_layer(call) and call.outputs]
    for kind in (OUTPUT, OUTPUT_GRADIENT):
        for call in calls:
            row = kind, call.path
            dtypes.setdefault(row, call.outputs[0].dtype.name)
            found = call.outputs if kind == OUTPUT else run.gradients[call.position]
            tensors.setdefault(row, []).extend(found)
    values = {}
    for row, found in tensors.items():
        arrays = [array(each).ravel() for each in found if each is not None]
        if sum(each.size for each in arrays):
            values[row] = np.concatenate(arrays), dtypes[row]
    return values


def _amplification(
    expected: _Values, moved: _Values, consumers: Mapping[str, set[str]]
) -> dict[str, float]:
    """Returns how many times as far as its inputs the outputs of each layer are moved by noise."""
    distances = {
        path: relative(moved[kind, path][0], values)
        for (kind, path), (values, _) in expected.items()
        if kind == OUTPUT and (kind, path) in moved
    }
    taken = dict.fromkeys(distances, 0.0)
    for path, takers in consumers.items():
        for taker in takers & taken.keys():
            taken[taker] = max(taken[taker], distances.get(path, 0.0))
    # Inputs that move by less may be exact.
    return {path: far / max(taken[path], RMS_OF_JITTER) for path, far in distances.items()}


def _is_of_layer(call: LayerCall) -> bool:
    is_model = isinstance(call.layer, tf.keras.Model)
    return isinstance(call.layer, tf.keras.layers.Layer) and not is_model


def _consumers(calls: Iterable[LayerCall]) -> dict[str, set[str]]:
    """Returns the paths of the layers that take the outputs of each layer."""
    # Where nothing is cast, a layer gets the very tensor that another layer returned, or that an
    # operation of a functional model of Keras 3 has computed from it.
    made_by: dict[int, set[str]] = {}
    consumers: dict[str, set[str]] = {}
    for call in calls:
        if isinstance(call.layer, tf.keras.Model):
            continue
        makers = set().union(*(made_by.get(id(each), ()) for each in call.inputs))
        if _is_of_layer(call):
            for maker in makers:
                consumers.setdefault(maker, set()).add(call.path)
            makers = {call.path}
        made_by |= {id(output): makers for output in call.outputs}
    return consumers
