"""What a step has shown of exponents, row by row, and the loss scale and dtypes that follow."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from keras_mp.numerics.histogram import EVERYWHERE, Fate, Histogram, Window, exponent_of, round_down
from keras_mp.numerics.results import DIFFERENCES, Finding, Result
from keras_mp.support import text_tables, validation
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

# Kind and path of a row.
RowKey = tuple[str, str]

KINDS = ("gradient", "output", "output gradient", "weight")

# Which share of a gradient may become zero: a few values of a large one are always next to zero.
TOLERANCE = 0.001
# If more become zero, that is a finding. In sound models a few do; a scale that grows keeps them.
MANY_ZEROS = 0.05

# A gradient that is smaller than another one of its layer by so many binary digits is what rounding
# in float32 leaves of a sum that is zero: that of a bias before a batch normalization, or of the
# keys of an attention. These are the digits of float32, less some for sums of many terms.
_NOISE = 18


class Row(NamedTuple):
    """What is known of the exponents of one tensor of a model.

    Attributes:
        kind: "gradient" of a variable, "output" of a layer, "output gradient", or "weight".
        path: the variable's or the layer's path, such as "encoder/dense/kernel".
        dtype: str. What it is computed in: the tensor's own dtype; for a variable's gradient, what
            its layer computes in. Values that were too small for it are among the zeros.
        histogram: a `Histogram`; that of a gradient is as if the loss had not been scaled.
        overflowed_at: float. The smallest loss scale at which values were infinite or NaN, or
            infinity.
        is_noise: bool. Whether rounding in 16 bits explains all of it; None if nobody has looked.
        lost: float. The share that a run in 16 bits has lost; None if there was none beside it.

    Example:

    >>> from keras_mp.numerics.histogram import Histogram
    >>> from keras_mp.numerics.report import Row
    >>> row = Row("gradient", "dense/kernel", "float16", Histogram.count(tf.constant([2.0**-20])))
    >>> str(row.window("float16"))
    '2^-4..2^35'
    """

    kind: str
    path: str
    dtype: str
    histogram: Histogram
    overflowed_at: float = math.inf
    is_noise: bool | None = None
    lost: float | None = None

    @property
    def key(self) -> RowKey:
        """Its kind and its path, by which a `Report` has it."""
        return self.kind, self.path

    @property
    def is_scaled(self) -> bool:
        """Whether the loss scale multiplies it."""
        return self.kind in ("gradient", "output gradient")

    @property
    def is_lost(self) -> bool:
        """Whether it is infinite or NaN wherever it is not zero."""
        return not self.histogram.exponents and self.histogram.zeros < self.histogram.total

    @property
    def layer(self) -> str:
        """The path of its layer."""
        return self.path.rpartition("/")[0] if self.kind in ("gradient", "weight") else self.path

    def fate(self, dtype: str, loss_scale: float = 1.0) -> Fate:
        """Returns what becomes of the values in a dtype.

        Args:
            dtype: "float16" or "bfloat16".
            loss_scale: float, a power of two, by which gradients are multiplied. Defaults to 1.
        """
        return self.histogram.fate(dtype, loss_scale if self.is_scaled else 1.0)

    def window(self, dtype: str, tolerance: float = 0.0) -> Window:
        """Returns the loss scales at which nothing is lost.

        What has overflowed in the dtype that it was computed in may have been of any size. So for
        that dtype, the window ends below the loss scale at which it did.

        Args:
            dtype: "float16" or "bfloat16".
            tolerance: float, from 0 to 1. Which share of the values may become zero. Defaults to 0.
        """
        window = self.histogram.window(dtype, tolerance)
        if self.dtype == dtype and math.isfinite(self.overflowed_at):
            window &= Window(EVERYWHERE.low, math.ceil(math.log2(self.overflowed_at)) - 1)
        return window

    def has_unknown_zeros(self, loss_scale: float) -> bool:
        """Whether zeros of a gradient may be values that were too small for its dtype.

        They may be if no other value is left, or if the others reach down to subnormal numbers.

        Args:
            loss_scale: float. The loss scale at which it was computed.
        """
        of = self.histogram
        if self.dtype not in LOW_PRECISION_NAMES or not self.is_scaled or self.lost is not None:
            return False
        fate = self.fate(self.dtype, round_down(loss_scale))
        are_small = fate.zero + fate.subnormal > 0 or not fate.values
        return are_small and of.zeros > TOLERANCE * of.total

    def __add__(self, other: "Row") -> "Row":
        lost = [each for each in (self.lost, other.lost) if each is not None]
        return self._replace(
            dtype=other.dtype,
            histogram=self.histogram + other.histogram,
            overflowed_at=min(self.overflowed_at, other.overflowed_at),
            is_noise=self.is_noise and other.is_noise,
            lost=max(lost, default=None),
        )


@dataclasses.dataclass(repr=False, eq=False)
class Report(Result):
    """The exponents of some steps, or of the batches of a check in float32.

    `report[kind, path]` is a row, `str(report)` is a table, and reports of one model add up with
    `+`.

    Attributes:
        rows: list of `Row`s, gradients first, in the order of the model.
        step: int. How many steps had been made, skipped ones included; 0 for a check.
        counted: int. In how many of them, or in how many batches, values were counted.
        loss_scale: float. That of the last of these, or with which training begins; 1 for none.

    Example:

    >>> from keras_mp.numerics import Report
    >>> from keras_mp.numerics.histogram import Histogram
    >>> from keras_mp.numerics.report import Row
    >>> row = Row("gradient", "dense/kernel", "float16", Histogram.count(tf.constant([2.0**-20])))
    >>> report = Report([row], step=100, counted=1, loss_scale=2.0**15)
    >>> report.window("float16").margins(report.loss_scale)
    (19.0, 20.0)
    >>> (report + report).counted
    2
    """

    rows: Sequence[Row]
    _: dataclasses.KW_ONLY
    step: int
    counted: int
    loss_scale: float

    def __post_init__(self) -> None:
        rows: dict[RowKey, Row] = {}
        for row in sorted(self.rows, key=lambda row: KINDS.index(row.kind)):
            rows[row.key] = rows[row.key] + row if row.key in rows else row
        self.rows = list(rows.values())

    def __getitem__(self, row: RowKey) -> Row:
        rows = {each.key: each for each in self.rows}
        if row not in rows:
            expected = f"Expected the kind and path of a row: {list(rows)}"
            raise KeyError(f"{expected}. Received: {row!r}")
        return rows[row]

    @property
    def rows_in_16_bits(self) -> list[Row]:
        """The rows of tensors that were computed in 16 bits; if none was, of all computed ones."""
        rows = [row for row in self.rows if row.kind != "weight"]
        return [row for row in rows if row.dtype in LOW_PRECISION_NAMES] or rows

    @property
    def dtype(self) -> str:
        """The dtype of 16 bits that most of it was computed in; float16 if none was."""
        dtypes = [row.dtype for row in self.rows_in_16_bits if row.dtype in LOW_PRECISION_NAMES]
        return max(dtypes, key=dtypes.count, default="float16")

    @property
    def noise(self) -> set[RowKey]:
        """Kinds and paths of gradients that are nothing but rounding noise.

        Runs with noise tell. Where there were none, it is what is smaller than another gradient of
        its layer by a factor of 2^18.
        """
        rows = [row for row in self.rows if row.kind == "gradient" and row.is_noise is None]
        sizes = [(row, max(row.histogram.exponents)) for row in rows if row.histogram.exponents]
        largest = {row.layer: size for row, size in sorted(sizes, key=operator.itemgetter(1))}
        small = {row.key for row, size in sizes if size <= largest[row.layer] - _NOISE}
        return small | {row.key for row in self.rows if row.is_noise}

    def window(self, dtype: str, tolerance: float = TOLERANCE) -> Window:
        """Returns the loss scales at which next to nothing of any gradient is lost in 16 bits.

        Args:
            dtype: "float16" or "bfloat16".
            tolerance: float, from 0 to 1. Which share of each row may become zero. Defaults to
                0.001.

        Returns:
            A `Window`: what the windows of the gradients among `rows_in_16_bits` have in common,
            those of `noise` left out.
        """
        noise = self.noise
        rows = (row for row in self.rows_in_16_bits if row.is_scaled and row.key not in noise)
        windows = (row.window(dtype, tolerance) for row in rows)
        return functools.reduce(Window.__and__, windows, EVERYWHERE)

    def table(
        self, dtype: str | None = None, loss_scale: float | None = None, rows: int | None = None
    ) -> str:
        """Returns a table: what would be lost in a dtype, and the window of each row.

        Shares are of the values that are finite and not zero. Those of gradients are for the loss
        scale; outputs are not scaled. Only a run in float32 can tell what the zeros of a row that
        was computed in 16 bits would have been: that of `check` does.

        Args:
            dtype: "float16" or "bfloat16". Defaults to the dtype that it was computed in.
            loss_scale: float, a power of two. Defaults to the report's, rounded down to one.
            rows: int. How many rows are shown at most: first those that lose most, then those that
                are nearest to losing something. Rows of equal layers in repeated blocks are then
                one, with the numbers of the worst. Defaults to None: all rows.
        """
        dtype = self.dtype if dtype is None else dtype
        scale = round_down(self.loss_scale) if loss_scale is None else loss_scale
        header = (
            *("", "", "in", "values", "zero", "inf/nan", "exponents"),
            *("-> zero", "-> subnormal", "-> inf", "window"),
        )
        noise = self.noise
        of_rows = [_ranked(row, dtype, scale, noise, rows is None) for row in self.rows]
        table = text_tables.shortened(header, of_rows, rows, left=(0, 1, 2, 6, 10), name=1)
        return "\n".join([*text_tables.wrapped(self._head(dtype, scale)), "", *table])

    def _head(self, dtype: str, loss_scale: float) -> str:
        window, scale = self.window(dtype), math.log2(loss_scale)
        head = (
            f"{dtype} at a loss scale of 2^{scale:.0f}; {self.where}; no gradient loses more than "
            f"{100 * TOLERANCE:g} % at: {window}"
        )
        ratios = [
            f"2^{scale - end:g} times the {name} end"
            for name, end in zip(("low", "high"), window)
            if abs(end) < EVERYWHERE.high and not window.is_empty
        ]
        head += f" (the loss scale is {' and '.join(ratios)})" if ratios else ""
        if unknown := [row for row in self.rows if row.has_unknown_zeros(self.loss_scale)]:
            head += (
                f". The zeros of {len(unknown)} gradients may be values that were too small for "
                f"{unknown[0].dtype}, such as those of {unknown[0].path}: ask check."
            )
        return head

    @property
    def where(self) -> str:
        """Words for what was looked at."""
        if self.step:
            return f"in {self.counted:,} of {self.step:,} steps"
        return "in the batch" if self.counted == 1 else f"in {self.counted} batches"

    def _lines(self, rows: int | None) -> list[str]:
        return self.table(rows=rows).splitlines()

    def __add__(self, other: "Report") -> "Report":
        first, last = sorted([self, other], key=lambda report: report.step)
        counted = first.counted + last.counted
        return dataclasses.replace(last, rows=[*first.rows, *last.rows], counted=counted)


def _ranked(
    row: Row, dtype: str, loss_scale: float, noise: set[RowKey], is_full: bool
) -> text_tables.RankedRow:
    """Returns a row of a table, ranked by how much it loses and how near it is to losing more."""
    histogram, window = row.histogram, row.window(dtype, TOLERANCE)
    fate, exponents = row.fate(dtype, loss_scale), histogram.exponents
    bad, is_noise = histogram.infinities + histogram.nans, row.key in noise
    cells = (
        *(row.kind, f"{row.path} (noise)" if is_noise else row.path, row.dtype),
        f"{histogram.total:,}" * is_full,
        _percent(histogram.zeros, histogram.total),
        _percent(bad, histogram.total),
        f"2^{min(exponents)}..2^{max(exponents)}" if exponents else "",
        _percent(fate.zero, fate.values),
        _percent(fate.subnormal, fate.values) * is_full,
        _percent(fate.infinite, fate.values),
        str(window),
    )
    lost = (
        bad / max(histogram.total, 1),
        fate.share("infinite"),
        fate.share("zero") * (fate.share("zero") > TOLERANCE),
        float(row.has_unknown_zeros(loss_scale)) * histogram.zeros,
    )
    # Nothing of what is kept in float32 is lost.
    matters = not is_noise and (row.kind != "weight" or row.dtype in LOW_PRECISION_NAMES)
    margin = min(window.margins(loss_scale if row.is_scaled else 1.0))
    alike = row.kind, row.dtype, histogram.total, is_noise, *(share > 0 for share in lost)
    return text_tables.RankedRow(cells, (float(matters), *lost, -margin), alike)


class Advice(NamedTuple):
    """What follows from a report: `str(advice)` has a line for each sentence.

    Attributes:
        sentences: list of str; empty if nothing is lost.
        policies: dict of paths of layers and names of policies, as `keras_mp.convert` takes it.
        loss_scale: float or None. The scale to start with, if one is recommended.

    Example:

    >>> print(keras_mp.numerics.report.Advice([], {}, None))
    Nothing is lost.
    """

    sentences: list[str]
    policies: dict[str, str]
    loss_scale: float | None

    def __str__(self) -> str:
        return "\n".join(self.sentences) or "Nothing is lost."


def advise(
    report: Report, tolerance: float, compared: Sequence[Finding], owner: Callable[..., str | None]
) -> Advice:
    """Returns advice on how to keep a model from losing what a check has seen it lose in 16 bits.

    It is the intersection of windows: a loss scale in the windows of all gradients loses nothing.
    If there is none, layers whose gradients are outside of the best one go to float32. Layers that
    lose what they return come first: as long as there are any, gradients are no guide. Gradients
    that are rounding noise do not count, and where the run in 16 bits has lost nothing, there is no
    advice. Act on it, and check again, until nothing is lost.

    Args:
        report: the `Report` of a check.
        tolerance: float, from 0 to 1. Which share of a gradient may become zero.
        compared: what a comparison has found of layers. Of the backward pass, a scale, or another
            layer, may explain it.
        owner: returns the path of the layer whose policy a layer has; None if it has no path.

    Raises:
        ValueError: the tolerance is not a share.
    """
    validation.number("tolerance", tolerance, at_least=0, at_most=1)
    dtype, where, noise = report.dtype, report.where, report.noise
    rows = [row for row in report.rows_in_16_bits if row.key not in noise]
    outputs = [row for row in rows if row.kind == "output" and row.fate(dtype).infinite]
    too_large = [(row.path, f"{_loss(row, dtype)}, {where}") for row in outputs]
    forward, backward = (
        [(each.path, each.why) for each in compared if each.hazard == hazard]
        for hazard in DIFFERENCES.values()
    )

    def owners(lost: Iterable[tuple[str, str]]) -> dict[str, str]:
        whys: dict[str, str] = {}
        for path, why in lost:
            if layer := owner(path):
                whys.setdefault(layer, why)
        return whys

    whys = owners([*too_large, *forward])
    scaled = [row for row in rows if row.is_scaled]
    lost, said, scale = ([], [], None) if whys else _of_windows(report, scaled, tolerance)
    whys = whys or owners(lost)
    fates = [row.histogram.fate("bfloat16") for row in rows]
    # Nothing is known about what was not finite.
    bad = sum(row.histogram.infinities + row.histogram.nans for row in rows)
    if not whys and not said:
        whys = owners(backward)
    elif dtype == "float16" and not (forward or bad or any(x.zero or x.infinite for x in fates)):
        said.append(
            "bfloat16 would lose nothing that float16 loses here, and needs no loss scale: of "
            f"{sum(fate.values for fate in fates):,} values none becomes zero or infinite, "
            f"{where}. (It keeps 8 bits of each value, float16 11.)"
        )
    runs = [f"Run `{layer}` in float32: {why.removesuffix('.')}." for layer, why in whys.items()]
    return Advice(runs + said, dict.fromkeys(whys, "float32"), scale)


def _of_windows(
    report: Report, rows: Sequence[Row], tolerance: float
) -> tuple[list[tuple[str, str]], list[str], float | None]:
    """Advises a loss scale, and layers for float32, unless the current scale is good.

    Returns:
        Layers that need float32, each with the reason; sentences; and a loss scale, or None.
    """
    now, dtype, where = exponent_of(round_down(report.loss_scale)), report.dtype, report.where
    overflowed = [row for row in rows if row.dtype == dtype and math.isfinite(row.overflowed_at)]
    if infinite := [row for row in overflowed if row.is_lost]:
        at, such = f"2^{math.log2(infinite[0].overflowed_at):.0f}", f"such as `{infinite[0].path}`"
        sentence = (
            f"No loss scale helps: nothing is finite at {at}, {where}, of {len(infinite)} "
            f"gradients, {such}. Their size is unknown."
        )
        return [], [sentence], None
    has_lost = overflowed or any((row.lost or 0.0) > tolerance for row in rows)
    windows = [_allowed(row, dtype, tolerance, now) for row in rows]
    # If no scale is small enough, it is a layer that has to change.
    is_helpless = any(row.overflowed_at <= 1 for row in rows)
    if not has_lost or is_helpless or all(now in window for window in windows):
        return [], [], None
    # If nothing suits all, it is what suits most.
    best = max(
        sorted({end for window in windows for end in window}),
        key=lambda end: sum(end in window for window in windows),
    )
    suited = [window for window in windows if best in window]
    low, high = functools.reduce(Window.__and__, suited, EVERYWHERE)
    # In the middle of the window, and rather lower, since gradients grow at times. Other batches
    # may have larger ones, so what suits a batch is no scale to keep.
    start = (low + high) // 2 if suited else now
    lost = [
        (row.layer, f"{_loss(row, dtype, 2.0**start)} at 2^{start}, {where}")
        for row, window in zip(rows, windows)
        if best not in window
    ]
    if not suited:
        return lost, [], None
    sentence = (
        f"Start the loss scale at 2^{start}: between 2^{low} and 2^{high} no gradient in {dtype} "
        f"loses more than {100 * tolerance:g} %, {where}."
    )
    shares = [sum(map(row.fate(dtype, 2.0**now).share, ("zero", "infinite"))) for row in rows]
    if any(shares):
        sentence += f" At 2^{now}, {_loss(rows[shares.index(max(shares))], dtype, 2.0**now)}."
    return lost, [sentence], 2.0**start


def _allowed(row: Row, dtype: str, tolerance: float, now: int) -> Window:
    """Returns the window of a gradient, of loss scales of at least 1."""
    window = row.window(dtype, tolerance) & Window(0, EVERYWHERE.high)
    # What is lost inside of layers, histograms of what they return do not have. (A ReLU that
    # rounding turns off makes zeros as well, but few.)
    ran_at = math.floor(min(now, math.log2(row.overflowed_at) - 1))
    if (row.lost or 0.0) > max(tolerance, MANY_ZEROS) and ran_at in window:
        return window & Window(ran_at + 1, EVERYWHERE.high)
    return window


def _loss(row: Row, dtype: str, loss_scale: float = 1.0) -> str:
    """Says how much of a row a dtype loses at a loss scale."""
    fate = row.fate(dtype, loss_scale)
    lost, how = (fate.infinite, "beyond") if fate.infinite else (fate.zero, "below")
    name = f"`{row.path}`" if row.kind == "gradient" else f"the {row.kind} of `{row.path}`"
    share = 100 * lost / max(fate.values, 1)
    of = f"{lost:,} of {fate.values:,} values" if share < 0.1 else f"{share:.1f} %"
    return f"{of} of {name} is {how} {dtype}"


def _percent(count: int, total: int) -> str:
    """Returns a share as text, which is empty only for zero."""
    share = 100 * count / max(total, 1)
    return "" if not count else "<0.1 %" if share < 0.1 else f"{share:.1f} %"
