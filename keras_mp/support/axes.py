"""Matplotlib's axes, to draw into. Matplotlib is imported when it is needed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def given_or_new(ax: "Axes | None", tool: str, size: tuple[float, float]) -> "Axes":
    """Returns the axes for a picture.

    Args:
        ax: the axes of the user, or None.
        tool: str. The module that draws, for the error.
        size: the width and the height of a new figure, in inches.

    Returns:
        `ax`, or the axes of a new pyplot figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(f'{tool} needs matplotlib: pip install "keras-mp[tutorials]"') from error
    return plt.subplots(figsize=size, layout="constrained")[1]
