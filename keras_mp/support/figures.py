"""Makes Matplotlib's figures, and imports Matplotlib when it is needed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(tool: str, size: tuple[float, float]) -> "Figure":
    """Returns a new pyplot figure.

    Args:
        tool: str. The module that draws, for the error.
        size: the width and the height of the figure, in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(f'{tool} needs matplotlib: pip install "keras-mp[tutorials]"') from error
    return plt.figure(figsize=size, layout="constrained")
