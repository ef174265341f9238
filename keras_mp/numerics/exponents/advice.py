"""Advice, the facts that it is based on, and words for them."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from keras_mp.numerics.exponents.histogram import EVERYWHERE, Window, exponent_of, round_down
from keras_mp.numerics.exponents.reports import Report
from keras_mp.numerics.exponents.rows import GRADIENT, Row, RowKey
from keras_mp.numerics.exponents.what_if import Lost, WhatIf


class Advice(NamedTuple):
    """The result of `advise`: `str(advice)` has a line for each sentence.

    Attributes:
        sentences: list of str; empty if nothing is lost.
        policies: dict of paths of layers and names of policies, as `keras_mp.convert` takes it.
        loss_scale: float or None. The scale that is recommended, if one is: for the whole training
            if a training run was measured, to start with if it was a batch.

    Example:

    >>> print(keras_mp.numerics.exponents.advice.Advice([], {}, None))
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
        dtype: str.
        tolerance: float. Which share of a gradient may become zero.
    """

    measured: Report | WhatIf
    dtype: str
    tolerance: float

    @property
    def report(self) -> Report | None:
        """What was measured, if it is a training run."""
        return self.measured if isinstance(self.measured, Report) else None

    @property
    def runs(self) -> WhatIf | None:
        """What was measured, if it is runs at loss scales."""
        return self.measured if isinstance(self.measured, WhatIf) else None

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The rows of tensors that are computed in 16 bits, without noise."""
        noise = self.measured.noise
        return [row for row in self.measured.rows_in_16_bits if row.key not in noise]

    @functools.cached_property
    def losses(self) -> Mapping[float, Mapping[RowKey, Lost]]:
        """What real runs have lost of gradients, by loss scale."""
        if self.runs is None:
            return {}
        lost, noise = self.runs.losses, self.runs.noise
        return {
            scale: {
                key: each for key, each in lost(scale, self.tolerance).items() if key not in noise
            }
            for scale in self.runs.scales
        }

    @property
    def where(self) -> str:
        """Where the numbers were measured, in words."""
        report = self.report
        return f"in {report.counted:,} of {report.step:,} steps" if report else "in the batch"

    @property
    def set_scale(self) -> str:
        """What to do with a loss scale that suits them, in words."""
        # Other batches may well have larger gradients: that is no scale to keep.
        return "fix the loss scale at" if self.report else "start the loss scale at"

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
        return self.runs.units.get(path, path) if self.runs else path

    def owner(self, kind: str, path: str) -> str:
        """Returns the layer of a row; for a variable of the model itself, ""."""
        return self.unit(path.rpartition("/")[0] if kind == GRADIENT else path)

    def takers(self, path: str) -> list[str]:
        """Returns the layers that take what a layer returns, and so compute its gradient."""
        takers = self.runs.consumers.get(path, ()) if self.runs else ()
        return sorted({self.unit(taker) for taker in takers})


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
