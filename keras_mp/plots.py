"""Plots of a training run.

They need matplotlib, which `keras-mp[tutorials]` installs.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mp.callbacks import LossScaleMonitor
from keras_mp.support.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More marks than this would cover each other.
_MOST_MARKED = 40


def loss_scale(
    history: "LossScaleMonitor | tf.keras.callbacks.History | Mapping[str, Sequence[float]]",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the loss scale of a run, and marks where steps were skipped.

    The vertical axis is in powers of two. A cross means that steps were skipped since the previous
    point; if there was more than one, a number says how many. To see which step was skipped, use a
    monitor that reads the scale at every batch: `LossScaleMonitor(update_freq=1)`.

    Args:
        history: A `keras_mp.callbacks.LossScaleMonitor`; or the `History` of a `fit` that had one,
            which is drawn over epochs; or the dict `history` of either.
        ax: Matplotlib's `Axes` to draw into. Defaults to those of a new pyplot figure.

    Returns:
        The `Axes`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: `history` has no loss scale.

    Example:

    >>> import matplotlib
    >>> matplotlib.use("agg")  # without a window
    >>> history = {"step": [0, 1, 2], "loss_scale": [64, 32, 32], "steps_skipped": [0, 1, 1]}
    >>> ax = keras_mp.plots.loss_scale(history)
    >>> ax.get_title()
    'Loss scale (skipped steps: 1 of 2)'
    """
    values = getattr(history, "history", history)
    if not isinstance(values, dict) or not values.get("loss_scale"):
        raise ValueError(
            "Expected the history of a run with loss scaling that had a "
            "keras_mp.callbacks.LossScaleMonitor among its callbacks. "
            f"Received: {values!r} (of {type(history)})"
        )
    scales, totals = values["loss_scale"], values["steps_skipped"]
    if "step" in values:
        unit, positions, skipped_before = "step", values["step"], totals[0]
        attempted = f" of {positions[-1] - positions[0]}"
    else:
        unit, positions, attempted = "epoch", _epochs(history, scales), ""
        # The number of skipped steps before the first epoch is unknown.
        skipped_before = 0 if positions[0] == 1 else totals[0]
    skipped = [now - before for before, now in zip([skipped_before, *totals], totals)]
    ax = new_figure(__name__, (8, 4)).subplots() if ax is None else ax
    from matplotlib import ticker

    marker = "." if len(scales) <= _MOST_MARKED else None
    ax.plot(positions, scales, color="tab:blue", marker=marker, label="loss scale")
    marked = [(x, y, n) for x, y, n in zip(positions, scales, skipped) if n > 0]
    if marked:
        xs, ys, _ = zip(*marked)
        label = "steps skipped since the point before"
        ax.plot(xs, ys, "x", color="tab:red", markersize=8, label=label)
    for x, y, count in marked if len(marked) <= _MOST_MARKED else []:
        if count > 1:
            how: Any = {"textcoords": "offset points", "ha": "center", "color": "tab:red"}
            ax.annotate(str(count), (x, y), (0, 6), **how)
    ax.set_yscale("log", base=2)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    title = f"Loss scale (skipped steps: {sum(skipped)}{attempted})"
    limits, label = (min(scales) / 2, max(scales) * 2), "loss scale (powers of 2)"
    ax.set(ylim=limits, xlabel=unit, ylabel=label, title=title)
    ax.legend()
    ax.grid(alpha=0.3)
    return ax


def _epochs(history: object, scales: Sequence[float]) -> list[int]:
    """Returns the numbers of the epochs as Keras prints them, from 1."""
    epochs = [epoch + 1 for epoch in getattr(history, "epoch", [])]
    # If a `History` was used in two calls of `fit`, it has the numbers of the last one only.
    return epochs if len(epochs) == len(scales) else list(range(1, len(scales) + 1))
