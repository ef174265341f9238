"""Runs one batch at several loss scales, and measures what is lost in 16 bits."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.conversion import units_by_path
from keras_mp.models.layer_paths import layers_by_path, variables_by_path
from keras_mp.numerics.calls import Call, floating
from keras_mp.numerics.distances import RMS_OF_JITTER, array, is_noise, jitter, relative, rms
from keras_mp.numerics.exponents.histogram import FORMATS, Histogram, exponent_of
from keras_mp.numerics.exponents.reports import Report
from keras_mp.numerics.exponents.rows import TOLERANCE, Row, RowKey, percent
from keras_mp.numerics.results import Result
from keras_mp.numerics.run import Run, Runner, check_finite, scale_in_training
from keras_mp.step.schedule import INITIAL_LOSS_SCALE
from keras_mp.support import text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.progress import Progress

# The values of each row of a run, and the dtype that they were computed in.
_Values = dict[RowKey, tuple[np.ndarray, str]]

# So many columns of scales fit beside readable names.
_MOST_SCALES = 9


class Lost(NamedTuple):
    """The values of a tensor that a run in 16 bits has lost, compared with float32.

    Attributes:
        values: int. How many values are finite and not zero in float32.
        zero: int. How many of these are zero in this run.
        subnormal: int. How many of these have fewer digits than the dtype has, since they are
            below its smallest normal number; 0 where the run computes the tensor in float32.
        infinite: int. How many of those that are finite in float32 are infinite or NaN.
        error: float. How far the tensor, unscaled, is from that in float32, as a share of the
            latter's norm; infinity where it is not finite.

    Example:

    >>> from keras_mp.numerics.exponents.what_if import Lost
    >>> Lost(values=8, zero=2, subnormal=1, infinite=0, error=0.1).share
    0.25
    """

    values: int
    zero: int
    subnormal: int
    infinite: int
    error: float

    @classmethod
    def of(cls, values: np.ndarray, dtype: str, expected: np.ndarray, scale: float) -> "Lost":
        """Counts what is lost.

        Args:
            values: array of float64, of a run in 16 bits.
            dtype: str. The dtype that they were computed in.
            expected: array of float64, of the run in float32.
            scale: float. The loss scale that `values` are multiplied by.
        """
        is_finite, counts = np.isfinite(values), np.isfinite(expected) & (expected != 0)
        normal = 2.0 ** (FORMATS[dtype].normal[0] + 1) if dtype in FORMATS else 0.0
        is_small = (values != 0) & (np.abs(values) < normal)
        is_lost = ~is_finite & np.isfinite(expected)
        found = (counts, counts & (values == 0), counts & is_small, is_lost)
        error = float("inf")
        if is_finite.all():
            with np.errstate(over="ignore", invalid="ignore"):
                size = rms(expected)
                error = rms(values / scale - expected) / size if size else 0.0
        return cls(*(int(each.sum()) for each in found), error=error)

    @property
    def share(self) -> float:
        """The share of the values that is zero, from 0 to 1."""
        return self.zero / self.values if self.values else 0.0

    def exceeds(self, tolerance: float) -> bool:
        """Whether values are infinite, or a larger share than this is zero."""
        return bool(self.infinite) or self.share > tolerance


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class WhatIf(Result):
    """What a batch loses at several loss scales. `result[scale]` is a dict of rows and `Lost`.

    Attributes:
        reference: `Report` of the run in float32. As nothing is lost in it, its windows are those
            of what the model would have computed.
        dtype: str. "float16" or "bfloat16".
        lost: dict of scales, and of these dicts of (kind, path) and `Lost`.
        computed_in: dict of (kind, path) and the dtype that the tensor had in the run.
        consumers: dict of paths of layers, and of these sets of paths of the layers that take what
            they return.
        noise: set of (kind, path) of those gradients that are nothing but rounding noise in
            float32, since what they are of makes no difference to the loss: such as the bias of a
            layer before a batch normalization, or that of the keys of an attention. `advise` leaves
            them out. They are found by a second run in float32, in which inputs, weights and what
            layers return differ by up to 2^-20 of each: noise is another one then, by half of its
            size at least.
        loss_scale: float. That which the model is trained with: the current one of its optimizer,
            else the first of its policy, else 2^15.
        units: dict of the paths of layers without a policy of their own, and of the layers around
            them, whose policy they have.
        amplification: dict of paths of layers, and how many times as far, relative to its size,
            what each returns moves in that run as what it takes.
        largest_input: float. The largest number of the batch's inputs.
        largest_weights: dict of paths of layers, and the largest weight of each.

    Example:

    >>> layers = [tf.keras.Input([2]), tf.keras.layers.Dense(1, name="dense", use_bias=False)]
    >>> model = tf.keras.Sequential(layers)
    >>> loss = lambda y, prediction: tf.reduce_mean(prediction) * 2.0**-30
    >>> checked = keras_mp.numerics.check(
    ...     model, (tf.ones([4, 2]), tf.ones([4])), policy="mixed_float16", loss=loss, scales=[1.0]
    ... )
    >>> checked.what_if[1.0]["gradient", "dense/kernel"]
    Lost(values=2, zero=2, subnormal=0, infinite=0, error=1.0)
    """

    reference: Report
    dtype: str
    lost: dict[float, dict[RowKey, Lost]]
    computed_in: dict[RowKey, str]
    consumers: dict[str, set[str]]
    noise: set[RowKey]
    loss_scale: float
    units: dict[str, str]
    amplification: dict[str, float]
    largest_input: float
    largest_weights: dict[str, float]

    @property
    def scales(self) -> list[float]:
        """The loss scales, the smallest first."""
        return sorted(self.lost)

    @property
    def rows_in_16_bits(self) -> list[Row]:
        """The rows of float32 whose tensors are computed in 16 bits, each with that dtype."""
        dtypes = self.computed_in
        return [
            row._replace(dtype=dtypes[row.key])
            for row in self.reference.rows
            if dtypes.get(row.key) in LOW_PRECISION_NAMES
        ]

    def makers(self, path: str) -> list[str]:
        """Returns the layers whose output a layer takes."""
        return [maker for maker, takers in self.consumers.items() if path in takers]

    @classmethod
    def of_batches(cls, found: "Sequence[WhatIf]") -> "WhatIf":
        """Combines the results of several batches: the worst of each.

        Histograms of `reference` are sums, and noise is what is noise on all of them.

        Args:
            found: one for each batch.
        """
        first = found[0]
        return dataclasses.replace(
            first,
            reference=functools.reduce(operator.add, (each.reference for each in found)),
            lost={
                scale: _combined([each[scale] for each in found], lambda of: max(of, key=_harm))
                for scale in first.lost
            },
            consumers=_combined([each.consumers for each in found], lambda of: set().union(*of)),
            noise=set.intersection(*(each.noise for each in found)),
            amplification=_combined([each.amplification for each in found], max),
            largest_input=max(each.largest_input for each in found),
        )

    def __getitem__(self, scale: float) -> dict[RowKey, Lost]:
        return self.lost[scale]

    def losses(self, scale: float, tolerance: float = 0.0) -> dict[RowKey, Lost]:
        """Returns those of the gradients that have lost something in a run.

        Args:
            scale: one of `scales`.
            tolerance: float, from 0 to 1. Which share of a gradient may be zero. Defaults to 0.
        """
        rows = self[scale].items()
        return {row: lost for row, lost in rows if row[0] != "output" and lost.exceeds(tolerance)}

    def losses_by_scale(self, tolerance: float) -> dict[float, dict[RowKey, Lost]]:
        """Returns the `losses` in each run, but for those of noise, the smallest scale first."""
        return {
            scale: {key: each for key, each in lost.items() if key not in self.noise}
            for scale, lost in ((scale, self.losses(scale, tolerance)) for scale in self.scales)
        }

    def to_text(self, rows: int | None = text_tables.MOST) -> str:
        """Returns what `print` shows: a headline, and the rows that lose most, by scales.

        Args:
            rows: int. How many rows each table has at most; None for all rows and scales. Defaults
                to 10.

        Returns:
            str of several lines, of at most 100 characters each unless `rows` is None.
        """
        losses = self.losses_by_scale(TOLERANCE)
        good = ", ".join(f"2^{exponent_of(scale)}" for scale in self.scales if not losses[scale])
        is_used, tolerated = self.dtype in self.computed_in.values(), f"{100 * TOLERANCE:g} %"
        head = f"{self.dtype}: {'' if is_used else 'nothing is computed in it, and '}" + (
            f"no gradient loses more than {tolerated} at {good}"
            if good
            else f"at each of the scales a gradient loses more than {tolerated}"
        )
        head += "" if rows is None else ". Shares that become zero, in %:"
        lossy = {kind for of in losses.values() for kind, _ in of}
        first = self[self.scales[0]].items()
        lossy |= {row[0] for row, lost in first if row[0] == "output" and lost.exceeds(TOLERANCE)}
        kinds = ("gradient", *(kind for kind in ("output gradient", "output") if kind in lossy))
        tables = "\n\n".join(self._table(kind, rows) for kind in kinds)
        return "\n".join([*text_tables.wrapped(head), tables])

    def _table(self, kind: str, rows: int | None) -> str:
        """Returns a table of rows of a kind by scales; outputs do not depend on the scale."""
        scales = self.scales[:1] if kind == "output" else self.scales
        if rows is not None and len(scales) > _MOST_SCALES:
            places = np.linspace(0, len(scales) - 1, _MOST_SCALES)
            scales = [scales[round(place)] for place in places]
        ranked = []
        for row in (row for row in self[scales[0]] if row[0] == kind):
            is_noise, lost = row in self.noise, [self[scale][row] for scale in scales]
            cells = row[1] + " (noise)" * is_noise, *(_cell(each, rows is None) for each in lost)
            # No scale helps a row whose smallest loss is large.
            shares = [1.0 if each.infinite else each.share for each in lost]
            rank = float(not is_noise), min(shares), sum(shares)
            alike = is_noise, *(each.exceeds(TOLERANCE) for each in lost)
            ranked.append(text_tables.RankedRow(cells, rank, alike))
        header = (f"{kind}, {self.dtype}", *(f"2^{exponent_of(scale)}" for scale in scales))
        return "\n".join(text_tables.shortened(header, ranked, rows))

    def __repr__(self) -> str:
        return f"<WhatIf of {self.dtype} at {len(self.scales)} scales>"

    def to_dict(self) -> dict[str, Any]:
        """Returns the runs, each with a list of rows, as JSON has them."""
        runs = [
            {
                "scale": scale,
                "rows": [
                    {"kind": kind, "path": path, **lost._asdict()}
                    for (kind, path), lost in rows.items()
                ],
            }
            for scale, rows in self.lost.items()
        ]
        return {"dtype": self.dtype, "runs": runs}


def _combined(found: Sequence[Mapping[Any, Any]], combine: Callable[[Any], Any]) -> dict[Any, Any]:
    """Combines the values that batches have for each key."""
    keys = dict.fromkeys(itertools.chain(*found))
    return {key: combine([each[key] for each in found if key in each]) for key in keys}


def _harm(lost: Lost) -> tuple[bool, float, float]:
    """Returns how bad a loss is, larger if it is worse."""
    return bool(lost.infinite), lost.share, lost.error


def _cell(lost: Lost, has_unit: bool) -> str:
    share = percent(lost.zero, lost.values) or "."
    return "inf/nan" if lost.infinite else share if has_unit else share.removesuffix(" %")


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
        if row[0] != "output" and row in moved and is_noise(values, moved[row][0])
    }
    lost = {
        scale: {
            row: Lost.of(*values[row], of_float32, 1.0 if row[0] == "output" else scale)
            for row, (of_float32, _) in expected.items()
            if row in values
        }
        for scale, values in runs.items()
    }
    rows = [Row(*row, of, Histogram.of(values)) for row, (values, of) in expected.items()]
    units, paths = units_by_path(reference.model), layers_by_path(reference.model)
    return WhatIf(
        Report(rows, step=1, counted=1, loss_scale=1.0),
        dtype,
        lost,
        {row: of for row, (_, of) in runs[scales[-1]].items()},
        consumers,
        noise,
        loss_scale=scale_in_training(narrow.model) or INITIAL_LOSS_SCALE,
        units={path: unit for unit in units for path in paths if path.startswith(f"{unit}/")},
        amplification=_amplification(expected, moved, consumers),
        largest_input=max((_largest(x) for x in floating(narrow.batch.x)), default=0.0),
        largest_weights={
            path: max(map(_largest, layer.trainable_weights))
            for path, layer in units.items()
            if layer.trainable_weights
        },
    )


def _largest(values: tf.Tensor | tf.Variable) -> float:
    return float(np.max(np.abs(array(values)), initial=0.0))


def _values(run: Run) -> _Values:
    """Returns the values of a run; gradients are multiplied by its loss scale."""
    layers = variables_by_path(run.model)
    tensors: dict[RowKey, tuple[str, list[tf.Tensor | None]]] = {
        ("gradient", path): (layers[path][1].compute_dtype, [gradient])
        for path, gradient in run.gradients_by_path().items()
    }
    calls = [call for call in run.calls if _is_of_layer(call) and call.outputs]
    for kind, name in (("output", "outputs"), ("output gradient", "gradients")):
        for call in calls:
            _, found = tensors.setdefault((kind, call.path), (call.outputs[0].dtype.name, []))
            found += getattr(call, name)
    values = {}
    for row, (dtype, found) in tensors.items():
        arrays = [array(each).ravel() for each in found if each is not None]
        if sum(each.size for each in arrays):
            values[row] = np.concatenate(arrays), dtype
    return values


def _amplification(
    expected: _Values, moved: _Values, consumers: Mapping[str, set[str]]
) -> dict[str, float]:
    """Returns how many times as far as its inputs the outputs of each layer are moved by noise."""
    distances = {
        path: relative(moved[kind, path][0], values)
        for (kind, path), (values, _) in expected.items()
        if kind == "output" and (kind, path) in moved
    }
    taken = dict.fromkeys(distances, 0.0)
    for path, takers in consumers.items():
        for taker in takers & taken.keys():
            taken[taker] = max(taken[taker], distances.get(path, 0.0))
    # Inputs that move by less may be exact.
    return {path: far / max(taken[path], RMS_OF_JITTER) for path, far in distances.items()}


def _is_of_layer(call: Call) -> bool:
    is_model = isinstance(call.layer, tf.keras.Model)
    return isinstance(call.layer, tf.keras.layers.Layer) and not is_model


def _consumers(calls: Iterable[Call]) -> dict[str, set[str]]:
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
