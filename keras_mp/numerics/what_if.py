"""One batch at several loss scales and in several dtypes, and what each of them loses."""

import csv
import functools
import json
import operator
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.conversion import convert
from keras_mp.layer_paths import layers_by_path, variables_by_path
from keras_mp.numerics import batches
from keras_mp.numerics.exponents import Histogram, exponent_of
from keras_mp.numerics.reports import (
    GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    TOLERANCE,
    Report,
    Row,
    percent,
)
from keras_mp.numerics.watching import drawing_in_float32, watching_outputs
from keras_mp.policy import policy_scope
from keras_mp.step import gradients
from keras_mp.support import text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.progress import Progress

_SCALES = tuple(2.0**exponent for exponent in range(0, 25, 3))

# How much the weights move, relative to each, to tell which gradients are rounding noise of
# float32, whose unit roundoff is 2**-24; and from which change on, relative to its norm, one is.
_JITTER, _NOISE = np.float32(2.0**-20), 0.5

_SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}

# So many scales fit beside names that can be read.
_MOST_SCALES = 9

# The values of each row of a run, and what they were computed in.
_Values = dict[tuple[str, str], tuple[np.ndarray, str]]


class Lost(NamedTuple):
    """What a run in 16 bits has lost of a tensor that a run in float32 has.

    Attributes:
        values: int. How many values are finite and not zero in float32.
        zero: int. How many of these are zero in this run.
        subnormal: int. How many of these have fewer digits than the dtype has, since they are
            below its smallest normal number; 0 where the run computes the tensor in float32.
        infinite: int. How many of those that are finite in float32 are infinite or NaN.
        error: float. How far the tensor, unscaled, is from that in float32, as a share of the
            latter's norm; infinity where it is not finite.

    Example:

    >>> keras_mp.numerics.Lost(values=8, zero=2, subnormal=1, infinite=0, error=0.1).share
    0.25
    """

    values: int
    zero: int
    subnormal: int
    infinite: int
    error: float

    @property
    def share(self) -> float:
        """Which share of the values is zero, from 0 to 1."""
        return self.zero / self.values if self.values else 0.0


