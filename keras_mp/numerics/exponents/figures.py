"""Pictures of reports. Each function draws into an `Axes` of matplotlib."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_mp.numerics.exponents.histogram import EVERYWHERE, exponent_of, round_down
from keras_mp.numerics.exponents.reports import Report
from keras_mp.numerics.exponents.rows import SCALED, borders_of, ranked
from keras_mp.support import text_tables
from keras_mp.support.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from keras_mp.callbacks import LossScaleMonitor

_SMALLEST, _LARGEST = 1e-6, 1.0

# How many names can be read side by side.
_MOST_COLUMNS = 20
_LONGEST_NAME, _LONGEST_TITLE = 32, 90

# More marks than these would cover each other.
_MOST_MARKED = 50


def histograms(
    report: Report,
    dtype: str = "float16",
    *,
    kind: str = "gradient",
    loss_scale: float | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws histograms of exponents side by side, with the borders of a dtype.

    The rows of a kind are drawn, or the worst 20 of them. The darker, the larger the share of the
    values. What is outside of the lines becomes zero or infinite in the dtype, at the loss scale;
    below the dotted line digits are lost.

    Args:
        report: a `Report`.
        dtype: "float16" (the default), "bfloat16", "float8_e4m3fn" or "float8_e5m2".
        kind: "gradient" (the default), "output", "output gradient", "weight" or "update".
        loss_scale: float, a power of two. Defaults to that of the report. Only gradients are
            scaled.
        ax: `Axes` to draw into. Defaults to those of a new pyplot figure.

    Returns:
        The `Axes`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw.

    Example:

    >>> import matplotlib
    >>> matplotlib.use("agg")  # without a window
    >>> from keras_mp.numerics import Report
    >>> from keras_mp.numerics.exponents import figures
    >>> from keras_mp.numerics.exponents.histogram import Histogram
    >>> from keras_mp.numerics.exponents.rows import Row
    >>> row = Row("gradient", "dense/kernel", "float32", Histogram.of([1e-6, 2e-6, 1e-3]))
    >>> ax = figures.histograms(Report([row], step=1, counted=1, loss_scale=1024.0))
    >>> ax.get_title()
    'Exponents of each gradient, and the borders of float16 at a loss scale of 2^10'
    """
    where = borders_of(kind, dtype)
    of_kind = [row for row in report.rows if row.kind == kind]
    now = round_down(report.loss_scale) if kind in SCALED else 1.0
    scale, noise = now if loss_scale is None else loss_scale, report.noise
    rows = text_tables.worst(
        of_kind, lambda row: ranked(row, dtype, scale, noise).rank, _MOST_COLUMNS
    )
    labels = [text_tables.fitted(row.path, _LONGEST_NAME) for row in rows]
    left_out = f" (the worst {len(rows)} of {len(of_kind)})" if len(rows) < len(of_kind) else ""
    columns = [row.histogram.exponents for row in rows]
    found = [exponent for column in columns for exponent in column]
    if not found:
        raise ValueError(f"There are no values of the kind {kind!r}. Received: {report!r}")
    shift = exponent_of(scale)
    borders = [where.zero - shift, where.normal[0] + 1 - shift, where.infinite[0] + 1 - shift]
    low, high = min(found) - 1, max(found) + 1
    picture = np.full([high - low + 1, len(rows)], np.nan)
    for place, column in enumerate(columns):
        for exponent, count in column.items():
            picture[exponent - low, place] = count / sum(column.values())
    ax = new_figure(__name__, (8, 4.5)).subplots() if ax is None else ax
    from matplotlib import colors

    norm = colors.LogNorm(_SMALLEST, _LARGEST, clip=True)
    extent = (-0.5, len(rows) - 0.5, low, high + 1)
    how = {"origin": "lower", "aspect": "auto", "extent": extent}
    image = ax.imshow(picture, cmap="Blues", norm=norm, **how)
    ax.figure.colorbar(image, ax=ax, label="share of the values")
    names = ("zero below", "fewer digits below", "infinite above")
    if kind == "update":
        names, borders = ("lost below",), borders[:1]
    for border, name, style in zip(borders, names, ("-", ":", "--")):
        ax.axhline(border, color="tab:red", linestyle=style, label=name)
    inside = [border for border in borders if low - 12 <= border <= high + 12]
    bottom, top = min([low, *inside]) - 1, max([high + 1, *inside]) + 1
    ax.set_ylim(bottom - (top - bottom) // 8, top)  # with room for the legend
    rotation = 45 if len(rows) > 3 else 0
    ax.set_xticks(range(len(rows)), labels, rotation=rotation, ha="right")
    ax.set_ylabel("exponent of 2")
    of_scale = f" at a loss scale of 2^{shift}" if kind in SCALED else ""
    full_title = f"Exponents of each {kind}{left_out}, and the borders of {dtype}{of_scale}"
    ax.set_title("\n".join(textwrap.wrap(full_title, _LONGEST_TITLE)))
    ax.legend(loc="lower center", ncols=3, fontsize="small")
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
        reports: sequence of `Report`s, such as the history of a `watch`.
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
    >>> from keras_mp.numerics import Report
    >>> from keras_mp.numerics.exponents import figures
    >>> from keras_mp.numerics.exponents.histogram import Histogram
    >>> from keras_mp.numerics.exponents.rows import Row
    >>> row = Row("gradient", "dense/kernel", "float32", Histogram.of([1e-6, 2e-6, 1e-3]))
    >>> reports = [Report([row], step=i, counted=1, loss_scale=1024.0) for i in (1, 2)]
    >>> figures.window(reports).get_title()
    'Loss scales at which float16 loses nothing'
    """
    if not reports:
        raise ValueError(f"Expected at least one report. Received: {reports!r}")
    steps = [report.step for report in reports]
    windows = [report.window(dtype, tolerance) for report in reports]
    ax = new_figure(__name__, (8, 4)).subplots() if ax is None else ax
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
