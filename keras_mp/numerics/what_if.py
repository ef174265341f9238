"""Runs one batch at several loss scales and in several dtypes, and measures what is lost."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from keras_mp import keras_api, losses
from keras_mp.conversion import compute_dtypes, convert, units_by_path
from keras_mp.layer_paths import layers_by_path, variables_by_path
from keras_mp.numerics import batches, own_thread
from keras_mp.numerics.batches import Batch, Batches, Structure
from keras_mp.numerics.distances import UNIT_ROUNDOFF, relative
from keras_mp.numerics.exponents import Histogram, exponent_of
from keras_mp.numerics.layer_calls import LayerCall, RandomNumbers, floating
from keras_mp.numerics.lost import Lost, WhatIf
from keras_mp.numerics.noise import RMS_OF_JITTER, is_noise, jitter
from keras_mp.numerics.report_rows import GRADIENT, OUTPUT, OUTPUT_GRADIENT, Row
from keras_mp.numerics.reports import Report
from keras_mp.numerics.runs import Run, Runner, array, check_finite, named_weights
from keras_mp.numerics.training_loss import (
    GivenLosses,
    Loss,
    compiled_loss,
    given_loss,
    scale_in_training,
)
from keras_mp.step.schedule import INITIAL_LOSS_SCALE
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.progress import Progress

_SCALES = tuple(2.0**exponent for exponent in range(0, 25, 3))

# The values of each row of a run, and the dtype that they were computed in.
_Values = dict[tuple[str, str], tuple[np.ndarray, str]]


def what_if(
    model: tf.keras.Model,
    x: Structure | Batches,
    y: Structure = None,
    sample_weight: Structure = None,
    *,
    loss: GivenLosses | None = None,
    dtypes: str | Iterable[str] = LOW_PRECISION_NAMES,
    scales: Sequence[float] = _SCALES,
    seed: int = 0,
) -> WhatIf:
    """Runs a batch forwards and backwards in float32, and in 16 bits at several loss scales.

    The runs are real ones, of models that `keras_mp.convert` makes; `model` is not changed. Each
    starts from the same weights and the same random numbers, so that they differ by rounding only.
    They run eagerly and compare each value with that of the run in float32. Layers that the model
    has in float32 beside others in 16 bits stay there, and so do all where the policy of the model
    itself is in 16 bits: `keras_mp.convert` has kept them in float32, one by one.

    Args:
        model: A model of `tf.keras`, of any policy, that `keras_mp.convert` can make anew.
        x: a batch of inputs. Or several batches, as `keras_mp.numerics.batches.several` knows them:
            a `tf.data.Dataset`, a generator, or a list of tuples `(x, y)` or
            `(x, y, sample_weight)`. Labels and weights are in them then.
        y: a batch of labels.
        sample_weight: their weights.
        loss: callable with the labels and the predictions that returns the loss, or what else
            `compile` takes: a name such as "mse", a list or a dict. A function is given the weights
            as well, if there are any. Defaults to the loss that the model is compiled with; losses
            of layers are part of it.
        dtypes: "float16", "bfloat16" or an iterable of them. Defaults to both. None of them: only
            what is in `WhatIf.reference` is computed.
        scales: sequence of float, powers of two. Defaults to 2^0, 2^3 and so on up to 2^24.
        seed: int, of the random numbers of all runs, which the program's do not depend on.

    Returns:
        A `WhatIf`. Of several batches it has the worst losses, `batches` those of each, and `mean`
        the means.

    Raises:
        TypeError: `model` is not a model of `tf.keras`, or x is None.
        ValueError: it cannot be made anew, has no loss, a dtype is another one, a scale is no
            power of two, there are none, the batch is empty, x is a list with more or fewer parts
            than the model has inputs, or its loss in float32 is infinite or NaN, as where an input
            is.

    Example:

    >>> model = tf.keras.Sequential(
    ...     [tf.keras.Input([2]), tf.keras.layers.Dense(1, name="dense", use_bias=False)]
    ... )
    >>> loss = lambda y, predictions: tf.reduce_mean(tf.cast(predictions, "float32")) * 2.0**-30
    >>> result = keras_mp.numerics.what_if.what_if(
    ...     model, tf.ones([4, 2]), loss=loss, dtypes=["float16"], scales=[1.0, 2.0**10]
    ... )
    >>> result["float16", 1.0]["gradient", "dense/kernel"]
    Lost(values=2, zero=2, subnormal=0, infinite=0, error=1.0)
    >>> result.good_scales("float16")
    [1024.0]
    """
    dtypes = [dtypes] if isinstance(dtypes, str) else list(dtypes)
    scales = [float(scale) for scale in scales]
    for dtype in dtypes:
        if dtype not in LOW_PRECISION_NAMES:
            raise ValueError(
                "TensorFlow computes in float16 and bfloat16, not in float8. "
                "`WhatIf.reference.table(dtype, loss_scale)` shows what float8 would lose of the "
                f"values in float32. Received: dtype={dtype!r}"
            )
    if not scales:
        raise ValueError("Expected at least one loss scale. Received: scales=[]")
    for scale in scales:
        exponent_of(scale)
    keras_api.check_model(model)
    several = batches.several(x, y, sample_weight)
    if several is not None:
        how = {"loss": loss, "dtypes": dtypes, "scales": scales, "seed": seed}
        return WhatIf.of_batches([what_if(model, *batch, **how) for batch in several])
    batch = batches.as_fit_takes_it(model, (x, y, sample_weight))
    parts = 2 + bool(dtypes) + len(dtypes) * len(scales)
    with own_thread.random_numbers(seed), Progress("what_if", parts=parts) as progress:
        return _run_all(model, batch, loss, dtypes, scales, progress)


def _run_all(
    model: tf.keras.Model,
    batch: Batch,
    loss: GivenLosses | None,
    dtypes: Sequence[str],
    scales: Sequence[float],
    progress: Progress,
) -> WhatIf:
    numbers = RandomNumbers()
    runners = {}
    for dtype in ("float32", *dtypes):
        converted = _converted(model, dtype)
        value = _loss(converted, model, loss)
        runners[dtype] = Runner(converted, batch, value, numbers=numbers)
    if dtypes:
        progress.begin("for random numbers")
        # The first run draws them, and all dtypes hold those of the narrowest one.
        runners[max(dtypes, key=UNIT_ROUNDOFF.__getitem__)].run()
    progress.begin("in float32")
    reference = runners["float32"].run()
    check_finite(reference, batch)
    expected = _values(reference)
    consumers = _consumers(reference.calls)
    progress.begin("in float32, with noise")
    moved = _values(runners["float32"].run(noise=jitter()))
    noise = {
        row
        for row, (values, _) in expected.items()
        if row[0] != OUTPUT and row in moved and is_noise(values, moved[row][0])
    }
    lost: dict[tuple[str, float], dict[tuple[str, str], Lost]] = {}
    computed_in = {}
    for dtype in dtypes:
        for scale in scales:
            progress.begin(f"in {dtype} at 2^{exponent_of(scale)}")
            values = _values(runners[dtype].run(scale))
            lost[dtype, scale] = {
                row: Lost.of(*found, of_float32, 1.0 if row[0] == OUTPUT else scale)
                for row, (of_float32, _) in expected.items()
                if (found := values.get(row)) is not None
            }
            computed_in[dtype] = {row: in_dtype for row, (_, in_dtype) in values.items()}
    rows = [Row(*row, dtype, Histogram.of(values)) for row, (values, dtype) in expected.items()]
    return WhatIf(
        Report(rows, step=1, counted=1, loss_scale=1.0),
        lost,
        computed_in,
        consumers,
        noise,
        loss_scale=scale_in_training(model) or INITIAL_LOSS_SCALE,
        units=_units(reference.model),
        amplification=_amplification(expected, moved, consumers),
        largest_input=max((_largest(x) for x in floating(batch.x)), default=0.0),
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


def _converted(model: tf.keras.Model, dtype: str) -> tf.keras.Model:
    if dtype == "float32":
        return convert(model, dtype)
    # If the policy of the model is in 16 bits and no layer is, each was kept in float32 on purpose.
    is_kept = compute_dtypes(model).isdisjoint(LOW_PRECISION_NAMES)
    is_kept = is_kept and model.compute_dtype in LOW_PRECISION_NAMES
    return convert(model, {} if is_kept else f"mixed_{dtype}")


def _units(model: tf.keras.Model) -> dict[str, str]:
    """Returns the layers without a policy of their own, each with the layer that has it."""
    units = units_by_path(model)
    paths = layers_by_path(model)
    return {path: unit for unit in units for path in paths if path.startswith(f"{unit}/")}


def _loss(converted: tf.keras.Model, model: tf.keras.Model, loss: GivenLosses | None) -> Loss:
    if isinstance(loss, list | tuple | dict):
        converted.compile("sgd", loss=loss)
        return compiled_loss(converted, converted, is_a_copy=False)
    if loss is not None:
        return given_loss(converted, losses.get(loss))
    if not getattr(model, "loss", None) and not getattr(model, "compiled", False):
        raise ValueError(
            f"The model {model.name!r} has no loss: pass `loss`, or compile it. "
            f"Received: loss={loss!r}"
        )
    return compiled_loss(converted, model, is_a_copy=True)


def _values(run: Run) -> _Values:
    """Returns the values of a run; gradients are multiplied by its loss scale."""
    tensors: dict[tuple[str, str], list[tf.Tensor | None]] = {}
    dtypes: dict[tuple[str, str], str] = {}
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
