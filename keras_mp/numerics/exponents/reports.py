"""The report of histograms: as a table, a picture, CSV, JSON and TensorBoard's events."""

import dataclasses
import json
import os
import pathlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.numerics.exponents.histogram import (
    COLUMNS,
    EVERYWHERE,
    ROWS,
    Histogram,
    Window,
    exponent_of,
    round_down,
)
from keras_mp.numerics.exponents.rows import (
    COMPUTED,
    KINDS,
    SCALED,
    TOLERANCE,
    Row,
    RowKey,
    Statistics,
    borders_of,
    ranked,
)
from keras_mp.numerics.results import Result
from keras_mp.support import messages, text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.figures import new_figure

# A gradient that is smaller than another one of its layer by so many binary digits is what rounding
# in float32 leaves of a sum that is zero: that of a bias before a batch normalization, or of the
# keys of an attention. These are the digits of float32, less some for sums of many terms.
_NOISE = 18

# What a picture has room for: columns side by side, and characters of their names and of its title.
_MOST_COLUMNS, _LONGEST_NAME, _LONGEST_TITLE = 20, 32, 90
# The shares that have a color of their own.
_SHARES = 1e-6, 1.0


@dataclasses.dataclass(repr=False, eq=False)
class Report(Result):
    """The counts of some steps.

    `report[kind, path]` is a row, `str(report)` is a table, and reports of one model add up with
    `+`.

    Attributes:
        rows: list of `Row`s, gradients first, in the order of the model.
        step: int. How many steps had been made, skipped ones included.
        counted: int. In how many of them values were counted.
        loss_scale: float. The loss scale of the last of these; 1 where no loss was scaled.

    Example:

    >>> import numpy as np
    >>> from keras_mp.numerics import Report
    >>> from keras_mp.numerics.exponents.histogram import Histogram
    >>> from keras_mp.numerics.exponents.rows import Row
    >>> row = Row("gradient", "dense/kernel", "float16", Histogram.of(np.float32([2.0**-20])))
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
        self.rows = list(self.rows)

    def __getitem__(self, row: RowKey) -> Row:
        for each in self.rows:
            if each.key == tuple(row):
                return each
        raise KeyError(
            f"Expected the kind and path of a row: {[each.key for each in self.rows]}. "
            f"Received: {row!r}"
        )

    @property
    def rows_in_16_bits(self) -> list[Row]:
        """The rows of tensors that were computed in 16 bits; if none was, of all computed ones.

        Weights and updates are not among them: they are kept, not computed.
        """
        rows = [row for row in self.rows if row.kind in COMPUTED]
        return [row for row in rows if row.dtype in LOW_PRECISION_NAMES] or rows

    @property
    def dtype(self) -> str:
        """The dtype of 16 bits that most of it was computed in; float16 if none was."""
        dtypes = [row.dtype for row in self.rows_in_16_bits if row.dtype in LOW_PRECISION_NAMES]
        return max(dtypes, key=dtypes.count, default="float16")

    @property
    def noise(self) -> set[RowKey]:
        """Kinds and paths of gradients of variables that are nothing but rounding noise.

        Each is smaller than another one of its layer by a factor of 2^18.
        """
        of_layers: dict[str, dict[RowKey, int]] = {}
        for row in self.rows:
            if row.kind == "gradient" and row.histogram.exponents:
                of_layer = of_layers.setdefault(row.path.rpartition("/")[0], {})
                of_layer[row.key] = max(row.histogram.exponents)
        return {
            key
            for of_layer in of_layers.values()
            for key, largest in of_layer.items()
            if largest <= max(of_layer.values()) - _NOISE
        }

    def rows_with_unknown_zeros(self, tolerance: float = TOLERANCE) -> list[Row]:
        """Returns the rows that have unknown zeros at the report's loss scale."""
        return [row for row in self.rows if row.has_unknown_zeros(self.loss_scale, tolerance)]

    def window(self, dtype: str, tolerance: float = TOLERANCE) -> Window:
        """Returns the loss scales at which next to nothing of any gradient is lost in 16 bits.

        Args:
            dtype: "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2".
            tolerance: float, from 0 to 1. Which share of each row may become zero. Defaults to
                0.001.

        Returns:
            A `Window`: what the windows of the gradients among `rows_in_16_bits` have in common,
            those of `noise` left out.
        """
        window, noise = EVERYWHERE, self.noise
        for row in self.rows_in_16_bits:
            if row.is_scaled and row.key not in noise:
                window &= row.window(dtype, tolerance)
        return window

    def table(
        self,
        dtype: str | None = None,
        loss_scale: float | None = None,
        rows: int | None = None,
    ) -> str:
        """Returns a table: what would be lost in a dtype, and the window of each row.

        Shares are of the values that are finite and not zero. Those of gradients are for the loss
        scale; outputs are not scaled. Only a pass in float32 can tell what the zeros of a row that
        was computed in 16 bits would have been: see `what_if`.

        An update "-> zero" is one that a variable of the dtype does not take. The window of updates
        is one of factors of the learning rate; it is unknown where the variable is in 16 bits and
        some of its values did not move. Below come the largest magnitude, the mean, the standard
        deviation and the norms of weights.

        Args:
            dtype: "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2". Defaults to the dtype
                that it was computed in.
            loss_scale: float, a power of two. Defaults to the one that was measured with, rounded
                down to a power of two.
            rows: int. How many rows are shown at most: first those that lose most, then those that
                are nearest to losing something. Rows of equal layers in repeated blocks are then
                one, with the numbers of the worst. Defaults to None: all rows.

        Returns:
            str of several lines.
        """
        dtype = self.dtype if dtype is None else dtype
        if loss_scale is None:
            loss_scale = round_down(self.loss_scale)
        header = (
            *("", "", "in", "values", "zero", "inf/nan", "exponents"),
            *("-> zero", "-> subnormal", "-> inf", "window"),
        )
        noise = self.noise
        of_rows = [ranked(row, dtype, loss_scale, noise, rows is None) for row in self.rows]
        table = text_tables.shortened(header, of_rows, rows, left=(0, 1, 2, 6, 10), name=1)
        lines = [*self._head(dtype, loss_scale), "", *table]
        weights = [
            text_tables.RankedRow(
                (row.kind, row.path, *(f"{value:.3g}" for value in row.statistics)),
                (row.statistics.amax,),
                row.histogram.total,
            )
            for row in self.rows
            if row.statistics is not None
        ]
        if weights:
            heads = ("", "", *(name.replace("_", " ") for name in Statistics._fields))
            lines += ["", *text_tables.shortened(heads, weights, rows, left=(0, 1), name=1)]
        return "\n".join(lines)

    def _head(self, dtype: str, loss_scale: float) -> list[str]:
        window, unknown = self.window(dtype), self.rows_with_unknown_zeros()
        # Nothing is known about values that became zero on the way.
        about = "of the values that are left, " if unknown else ""
        head = (
            f"{dtype} at a loss scale of 2^{np.log2(loss_scale):.0f}; {self.counted} of "
            f"{self.step} steps counted; {about}no gradient loses more than {100 * TOLERANCE:g} % "
            f"at: {window}"
        )
        above_low, below_high = window.margins(loss_scale)
        ratios = [
            f"2^{exponent:g} times the {name} end"
            for name, end, exponent in zip(("low", "high"), window, (above_low, 0 - below_high))
            if abs(end) < EVERYWHERE.high and not window.is_empty
        ]
        head += f" (the loss scale is {' and '.join(ratios)})" if ratios else ""
        lines = text_tables.wrapped(head)
        if unknown:
            lines += text_tables.wrapped(
                f"The zeros of {len(unknown)} gradients may be values that were too small for "
                f"{unknown[0].dtype}, such as those of {unknown[0].path}: ask check."
            )
        return lines

    def to_text(self, rows: int | None = text_tables.MOST) -> str:
        """Returns what `print` shows: a headline, and the worst rows.

        Args:
            rows: int. How many rows are shown at most; None for all of them, with all columns.
                Defaults to 10.

        Returns:
            str of several lines, of at most 100 characters each unless `rows` is None.
        """
        return self.table(rows=rows)

    def __repr__(self) -> str:
        return f"<Report of {len(self.rows)} rows, {self.counted} of {self.step} steps>"

    def __add__(self, other: "Report") -> "Report":
        first, last = sorted([self, other], key=lambda report: report.step)
        rows = {row.key: row for row in first.rows}
        for row in last.rows:
            rows[row.key] = rows[row.key] + row if row.key in rows else row
        order = sorted(rows.values(), key=lambda row: KINDS.index(row.kind))
        return Report(
            order,
            step=last.step,
            counted=first.counted + last.counted,
            loss_scale=last.loss_scale,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as JSON has it; `from_json` reads the file that `to_json` writes."""
        rows = []
        for row in self.rows:
            bins = row.histogram.bins.reshape(-1)
            counts = {str(place): int(bins[place]) for place in np.flatnonzero(bins)}
            at = row.overflowed_at if np.isfinite(row.overflowed_at) else None
            numbers = None if row.statistics is None else list(row.statistics)
            own = {"histogram": counts, "overflowed_at": at, "statistics": numbers}
            rows.append({**dict(zip(Row._fields, row)), **own})
        own = {name: getattr(self, name) for name in ("step", "counted", "loss_scale")}
        return {**own, "rows": rows}

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> "Report":
        """Reads a file that `to_json` wrote.

        Args:
            path: str or path of the file.

        Returns:
            A `Report`.

        Raises:
            ValueError: the file is another one.
        """
        try:
            saved = json.loads(pathlib.Path(path).read_text())
            rows = [_row_of(row) for row in saved.pop("rows")]
            return cls(rows, **saved)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(
                f"Expected a file that `Report.to_json` wrote. Received: path={str(path)!r}"
            ) from error

    def plot(
        self,
        dtype: str = "float16",
        *,
        kind: str = "gradient",
        loss_scale: float | None = None,
        ax: Any = None,
    ) -> Any:
        """Draws histograms of exponents side by side, with the borders of a dtype.

        The darker, the larger the share of the values. What is outside of the lines becomes zero or
        infinite in the dtype, at the loss scale; below the dotted line digits are lost.

        Args:
            dtype: "float16" (the default), "bfloat16", "float8_e4m3fn" or "float8_e5m2".
            kind: that of the rows, of which the worst 20 are drawn. Defaults to "gradient".
            loss_scale: float, a power of two. Defaults to the one that was measured with. Only
                gradients are scaled.
            ax: Matplotlib's `Axes`. Defaults to those of a new figure.

        Returns:
            The `Axes`.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: there is nothing to draw.
        """
        of_kind, noise = [row for row in self.rows if row.kind == kind], self.noise
        if loss_scale is None:
            loss_scale = round_down(self.loss_scale) if kind in SCALED else 1.0
        rows = text_tables.worst(
            of_kind, lambda row: ranked(row, dtype, loss_scale, noise).rank, _MOST_COLUMNS
        )
        columns = [row.histogram.exponents for row in rows]
        found = [exponent for column in columns for exponent in column]
        if not found:
            raise ValueError(f"There are no values of the kind {kind!r}. Received: {self!r}")
        low, high, shift = min(found) - 1, max(found) + 1, exponent_of(loss_scale)
        picture = np.full([high - low + 1, len(rows)], np.nan)
        for place, column in enumerate(columns):
            for exponent, count in column.items():
                picture[exponent - low, place] = count / sum(column.values())
        ax = new_figure(__name__, (8, 4.5)).subplots() if ax is None else ax
        from matplotlib import colors

        norm = colors.LogNorm(*_SHARES, clip=True)
        extent = (-0.5, len(rows) - 0.5, low, high + 1)
        how = {"origin": "lower", "aspect": "auto", "extent": extent}
        image = ax.imshow(picture, cmap="Blues", norm=norm, **how)
        ax.figure.colorbar(image, ax=ax, label="share of the values")
        zero, (normal, _), (infinite, _) = borders_of(kind, dtype)
        borders = [
            ("zero below", zero - shift, "-"),
            ("fewer digits below", normal + 1 - shift, ":"),
            ("infinite above", infinite + 1 - shift, "--"),
        ]
        if kind == "update":
            borders = [("lost below", zero - shift, "-")]
        for label, border, style in borders:
            ax.axhline(border, color="tab:red", linestyle=style, label=label)
        inside = [border for _, border, _ in borders if low - 12 <= border <= high + 12]
        bottom, top = min([low, *inside]) - 1, max([high + 1, *inside]) + 1
        labels = [text_tables.fitted(row.path, _LONGEST_NAME) for row in rows]
        ax.set_xticks(range(len(rows)), labels, rotation=45 if len(rows) > 3 else 0, ha="right")
        left_out = f" (the worst {len(rows)} of {len(of_kind)})" if len(rows) < len(of_kind) else ""
        at_scale = f" at a loss scale of 2^{shift}" if kind in SCALED else ""
        title = f"Exponents of each {kind}{left_out}, and the borders of {dtype}{at_scale}"
        ax.set(
            ylabel="exponent of 2",
            ylim=(bottom - (top - bottom) // 8, top),  # with room for the legend
            title="\n".join(textwrap.wrap(title, _LONGEST_TITLE)),
        )
        ax.legend(loc="lower center", ncols=3, fontsize="small")
        return ax

    def rows_of_csv(self) -> Iterator[Sequence[Any]]:
        """Yields how many values have which exponent: a line for each row and exponent."""
        yield "step", "kind", "path", "dtype", "exponent", "count"
        for row in self.rows:
            histogram = row.histogram
            special = histogram.zeros, histogram.infinities, histogram.nans
            counts = {**histogram.exponents, **dict(zip(("zero", "inf", "nan"), special))}
            for exponent, count in counts.items():
                if count:
                    yield self.step, row.kind, row.path, row.dtype, exponent, count

    def to_tensorboard(self, dtype: str = "float16") -> None:
        """Writes histograms and scalars to the default writer of `tf.summary`.

        For each row there is a histogram of exponents (of values that are finite and not zero), and
        the shares that become zero and infinite in a dtype at the loss scale of the report. It
        needs the package tensorboard. Without a default writer there is a `MixedPrecisionWarning`,
        and nothing is written.

        Args:
            dtype: "float16" (the default), "bfloat16", "float8_e4m3fn" or "float8_e5m2".
        """
        # The question is whether there is a writer, not whether it records now.
        with tf.summary.record_if(True):
            if not tf.summary.should_record_summaries():
                messages.warn(
                    "Report.to_tensorboard wrote nothing, since there is no default writer: call "
                    "it in `with tf.summary.create_file_writer(directory).as_default():`."
                )
                return
        loss_scale = round_down(self.loss_scale)
        for row in self.rows:
            name = f"{row.kind}/{row.path}".replace(" ", "_")
            fate = row.fate(dtype, loss_scale)
            scalars = {f"{dtype}_{which}": fate.share(which) for which in ("zero", "infinite")}
            scalars |= row.statistics._asdict() if row.statistics else {}
            for which, value in scalars.items():
                tf.summary.scalar(f"{name}/{which}", value, step=self.step)
            tf.summary.histogram(
                f"{name}/exponents", list(_sample(row.histogram.exponents)), step=self.step
            )


def _row_of(saved: dict[str, Any]) -> Row:
    """Returns a row that `Report.to_json` wrote."""
    bins = np.zeros(ROWS * COLUMNS, np.int64)
    for place, count in saved["histogram"].items():
        bins[int(place)] = count
    at, numbers = saved["overflowed_at"], saved.get("statistics")
    read = {
        "histogram": Histogram(bins.reshape(ROWS, COLUMNS)),
        "overflowed_at": float("inf") if at is None else at,
        "statistics": None if numbers is None else Statistics(*numbers),
    }
    return Row(**{**saved, **read})


def _sample(exponents: dict[int, int], size: int = 10_000) -> Iterator[int]:
    """Yields exponents that are distributed alike, from which TensorBoard makes a histogram."""
    total = sum(exponents.values())
    for exponent, count in exponents.items():
        yield from [exponent] * max(1, round(size * count / total))
