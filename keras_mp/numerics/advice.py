"""Advice, the facts that it is based on, and words for them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from keras_mp.numerics.exponents import EVERYWHERE, Window, exponent_of, round_down
from keras_mp.numerics.lost import Lost, WhatIf
from keras_mp.numerics.report_rows import GRADIENT, Row, RowKey
from keras_mp.numerics.reports import Report
from keras_mp.support.dtypes import LOW_PRECISION_NAMES


class Advice(NamedTuple):
    """The result of `advise`: `str(advice)` has a line for each sentence.

    Attributes:
        sentences: list of str; empty if nothing is lost.
        policies: dict of paths of layers and names of policies, as `keras_mp.convert` takes it.
        loss_scale: float or None. The scale that is recommended, if one is: for the whole training
            if a training run was measured, to start with if it was a batch.

    Example:

    >>> print(keras_mp.numerics.advice.Advice([], {}, None))
    Nothing is lost.
    """

    sentences: list[str]
    policies: dict[str, str]
    loss_scale: float | None

    def __str__(self) -> str:
        return "\n".join(self.sentences) or "Nothing is lost."


@dataclasses.dataclass(frozen=True)
class Facts:
    """The measurements, and how to name them in sentences.

    Attributes:
        measured: `Report` or `WhatIf`.
        rows: those of tensors that are computed in 16 bits, without noise.
        dtype: str.
        tolerance: float. Which share of a gradient may become zero.
        where: str. Where the numbers were measured, in words.
        set_scale: str. What to do with a loss scale that suits them, in words.
        losses: what real runs have lost of gradients, by loss scale.
        lost_in_run: what a run in the dtype at the smallest scale has lost.
        computed_in: the dtype of each tensor in a run in the dtype.
        amplification: how much layers amplify an error of what they take.
        consumers: dict of paths of layers and of those that take what they return.
        units: dict of paths of layers and of those around them whose policy they have.
    """

    measured: Report | WhatIf
    rows: list[Row]
    dtype: str
    tolerance: float
    where: str
    set_scale: str
    losses: Mapping[float, Mapping[RowKey, Lost]] = dataclasses.field(default_factory=dict)
    lost_in_run: Mapping[RowKey, Lost] = dataclasses.field(default_factory=dict)
    computed_in: Mapping[RowKey, str] = dataclasses.field(default_factory=dict)
    amplification: Mapping[str, float] = dataclasses.field(default_factory=dict)
    consumers: Mapping[str, set[str]] = dataclasses.field(default_factory=dict)
    units: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, measured: Report | WhatIf, dtype: str, tolerance: float) -> "Facts":
        """Takes the facts from what was measured."""
        if isinstance(measured, Report):
            noise = measured.noise
            rows = [row for row in measured.rows_in_16_bits if row.key not in noise]
            where = f"in {measured.counted:,} of {measured.step:,} steps"
            return cls(measured, rows, dtype, tolerance, where, "fix the loss scale at")
        computed_in, noise = measured.computed_in, measured.noise
        rows = [
            row._replace(dtype=computed_in[row.key])
            for row in measured.reference.rows
            if computed_in.get(row.key) in LOW_PRECISION_NAMES and row.key not in noise
        ]
        losses = {
            scale: {
                key: lost
                for key, lost in measured.losses(scale, tolerance).items()
                if key not in noise
            }
            for scale in measured.scales
        }
        # Other batches may well have larger gradients: that is no scale to keep.
        how = "in the batch", "start the loss scale at"
        return cls(
            *(measured, rows, dtype, tolerance, *how),
            losses=losses,
            lost_in_run=measured[measured.scales[0]],
            computed_in=computed_in,
            amplification=measured.amplification,
            consumers=measured.consumers,
            units=measured.units,
        )

    @property
    def now(self) -> float:
        """The loss scale in force, or that which training would begin with, rounded down."""
        return round_down(self.measured.loss_scale)

    @property
    def gradients(self) -> list[Row]:
        """The rows that a loss scale multiplies."""
        return [row for row in self.rows if row.is_scaled]

    @property
    def tolerated(self) -> str:
        """The tolerance in words."""
        return f"{100 * self.tolerance:g} %"

    def window_of_runs(self) -> Window:
        """Returns the loss scales between those of runs that have lost something of a gradient."""
        window = EVERYWHERE
        for scale, of_rows in self.losses.items():
            exponent = exponent_of(scale)
            if any(lost.infinite for lost in of_rows.values()):
                window &= Window(EVERYWHERE.low, exponent - 1)
            elif of_rows:
                window &= Window(exponent + 1, EVERYWHERE.high)
        return window

    def unit(self, path: str) -> str:
        """Returns the layer whose policy a layer has: itself, or the one around it."""
        return self.units.get(path, path)

    def owner(self, kind: str, path: str) -> str:
        """Returns the layer of a row; for a variable of the model itself, ""."""
        return self.unit(path.rpartition("/")[0] if kind == GRADIENT else path)

    def makers(self, path: str) -> list[str]:
        """Returns the layers whose output a layer takes."""
        return [maker for maker, takers in self.consumers.items() if path in takers]

    def takers(self, path: str) -> list[str]:
        """Returns the layers that take what a layer returns, and so compute its gradient."""
        return sorted({self.unit(taker) for taker in self.consumers.get(path, ())})


def named(kind: str, path: str) -> str:
    """Returns what a sentence calls a gradient."""
    return f"`{path}`" if kind == GRADIENT else f"the gradient of `{path}`'s output"


def share_of(count: int, total: int) -> str:
    """Returns a share of the values, in words."""
    share = 100 * count / total
    return f"{count:,} of {total:,} values" if share < 0.1 else f"{share:.1f} %"


def power(scale: float) -> str:
    """Returns a loss scale, in words."""
    return f"2^{math.log2(scale):.0f}"
