"""Advice, and what it is made of: what was measured, and the words for it."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from keras_mp.numerics.exponents import EVERYWHERE, Window, exponent_of, round_down
from keras_mp.numerics.lost import Lost, WhatIf
from keras_mp.numerics.report_rows import GRADIENT, Row
from keras_mp.numerics.reports import Report
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

# What runs have lost of gradients, by loss scale and row.
Losses = Mapping[float, Mapping[tuple[str, str], Lost]]


class Advice(NamedTuple):
    """What `advise` returns: `str(advice)` has a line for each sentence.

    Attributes:
        sentences: list of str; empty if nothing is lost.
        policies: dict of paths of layers and names of policies, as `keras_mp.convert` takes it.
        loss_scale: float, the scale that is recommended, or None: to keep where a training run was
            measured, to start with where it was one batch.

    Example:

    >>> print(keras_mp.numerics.Advice([], {}, None))
    Nothing is lost.
    """

    sentences: list[str]
    policies: dict[str, str]
    loss_scale: float | None

    def __str__(self) -> str:
        return "\n".join(self.sentences) or "Nothing is lost."


class Facts(NamedTuple):
    """What was measured, and how to speak of it.

    Attributes:
        measured: `Report` or `WhatIf`.
        rows: those of tensors that 16 bits matter to.
        dtype: str.
        tolerance: float. Which share of a gradient may become zero.
        now: float. The loss scale in force, or that which training would begin with.
        losses: what real runs at some loss scales have lost of gradients.
        where: str. What the numbers are of.
        set_scale: str. What to do with a loss scale that suits them.
        consumers: dict of paths of layers and of those that take what they return.
        units: dict of paths of layers and of those around them whose policy they have.
    """

    measured: Report | WhatIf
    rows: list[Row]
    dtype: str
    tolerance: float
    now: float
    losses: Losses
    where: str
    set_scale: str
    consumers: Mapping[str, set[str]]
    units: Mapping[str, str]

    @classmethod
    def of(cls, measured: Report | WhatIf, dtype: str, tolerance: float) -> "Facts":
        """Takes them from what was measured.

        Raises:
            TypeError: it is something else.
            ValueError: `what_if` has not run the dtype.
        """
        if isinstance(measured, WhatIf):
            if dtype not in measured.dtypes:
                raise ValueError(
                    f"Expected one of the dtypes that were run, {measured.dtypes}. "
                    f"Received: dtype={dtype!r}"
                )
            in_half = measured.computed_in[dtype]
            rows = [
                row._replace(dtype=in_half[row.kind, row.path])
                for row in measured.reference.rows
                if in_half.get((row.kind, row.path)) in LOW_PRECISION_NAMES
                and (row.kind, row.path) not in measured.noise
            ]
            losses = {
                scale: {
                    row: lost
                    for row, lost in measured.losses(dtype, scale, tolerance).items()
                    if row not in measured.noise
                }
                for scale in measured.scales
            }
            # Other batches may well have larger gradients: that is no scale to keep.
            where, set_scale = "in the batch", "start the loss scale at"
            of_layers = measured.consumers, measured.units
        elif isinstance(measured, Report):
            noise = measured.noise
            rows = [row for row in measured.rows_in_16_bits if (row.kind, row.path) not in noise]
            losses, set_scale = {}, "fix the loss scale at"
            where = f"in {measured.counted:,} of {measured.step:,} steps"
            of_layers = {}, {}
        else:
            raise TypeError(
                "Expected a keras_mp.numerics.Report or what what_if returned; findings of audit "
                f"have cures of their own, `Hazard.cure`. Received: {measured!r} (of type "
                f"{type(measured)})"
            )
        now = round_down(measured.loss_scale)
        return cls(measured, rows, dtype, tolerance, now, losses, where, set_scale, *of_layers)

    @property
    def computed_in(self) -> Mapping[tuple[str, str], str]:
        """What each tensor was computed in, of a run in the dtype; empty if there was none."""
        return self.measured.computed_in[self.dtype] if isinstance(self.measured, WhatIf) else {}

    @property
    def lost_in_run(self) -> Mapping[tuple[str, str], Lost]:
        """What a run in the dtype at the smallest scale has lost; empty if there was none."""
        if not isinstance(self.measured, WhatIf):
            return {}
        return self.measured[self.dtype, self.measured.scales[0]]

    @property
    def amplification(self) -> Mapping[str, float]:
        """By how much layers amplify an error of what they take, where that was measured."""
        return self.measured.amplification if isinstance(self.measured, WhatIf) else {}

    @property
    def gradients(self) -> list[Row]:
        """The rows that a loss scale multiplies."""
        return [row for row in self.rows if row.is_scaled]

    @property
    def tolerated(self) -> str:
        """The tolerance in words."""
        return f"{100 * self.tolerance:g} %"

    def seen(self) -> Window:
        """The loss scales between those of runs that have lost something of a gradient."""
        seen = EVERYWHERE
        for scale, of_rows in self.losses.items():
            exponent = exponent_of(scale)
            if any(lost.infinite for lost in of_rows.values()):
                seen &= Window(EVERYWHERE.low, exponent - 1)
            elif of_rows:
                seen &= Window(exponent + 1, EVERYWHERE.high)
        return seen

    def unit(self, path: str) -> str:
        """The path of the layer whose policy a layer has: its own, or the one around it."""
        return self.units.get(path, path)

    def owner(self, kind: str, path: str) -> str:
        """The layer that a row is about; of a variable that which has it, "" for the model's."""
        return self.unit(path.rpartition("/")[0] if kind == GRADIENT else path)

    def makers(self, path: str) -> list[str]:
        """The layers whose output a layer takes."""
        return [maker for maker, takers in self.consumers.items() if path in takers]

    def takers(self, path: str) -> list[str]:
        """The layers that take what a layer returns, and compute the gradient of it."""
        return sorted({self.unit(taker) for taker in self.consumers.get(path, ())})


def named(kind: str, path: str) -> str:
    """What to call a gradient."""
    return f"`{path}`" if kind == GRADIENT else f"the gradient of `{path}`'s output"


def share_of(count: int, of: int) -> str:
    """A share of the values, in words."""
    share = 100 * count / of
    return f"{count:,} of {of:,} values" if share < 0.1 else f"{share:.1f} %"


def power(scale: float) -> str:
    """A loss scale, in words."""
    return f"2^{math.log2(scale):.0f}"
