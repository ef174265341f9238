"""The values that runs in 16 bits lose, compared with float32: as a table, as CSV and JSON."""

import csv
import dataclasses
import functools
import operator
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_mp.numerics.exponents import exponent_of
from keras_mp.numerics.report_rows import GRADIENT, OUTPUT, OUTPUT_GRADIENT, TOLERANCE, percent
from keras_mp.numerics.reports import Report
from keras_mp.numerics.results import Result
from keras_mp.step.schedule import INITIAL_LOSS_SCALE
from keras_mp.support import text_tables

_SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}

# Inputs of a batch, and weights, that make an overflow their own: networks begin with numbers of
# about 1, and few that train have weights of more than 10.
LARGE_INPUTS, LARGE_WEIGHTS = 1000.0, 100.0

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

    >>> keras_mp.numerics.lost.Lost(values=8, zero=2, subnormal=1, infinite=0, error=0.1).share
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
        subnormal = counts & (values != 0) & (np.abs(values) < _SMALLEST_NORMAL.get(dtype, 0.0))
        error = float("inf")
        if is_finite.all():
            with np.errstate(over="ignore", invalid="ignore"):
                difference = np.linalg.norm(values / scale - expected)
                norm = np.linalg.norm(expected)
            error = float(difference / norm) if norm else 0.0
        return cls(
            int(counts.sum()),
            int((counts & (values == 0)).sum()),
            int(subnormal.sum()),
            int((~is_finite & np.isfinite(expected)).sum()),
            error,
        )

    @property
    def share(self) -> float:
        """The share of the values that is zero, from 0 to 1."""
        return self.zero / self.values if self.values else 0.0

    def exceeds(self, tolerance: float) -> bool:
        """Whether values are infinite, or a larger share than this is zero."""
        return bool(self.infinite) or self.share > tolerance


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class WhatIf(Result):
    """The results of `what_if`.

    `result[dtype, scale]` is a dict of (kind, path) and `Lost`; `str(result)` is a table.

    Attributes:
        reference: `Report` of the run in float32. As nothing is lost in it, its windows are those
            of what the model would have computed.
        lost: dict of (dtype, scale), and of these dicts of (kind, path) and `Lost`.
        computed_in: dict of dtypes, and of these dicts of (kind, path) and the dtype that the
            tensor had in such a run.
        consumers: dict of paths of layers, and of these sets of paths of the layers that take what
            they return.
        units: dict of the paths of layers without a policy of their own, and of the layers around
            them, whose policy they have.
        noise: set of (kind, path) of those gradients that are nothing but rounding noise in
            float32, since what they are of makes no difference to the loss: such as the bias of a
            layer before a batch normalization, or that of the keys of an attention. `advise` leaves
            them out. They are found by a second run in float32, in which inputs, weights and what
            layers return differ by up to 2^-20 of each: noise is another one then, by half of its
            size at least.
        amplification: dict of paths of layers, and how many times as far, relative to its size,
            what each returns moves in that run as what it takes.
        largest_input: float. The largest number of the batch's inputs.
        largest_weights: dict of paths of layers, and the largest weight of each.
        loss_scale: float. That which the model is trained with: the current one of its optimizer,
            else the first of its policy, else 2^15.
        batches: tuple of `WhatIf`s, one for each of several batches; else empty. Each `Lost` is the
            worst of theirs then, histograms of `reference` are sums, and noise is what is noise on
            all of them.

    Example:

    >>> model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    >>> loss = lambda y, predictions: tf.reduce_mean(predictions)
    >>> result = keras_mp.numerics.what_if.what_if(
    ...     model, tf.ones([4, 2]), loss=loss, dtypes=["bfloat16"], scales=[1.0]
    ... )
    >>> result.dtypes, result.scales
    (['bfloat16'], [1.0])
    """

    reference: Report
    lost: dict[tuple[str, float], dict[tuple[str, str], Lost]]
    computed_in: dict[str, dict[tuple[str, str], str]]
    consumers: dict[str, set[str]]
    noise: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    batches: tuple["WhatIf", ...] = ()
    loss_scale: float = INITIAL_LOSS_SCALE
    units: dict[str, str] = dataclasses.field(default_factory=dict)
    amplification: dict[str, float] = dataclasses.field(default_factory=dict)
    largest_input: float = 0.0
    largest_weights: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the runs in 16 bits."""
        return list(dict.fromkeys(dtype for dtype, _ in self.lost))

    @property
    def scales(self) -> list[float]:
        """The loss scales, the smallest first."""
        return sorted({scale for _, scale in self.lost})

    @classmethod
    def of_batches(cls, found: "Sequence[WhatIf]") -> "WhatIf":
        """Combines the results of several batches: the worst of each.

        Args:
            found: one for each batch. A single one is returned as it is.
        """
        if len(found) == 1:
            return found[0]
        return cls._joined(found, lambda lost: max(lost, key=_harm))

    @property
    def mean(self) -> "WhatIf":
        """The results over all batches: counts are sums, errors are means."""
        return self._joined(self.batches, _mean) if self.batches else self

    @staticmethod
    def _joined(found: "Sequence[WhatIf]", join: Callable[[Sequence[Lost]], Lost]) -> "WhatIf":
        lost = {
            run: {
                row: join([each[run][row] for each in found if row in each[run]])
                for row in dict.fromkeys(row for each in found for row in each[run])
            }
            for run in found[0].lost
        }
        consumers: dict[str, set[str]] = {}
        for path, takers in (pair for each in found for pair in each.consumers.items()):
            consumers.setdefault(path, set()).update(takers)
        amplification = {
            path: max(each.amplification.get(path, 0.0) for each in found)
            for path in found[0].amplification
        }
        return dataclasses.replace(
            found[0],
            reference=functools.reduce(operator.add, (each.reference for each in found)),
            lost=lost,
            consumers=consumers,
            noise=set.intersection(*(each.noise for each in found)),
            batches=tuple(found),
            amplification=amplification,
            largest_input=max(each.largest_input for each in found),
        )

    def __getitem__(self, run: tuple[str, float]) -> dict[tuple[str, str], Lost]:
        dtype, scale = run
        if (dtype, float(scale)) not in self.lost:
            raise KeyError(
                f"Expected one of the dtypes {self.dtypes} and one of the scales {self.scales}. "
                f"Received: {run!r}"
            )
        return self.lost[dtype, float(scale)]

    def good_scales(self, dtype: str, tolerance: float = 0.0) -> list[float]:
        """Returns the scales at which no gradient has lost anything.

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
            if row[0] != OUTPUT and lost.exceeds(tolerance)
        }

    def table(self, dtype: str, kind: str = GRADIENT, rows: int | None = None) -> str:
        """Returns a table of rows by scales, of the shares that become zero or infinite.

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
                alike = is_noise, *(each.exceeds(TOLERANCE) for each in lost)
                cells = (name, *map(_cell, lost))
                if rows is not None:
                    cells = tuple(cell.removesuffix(" %") for cell in cells)
                ranked.append(text_tables.RankedRow(cells, rank(lost, is_noise), alike))
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
            if dtype not in self.computed_in[dtype].values():
                head = f"{dtype}: nothing is computed in it, and {head.partition(': ')[2]}"
            if rows is not None:
                head += ". Shares that become zero, in %:"
            found += text_tables.wrapped(head)
            found += [self.table(dtype, rows=rows), ""]
            if any(kind == OUTPUT_GRADIENT for of in losses.values() for kind, _ in of):
                found += [self.table(dtype, OUTPUT_GRADIENT, rows), ""]
            outputs = [
                lost for row, lost in self[dtype, self.scales[0]].items() if row[0] == OUTPUT
            ]
            if any(lost.exceeds(TOLERANCE) for lost in outputs):
                found += [self.table(dtype, OUTPUT, rows), ""]
        return "\n".join(found).rstrip()

    def __repr__(self) -> str:
        return f"<WhatIf of {self.dtypes} at {len(self.scales)} scales>"

    def plot(self, dtype: str = "float16", *, kind: str = GRADIENT, ax: Any = None) -> Any:
        """Draws what each loss scale would have lost: rows by scales.

        Args:
            dtype: one of `dtypes`. Defaults to "float16".
            kind: "gradient" (the default), "output gradient" or "output".
            ax: Matplotlib's `Axes`. Defaults to those of a new figure.

        Returns:
            The `Axes`.
        """
        from keras_mp.numerics import figures  # It draws such results, and so imports this module.

        return figures.heat_map(self, dtype, kind=kind, ax=ax)

    def to_csv(self, path: str | os.PathLike) -> None:
        """Writes a line for each run and row.

        Args:
            path: str or path of the file.
        """
        with pathlib.Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("dtype", "scale", "kind", "path", *Lost._fields))
            for (dtype, scale), rows in self.lost.items():
                for row, lost in rows.items():
                    writer.writerow((dtype, scale, *row, *lost))

    def to_dict(self) -> dict[str, Any]:
        """Returns the runs, each with a list of rows, as JSON has them."""
        runs = []
        for (dtype, scale), rows in self.lost.items():
            found = [
                {"kind": kind, "path": path, **lost._asdict()}
                for (kind, path), lost in rows.items()
            ]
            runs.append({"dtype": dtype, "scale": scale, "rows": found})
        return {"runs": runs}


def rank(lost: Sequence[Lost], is_noise: bool) -> tuple[float, float, float]:
    """Returns how bad a row is, larger if it is worse.

    Args:
        lost: sequence of `Lost`, at each scale.
        is_noise: bool. Whether it is in `WhatIf.noise`.
    """
    # No scale helps a row whose smallest loss is large.
    shares = [1.0 if each.infinite else each.share for each in lost]
    return float(not is_noise), min(shares), sum(shares)


def _spread(scales: Sequence[float], most: int) -> Sequence[float]:
    """Returns so many of the scales at most, the first and the last among them."""
    if len(scales) <= most:
        return scales
    return [scales[round(i)] for i in np.linspace(0, len(scales) - 1, most)]


def _harm(lost: Lost) -> tuple[bool, float, float]:
    """Returns how bad a loss is, larger if it is worse."""
    return bool(lost.infinite), lost.share, lost.error


def _mean(found: Sequence[Lost]) -> Lost:
    values, zero, subnormal, infinite = (sum(each) for each in zip(*(lost[:4] for lost in found)))
    error = sum(lost.error for lost in found) / len(found)
    return Lost(values, zero, subnormal, infinite, error)


def _cell(lost: Lost) -> str:
    if lost.infinite:
        return "inf/nan"
    return percent(lost.zero, lost.values) or "."