class WhatIf:
    """What was found: `what_if` returns it.

    `result[dtype, scale]` is a dict of (kind, path) and `Lost`; `str(result)` is a table.

    Attributes:
        dtypes: list of str.
        scales: list of float.
        reference: `Report` of the run in float32. As nothing is lost in it, its windows are those
            of what the model would have computed.
        computed_in: dict of dtypes, and of these dicts of (kind, path) and the dtype that the
            tensor had in such a run.
        consumers: dict of paths of layers, and of these sets of paths of the layers that take what
            they return.
        noise: set of (kind, path) of those gradients that are nothing but rounding noise in
            float32, since what they are of makes no difference to the loss: such as the bias of a
            layer before a batch normalization, or that of the keys of an attention. `advise` leaves
            them out. They are found by a second run in float32, whose weights differ by 2^-20 of
            each: noise is another one then, by half of its norm at least.
        batches: tuple of `WhatIf`s, one for each of several batches; else empty. Each `Lost` is the
            worst of theirs then, histograms of `reference` are sums, and noise is what is noise on
            all of them.

    Example:

    >>> model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    >>> loss = lambda y, predictions: tf.reduce_mean(predictions)
    >>> result = keras_mp.numerics.what_if(
    ...     model, tf.ones([4, 2]), loss=loss, dtypes=["bfloat16"], scales=[1.0]
    ... )
    >>> result.dtypes, result.scales
    (['bfloat16'], [1.0])
    """

    def __init__(
        self,
        reference: Report,
        lost: dict[tuple[str, float], dict[tuple[str, str], Lost]],
        computed_in: dict[str, dict[tuple[str, str], str]],
        consumers: dict[str, set[str]],
        noise: Iterable[tuple[str, str]] = (),
        batches: Sequence["WhatIf"] = (),
    ) -> None:
        self.reference, self.computed_in = reference, computed_in
        self.consumers, self.noise = consumers, set(noise)
        self._lost, self.batches = lost, tuple(batches)
        self.dtypes = list(dict.fromkeys(dtype for dtype, _ in lost))
        self.scales = sorted({scale for _, scale in lost})

    @classmethod
    def of_batches(cls, found: "Sequence[WhatIf]") -> "WhatIf":
        """Puts those of several batches together: the worst of each.

        Args:
            found: one for each batch. A single one is returned as it is.
        """
        if len(found) == 1:
            return found[0]
        return cls._joined(found, lambda lost: max(lost, key=_harm))

    @property
    def mean(self) -> "WhatIf":
        """The same with the means of all batches: counts are sums, errors are means."""
        return self._joined(self.batches, _mean) if self.batches else self

    @classmethod
    def _joined(cls, found: "Sequence[WhatIf]", join: Callable[[Sequence[Lost]], Lost]) -> "WhatIf":
        lost = {
            run: {
                row: join([each[run][row] for each in found if row in each[run]])
                for row in dict.fromkeys(row for each in found for row in each[run])
            }
            for run in found[0]._lost
        }
        consumers: dict[str, set[str]] = {}
        for path, takers in (pair for each in found for pair in each.consumers.items()):
            consumers.setdefault(path, set()).update(takers)
        return cls(
            functools.reduce(operator.add, (each.reference for each in found)),
            lost,
            found[0].computed_in,
            consumers,
            set.intersection(*(each.noise for each in found)),
            found,
        )

    def __getitem__(self, run: tuple[str, float]) -> dict[tuple[str, str], Lost]:
        dtype, scale = run
        if (dtype, float(scale)) not in self._lost:
            raise KeyError(
                f"Expected one of the dtypes {self.dtypes} and one of the scales {self.scales}. "
                f"Received: {run!r}"
            )
        return self._lost[dtype, float(scale)]

    def good_scales(self, dtype: str, tolerance: float = 0.0) -> list[float]:
        """Tells at which scales no gradient has lost anything.

        Args:
            dtype: one of `dtypes`.
            tolerance: float, from 0 to 1. Which share of a gradient may be zero. Defaults to 0.

        Returns:
            list of float.
        """
        return [scale for scale in self.scales if not self.losses(dtype, scale, tolerance)]

    def losses(self, dtype: str, scale: float, tolerance: float = 0.0) -> dict[Any, Lost]:
        """Returns those of the gradients that have lost something in a run.

        Args:
            dtype: one of `dtypes`.
            scale: one of `scales`.
            tolerance: float, from 0 to 1. Which share of a gradient may be zero. Defaults to 0.

        Returns:
            dict of (kind, path) and `Lost`.
        """
        return {
            row: lost
            for row, lost in self[dtype, scale].items()
            if row[0] != OUTPUT and (lost.infinite or lost.share > tolerance)
        }

    def table(self, dtype: str, kind: str = GRADIENT, rows: int | None = None) -> str:
        """Returns a table of rows by scales: which share has become zero, or infinite.

        Args:
            dtype: one of `dtypes`.
            kind: "gradient" (the default), "output" or "output gradient". Outputs do not depend on
                the scale.
            rows: int. How many rows are shown at most, those that lose most first, at as many
                scales as fit. Rows of equal layers in repeated blocks are one then, which has the
                numbers of the worst. Defaults to None: all rows and scales.

        Returns:
            str of several lines.
        """
        scales = self.scales[:1] if kind == OUTPUT else self.scales
        if rows is not None:
            scales = _spread(scales, _MOST_SCALES)
        ranked = []
        for row in self[dtype, scales[0]]:
            if row[0] == kind:
                is_noise = row in self.noise
                name = f"{row[1]} (noise)" if is_noise else row[1]
                lost = [self[dtype, scale][row] for scale in scales]
                alike = is_noise, *(bool(each.infinite) or each.share > TOLERANCE for each in lost)
                cells = (name, *map(_cell, lost))
                if rows is not None:
                    cells = tuple(cell.removesuffix(" %") for cell in cells)
                ranked.append(
                    text_tables.RankedRow(
                        cells,
                        rank(lost, is_noise),
                        alike,
                    )
                )
        header = (f"{kind}, {dtype}", *(f"2^{exponent_of(scale)}" for scale in scales))
        return "\n".join(text_tables.shortened(header, ranked, rows))

    def to_text(self, rows: int | None = text_tables.MOST) -> str:
        """Returns what `print` shows: for each dtype a headline, and the worst rows.

        Args:
            rows: int. How many rows each table has at most; None for all rows and scales. Defaults
                to 10.

        Returns:
            str of several lines, of at most 100 characters each unless `rows` is None.
        """
        found = []
        for dtype in self.dtypes:
            losses = {
                scale: self.losses(dtype, scale, TOLERANCE).keys() - self.noise
                for scale in self.scales
            }
            good = ", ".join(
                f"2^{exponent_of(scale)}" for scale in self.scales if not losses[scale]
            )
            tolerated = f"more than {100 * TOLERANCE:g} %"
            head = f"{dtype}: no gradient loses {tolerated} at {good}"
            if not good:
                head = f"{dtype}: at each of the scales a gradient loses {tolerated}"
            if rows is not None:
                head += ". Shares that become zero, in %:"
            found += text_tables.wrapped(head)
            found += [self.table(dtype, rows=rows), ""]
            if any(kind == OUTPUT_GRADIENT for of in losses.values() for kind, _ in of):
                found += [self.table(dtype, OUTPUT_GRADIENT, rows), ""]
            lossy = [lost for row, lost in self[dtype, self.scales[0]].items() if row[0] == OUTPUT]
            if any(lost.infinite or lost.share > TOLERANCE for lost in lossy):
                found += [self.table(dtype, OUTPUT, rows), ""]
        return "\n".join(found).rstrip()

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<WhatIf of {self.dtypes} at {len(self.scales)} scales>"

    def to_csv(self, path: Any) -> None:
        """Writes a line for each run and row.

        Args:
            path: str or path of the file.
        """
        with pathlib.Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("dtype", "scale", "kind", "path", *Lost._fields))
            for (dtype, scale), rows in self._lost.items():
                for row, lost in rows.items():
                    writer.writerow((dtype, scale, *row, *lost))

    def to_json(self, path: Any) -> None:
        """Writes a list of runs, each with a list of rows.

        Args:
            path: str or path of the file.
        """
        runs = []
        for (dtype, scale), rows in self._lost.items():
            found = []
            for (kind, name), lost in rows.items():
                error = lost.error if np.isfinite(lost.error) else None
                found.append(
                    {"kind": kind, "path": name, **dict(zip(Lost._fields, lost)), "error": error}
                )
            runs.append({"dtype": dtype, "scale": scale, "rows": found})
        pathlib.Path(path).write_text(json.dumps(runs))


