"""Pictures of reports. Each function draws into an `Axes` of matplotlib."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_mp.numerics.exponents import EVERYWHERE, exponent_of, round_down
from keras_mp.numerics.lost import WhatIf, rank
from keras_mp.numerics.report_rows import GRADIENT, SCALED, UPDATE, borders_of, ranked
from keras_mp.numerics.reports import Report
from keras_mp.support import axes, text_tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from keras_mp.callbacks import LossScaleMonitor

_SMALLEST, _LARGEST = 1e-6, 1.0

# How many names can be read side by side, and below each other.
_MOST_COLUMNS, _MOST_ROWS = 20, 40
_LONGEST_NAME, _LONGEST_TITLE = 32, 90

# The colors of a heat map are linear up to this share, and logarithmic above.
_NEXT_TO_NOTHING = 1e-4

# With more columns, cells have no room for numbers.
_MOST_NUMBERS = 12

# More marks than these would cover each other.
_MOST_MARKED = 50


def histograms(
    measured: Report | Sequence[Report],
    dtype: str = "float16",
    *,
    kind: str = GRADIENT,
    path: str | None = None,
    loss_scale: float | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws histograms of exponents side by side, with the borders of a dtype.

    One report has its rows of a kind drawn, or the worst 20 of them; the history of an
    `ExponentMonitor` has one row drawn over time. The darker, the larger the share of the values.
    What is outside of the lines becomes zero or infinite in the dtype, at the loss scale; below the
    dotted line digits are lost.

    Args:
        measured: a `Report`, or a sequence of them.
        dtype: "float16" (the default), "bfloat16", "float8_e4m3fn" or "float8_e5m2".
        kind: "gradient" (the default), "output", "output gradient", "weight" or "update".
        path: the path of the row, for a sequence of reports.
        loss_scale: float, a power of two. Defaults to that of the (last) report. Only gradients
            are scaled.
        ax: `Axes` to draw into. Defaults to those of a new pyplot figure.

    Returns:
        The `Axes`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw, or a sequence and no path.

    Example:

    >>> import matplotlib
    >>> matplotlib.use("agg")  # without a window
    >>> from keras_mp.numerics import Report, figures
    >>> from keras_mp.numerics.exponents import Histogram
    >>> from keras_mp.numerics.report_rows import Row
    >>> row = Row("gradient", "dense/kernel", "float32", Histogram.of([1e-6, 2e-6, 1e-3]))
    >>> ax = figures.histograms(Report([row], step=1, counted=1, loss_scale=1024.0))
    >>> ax.get_title()
    'Exponents of each gradient, and the borders of float16 at a loss scale of 2^10'
    """
    where = borders_of(kind, dtype)
    if isinstance(measured, Report):
        last = measured
        of_kind = [row for row in measured.rows if row.kind == kind]
        scale, noise = _scale_of(measured, kind, loss_scale), measured.noise
        rows = text_tables.worst(
            of_kind, lambda row: ranked(row, dtype, scale, noise).rank, _MOST_COLUMNS
        )
        labels = [text_tables.fitted(row.path, _LONGEST_NAME) for row in rows]
        title = f"Exponents of each {kind}{_left_out(len(rows), len(of_kind))}"
    else:
        reports = list(measured)
        if path is None:
            raise ValueError("Pass `path`: over time, one row is drawn. Received: path=None")
        rows = [each[kind, path] for each in reports]
        last = reports[-1] if reports else None
        labels, title = [f"{each.step:,}" for each in reports], f"Exponents of the {kind} {path}"
    columns = [row.histogram.exponents for row in rows]
    found = [exponent for column in columns for exponent in column]
    if last is None or not found:
        raise ValueError(f"There are no values of the kind {kind!r}. Received: {measured!r}")
    shift = exponent_of(_scale_of(last, kind, loss_scale))
    borders = [where.zero - shift, where.normal[0] + 1 - shift, where.infinite[0] + 1 - shift]
    low, high = min(found) - 1, max(found) + 1
    picture = np.full([high - low + 1, len(rows)], np.nan)
    for place, column in enumerate(columns):
        for exponent, count in column.items():
            picture[exponent - low, place] = count / sum(column.values())
    ax = axes.given_or_new(ax, __name__, (8, 4.5))
    from matplotlib import colors

    norm = colors.LogNorm(_SMALLEST, _LARGEST, clip=True)
    extent = (-0.5, len(rows) - 0.5, low, high + 1)
    how = {"origin": "lower", "aspect": "auto", "extent": extent}
    image = ax.imshow(picture, cmap="Blues", norm=norm, **how)
    ax.figure.colorbar(image, ax=ax, label="share of the values")
    names = ("zero below", "fewer digits below", "infinite above")
    if kind == UPDATE:
        names, borders = ("lost below",), borders[:1]
    for border, name, style in zip(borders, names, ("-", ":", "--")):
        ax.axhline(border, color="tab:red", linestyle=style, label=name)
    inside = [border for border in borders if low - 12 <= border <= high + 12]
    bottom, top = min([low, *inside]) - 1, max([high + 1, *inside]) + 1
    ax.set_ylim(bottom - (top - bottom) // 8, top)  # with room for the legend
    apart = -(-len(rows) // _MOST_COLUMNS)
    rotation = 45 if len(rows) > 3 else 0
    ax.set_xticks(range(0, len(rows), apart), labels[::apart], rotation=rotation, ha="right")
    ax.set_ylabel("exponent of 2")
    if not isinstance(measured, Report):
        ax.set_xlabel("step")
    of_scale = f" at a loss scale of 2^{shift}" if kind in SCALED else ""
    full_title = f"{title}, and the borders of {dtype}{of_scale}"
    ax.set_title("\n".join(textwrap.wrap(full_title, _LONGEST_TITLE)))
    ax.legend(loc="lower center", ncols=3, fontsize="small")
    return ax


def heat_map(
    result: WhatIf, dtype: str = "float16", *, kind: str = GRADIENT, ax: "Axes | None" = None
) -> "Axes":
    """Draws what each loss scale would have lost: rows by scales.

    Colors, on a logarithmic scale, and numbers, in percent, are the share of the values that has
    become zero; "inf" marks what has overflowed. If there are more than 40 rows, the worst of them
    are drawn.

    Args:
        result: what `what_if` returned.
        dtype: one of its dtypes. Defaults to "float16".
        kind: "gradient" (the default), "output gradient" or "output", which does not depend on the
            scale.
        ax: `Axes` to draw into. Defaults to those of a new pyplot figure.

    Returns:
        The `Axes`.

    Raises:
        ImportError: matplotlib is not installed.
        KeyError: the dtype was not run.

    Example:

    >>> import matplotlib
    >>> matplotlib.use("agg")  # without a window
    >>> model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    >>> loss = lambda y, predictions: tf.reduce_mean(predictions)
    >>> result = keras_mp.numerics.what_if.what_if(
    ...     model, tf.ones([4, 2]), loss=loss, dtypes=["float16"], scales=[1.0, 1024.0]
    ... )
    >>> keras_mp.numerics.figures.heat_map(result).get_xlabel()
    'loss scale'
    """
    of_kind = [path for each, path in result[dtype, result.scales[0]] if each == kind]

    def badness(path: str) -> tuple[float, float, float]:
        row = kind, path
        lost = [result[dtype, scale][row] for scale in result.scales]
        return rank(lost, row in result.noise)

    paths = text_tables.worst(of_kind, badness, _MOST_ROWS)
    runs = [[result[dtype, scale][kind, path] for scale in result.scales] for path in paths]
    picture = np.array([[np.nan if lost.infinite else lost.share for lost in row] for row in runs])
    ax = axes.given_or_new(ax, __name__, (8, 1.5 + 0.3 * len(paths)))
    import matplotlib as mpl
    from matplotlib import colors

    norm = colors.SymLogNorm(_NEXT_TO_NOTHING, vmin=0, vmax=_LARGEST)
    cmap = mpl.colormaps["Oranges"].with_extremes(bad="lightgray")
    image = ax.imshow(picture, aspect="auto", cmap=cmap, norm=norm)
    ticks = [0, 0.001, 0.01, 0.1, 1]
    bar = ax.figure.colorbar(image, ax=ax, label="share that is zero", ticks=ticks)
    bar.set_ticklabels(["0", "0.1 %", "1 %", "10 %", "100 %"])
    has_room = len(result.scales) <= _MOST_NUMBERS
    for (row, column), share in np.ndenumerate(picture):
        if np.isnan(share):
            text, color = "inf", "tab:red"
        else:
            is_dark = norm(share) > 0.6
            text, color = _number(share) * has_room, "white" if is_dark else "black"
        if text:
            ax.text(column, row, text, ha="center", va="center", color=color, fontsize="small")
    exponents = [f"2^{exponent_of(scale)}" for scale in result.scales]
    ax.set_xticks(range(len(exponents)), exponents)
    ax.set_yticks(range(len(paths)), [text_tables.fitted(path, _LONGEST_NAME) for path in paths])
    ax.set_xlabel("loss scale")
    ax.set_title(f"What {dtype} loses of each {kind}{_left_out(len(paths), len(of_kind))}")
    return ax


def window(
    reports: Sequence[Report],
    dtype: str = "float16",
    *,
    tolerance: float = 0.0,
    history: "LossScaleMonitor | Mapping[str, Sequence[float]] | None" = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the window of loss scales in which nothing is lost, and the scale's path through it.

    Args:
        reports: sequence of `Report`s, such as the history of an `ExponentMonitor`.
        dtype: "float16" (the default), "bfloat16", "float8_e4m3fn" or "float8_e5m2".
        tolerance: float, from 0 to 1. Which share of each row may become zero. Defaults to 0.
        history: the history of a `keras_mp.callbacks.LossScaleMonitor` of the same `fit`, or
            that callback, for a finer path. Defaults to the loss scales in the reports.
        ax: `Axes` to draw into. Defaults to those of a new pyplot figure.

    Returns:
        The `Axes`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no reports.

    Example:

    >>> import matplotlib
    >>> matplotlib.use("agg")  # without a window
    >>> from keras_mp.numerics import Report, figures
    >>> from keras_mp.numerics.exponents import Histogram
    >>> from keras_mp.numerics.report_rows import Row
    >>> row = Row("gradient", "dense/kernel", "float32", Histogram.of([1e-6, 2e-6, 1e-3]))
    >>> reports = [Report([row], step=i, counted=1, loss_scale=1024.0) for i in (1, 2)]
    >>> figures.window(reports).get_title()
    'Loss scales at which float16 loses nothing'
    """
    if not reports:
        raise ValueError(f"Expected at least one report. Received: {reports!r}")
    steps = [report.step for report in reports]
    windows = [report.window(dtype, tolerance) for report in reports]
    ax = axes.given_or_new(ax, __name__, (8, 4))
    path: Any = getattr(history, "history", history)
    if path is None:
        path = {"step": steps, "loss_scale": [report.loss_scale for report in reports]}
    scales = np.log2(path["loss_scale"])
    # An open end is drawn at the edge of the picture.
    ends = [end for each in windows for end in each if abs(end) < EVERYWHERE.high]
    bottom, top = min([*scales, *ends]) - 2, max([*scales, *ends]) + 2
    low, high = np.clip(np.transpose(windows), bottom, top)
    marker = "." if len(steps) <= _MOST_MARKED else None
    ax.plot(steps, low, color="tab:orange", label="too small below", marker=marker)
    ax.plot(steps, high, color="tab:red", label="overflows above", marker=marker)
    ax.fill_between(steps, low, high, where=low <= high, color="tab:green", alpha=0.15)
    ax.plot(path["step"], scales, color="tab:blue", label="loss scale", marker=marker)
    ax.set_ylim(bottom, top)
    ax.set_xlabel("step")
    ax.set_ylabel("loss scale (exponent of 2)")
    ax.set_title(f"Loss scales at which {dtype} loses nothing")
    ax.legend()
    ax.grid(alpha=0.3)
    return ax


def _scale_of(report: Report, kind: str, loss_scale: float | None) -> float:
    """Returns the loss scale at which a report is drawn."""
    if loss_scale is not None:
        return loss_scale
    return round_down(report.loss_scale) if kind in SCALED else 1.0


def _left_out(shown: int, total: int) -> str:
    """Returns what a title says about rows that there was no room for."""
    return f" (the worst {shown} of {total})" if shown < total else ""


def _number(share: float) -> str:
    """Returns a share in percent, with two digits; "" for zero."""
    if not share:
        return ""
    percent = 100 * share
    return "<0.01" if percent < 0.01 else f"{percent:.2g}" if percent < 99.5 else "100"