def what_if(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    loss: Any = None,
    dtypes: str | Iterable[str] = LOW_PRECISION_NAMES,
    scales: Sequence[float] = _SCALES,
    seed: int = 0,
) -> WhatIf:
    """Runs a batch forwards and backwards in float32, and in 16 bits at several loss scales.

    The runs are real ones, of models that `keras_mp.convert` makes; `model` is not changed. Each
    starts from the same weights and the same random numbers, so that they differ by rounding only
    (layers of dropout and noise draw theirs in float32; what others draw in 16 bits differs). They
    run eagerly and compare each value with that of the run in float32. Layers that the model
    has in float32 beside others in 16 bits stay there.

    Args:
        model: A model of `tf.keras`, of any policy, that `keras_mp.convert` can make anew.
        x: a batch of inputs. Or several batches, as `keras_mp.numerics.batches.several` knows them:
            a `tf.data.Dataset`, a generator, or a list of tuples `(x, y)` or
            `(x, y, sample_weight)`. Labels and weights are in them then.
        y: a batch of labels.
        sample_weight: their weights.
        loss: callable with the labels and the predictions that returns the loss, or what else
            `compile` takes: a name such as "mse", a list or a dict. Defaults to the loss that the
            model is compiled with; losses of layers are part of it.
        dtypes: "float16", "bfloat16" or an iterable of them. Defaults to both. None of them: only
            what is in `WhatIf.reference` is computed.
        scales: sequence of float, powers of two. Defaults to 2^0, 2^3 and so on up to 2^24.
        seed: int. With Keras 2, that of TensorFlow before each run.

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
    >>> result = keras_mp.numerics.what_if(
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
                "TensorFlow computes in float16 and bfloat16. What float8 would lose of the values "
                "of float32, `WhatIf.reference.table(dtype, loss_scale)` tells. "
                f"Received: dtype={dtype!r}"
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
    with Progress("what_if", parts=2 + len(dtypes) * len(scales)) as progress:
        return _run_all(model, batch, loss, dtypes, scales, seed, progress)


def _run_all(
    model: Any,
    batch: batches.Batch,
    loss: Any,
    dtypes: Sequence[str],
    scales: Sequence[float],
    seed: int,
    progress: Progress,
) -> WhatIf:
    progress.begin("in float32")
    reference = _Replay(model, "float32", loss, seed)
    expected = reference.run(*batch, 1.0)
    if not np.isfinite(reference.loss):
        raise ValueError(
            f"The loss of the batch is {reference.loss} in float32, so that there is nothing to "
            f"compare with: {_where_not_finite(batch)}"
        )
    rows = [
        Row(kind, path, dtype, Histogram.of(values))
        for (kind, path), (values, dtype) in expected.items()
    ]
    progress.begin("in float32, with other weights")
    nearly = reference.run(*batch, 1.0, jitter=_JITTER)
    noise = {
        row
        for row, (values, _) in expected.items()
        if row[0] != OUTPUT and row in nearly and _is_noise(values, nearly[row][0])
    }
    lost: dict[tuple[str, float], dict[tuple[str, str], Lost]] = {}
    computed_in = {}
    for dtype in dtypes:
        replay = _Replay(model, f"mixed_{dtype}", loss, seed, like=reference)
        for scale in scales:
            progress.begin(f"in {dtype} at 2^{exponent_of(scale)}")
            found = replay.run(*batch, scale)
            lost[dtype, scale] = {
                row: _compare(*found[row], expected[row][0], 1.0 if row[0] == OUTPUT else scale)
                for row in expected
                if row in found
            }
        computed_in[dtype] = {row: in_dtype for row, (_, in_dtype) in found.items()}
    report = Report(rows, step=1, counted=1, loss_scale=1.0)
    return WhatIf(report, lost, computed_in, reference.consumers, noise)


class _Replay:
    """A model in some policy, which makes the same step any number of times."""

    def __init__(
        self, model: Any, policy: str, loss: Any, seed: int, like: "_Replay | None" = None
    ) -> None:
        self.model = convert(model, policy)
        self._seed = seed
        # Until a step was made.
        self.loss = float("nan")
        if not callable(loss):
            given = getattr(model, "loss", None) if loss is None else loss
            if not given and not getattr(model, "compiled", False):
                raise ValueError(
                    f"The model {model.name!r} has no loss: pass `loss`, or compile it. "
                    f"Received: loss={loss!r}"
                )
            config = model.get_compile_config() or {} if loss is None else {}
            with policy_scope(policy):
                self.model.compile(loss=given, loss_weights=config.get("loss_weights"))
        self._loss = loss if callable(loss) else None
        # The seeds of layers are among them on Keras 3.
        variables = model.variables
        if [v.shape for v in variables] != [v.shape for v in self.model.variables]:
            variables = (like or self).model.variables
        self._start = [tf.convert_to_tensor(v).numpy() for v in variables]
        self._layers = layers_by_path(self.model)
        self._variables = variables_by_path(self.model)
        # Where nothing is cast, a layer gets the very tensor that another one has returned.
        self.consumers: dict[str, set[str]] = {}

    def run(self, x: Any, y: Any, sample_weight: Any, scale: float, jitter: float = 0.0) -> _Values:
        """Makes one step, without its end, and returns what it has computed."""
        signs = np.random.default_rng(self._seed)
        for variable, value in zip(self.model.variables, self._start):
            if jitter and np.issubdtype(value.dtype, np.floating):
                value = value * (1 + jitter * signs.choice([-1, 1], value.shape))
            variable.assign(value)
        tf.random.set_seed(self._seed)
        outputs: dict[str, list[tf.Tensor]] = {}
        made_by: dict[int, str] = {}

        def saw(path: str, tensor: tf.Tensor, arguments: list[Any]) -> tf.Tensor:
            outputs.setdefault(path, []).append(tensor)
            for argument in arguments:
                if id(argument) in made_by:
                    self.consumers.setdefault(made_by[id(argument)], set()).add(path)
            made_by[id(tensor)] = path
            return tensor

        layers = {
            path: layer
            for path, layer in self._layers.items()
            if not isinstance(layer, tf.keras.Model)
        }
        with tf.GradientTape() as tape:
            with drawing_in_float32(layers.values()), watching_outputs(layers, saw):
                predictions = self.model(x, training=True)
            if self._loss is None:
                loss = self.model.compute_loss(x, y, predictions, sample_weight)
            else:
                loss = tf.cast(self._loss(y, predictions), tf.float32)
                for extra in self.model.losses:
                    loss += tf.cast(extra, loss.dtype)
            self.loss = float(tf.reduce_sum(loss))
            loss = gradients.scale_loss(loss, tf.constant(scale))
        variables = [variable for variable, _ in self._variables.values()]
        of_variables, of_outputs = tape.gradient(loss, (variables, outputs))
        found = {}
        for (path, (_, layer)), gradient in zip(self._variables.items(), of_variables):
            found[GRADIENT, path] = [gradient], layer.compute_dtype
        for path, tensors in outputs.items():
            found[OUTPUT, path] = tensors, tensors[0].dtype.name
        for path, tensors in of_outputs.items():
            found[OUTPUT_GRADIENT, path] = tensors, outputs[path][0].dtype.name
        values = {row: (_values(tensors), dtype) for row, (tensors, dtype) in found.items()}
        return {row: found for row, found in values.items() if found[0].size}


def _values(tensors: Sequence[Any]) -> np.ndarray:
    """The values of tensors as float32, one after the other; None has none."""
    dense = [tf.convert_to_tensor(tensor) for tensor in tensors if tensor is not None]
    flat = [tf.cast(tensor, tf.float32).numpy().ravel() for tensor in dense]
    return np.concatenate(flat) if flat else np.empty(0, np.float32)


def _where_not_finite(batch: tuple[Any, Any, Any]) -> str:
    bad = [each.part for each in batches.not_finite(batches.Batch(*batch))]
    if not bad:
        return "pass a batch with another loss, or see keras_mp.numerics.FirstBadOperation."
    return f"there are infinite values or NaN in {' and '.join(bad)}."


def _is_noise(values: np.ndarray, nearly: np.ndarray) -> bool:
    """Whether values change by about their own size where the weights hardly have."""
    if values.shape != nearly.shape or not (np.isfinite(values) & np.isfinite(nearly)).all():
        return False
    values = values.astype(np.float64)
    return bool(np.linalg.norm(values - nearly) > _NOISE * np.linalg.norm(values))


def _compare(values: np.ndarray, dtype: str, expected: np.ndarray, scale: float) -> Lost:
    is_finite, counts = np.isfinite(values), np.isfinite(expected) & (expected != 0)
    subnormal = counts & (values != 0) & (np.abs(values) < _SMALLEST_NORMAL.get(dtype, 0.0))
    error = float("inf")
    if is_finite.all():
        with np.errstate(over="ignore", invalid="ignore"):
            difference = values.astype(np.float64) / scale - expected
            norm = np.linalg.norm(expected.astype(np.float64))
        error = float(np.linalg.norm(difference) / norm) if norm else 0.0
    return Lost(
        int(counts.sum()),
        int((counts & (values == 0)).sum()),
        int(subnormal.sum()),
        int((~is_finite & np.isfinite(expected)).sum()),
        error,
    )


def rank(lost: Sequence[Lost], is_noise: bool) -> tuple[float, float, float]:
    """Returns how bad a row is, larger if it is worse.

    Args:
        lost: sequence of `Lost`, at each scale.
        is_noise: bool. Whether it is in `WhatIf.noise`.
    """
    # That whose smallest loss is the largest cannot be helped by a scale.
    shares = [1.0 if each.infinite else each.share for each in lost]
    return float(not is_noise), min(shares), sum(shares)


def _spread(scales: Sequence[float], most: int) -> Sequence[float]:
    """So many of the scales at most, the first and the last among them."""
    if len(scales) <= most:
        return scales
    return [scales[round(i)] for i in np.linspace(0, len(scales) - 1, most)]


def _harm(lost: Lost) -> tuple[bool, float, float]:
    """How bad it is, larger if it is worse."""
    return bool(lost.infinite), lost.share, lost.error


def _mean(found: Sequence[Lost]) -> Lost:
    counts = (sum(each) for each in zip(*(lost[:4] for lost in found)))
    return Lost(*counts, sum(lost.error for lost in found) / len(found))


def _cell(lost: Lost) -> str:
    if lost.infinite:
        return "inf/nan"
    return percent(lost.zero, lost.values) or "."
