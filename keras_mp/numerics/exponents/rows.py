"""The rows of a report: the histogram of a gradient, an output or a weight, and what it loses."""

from typing import NamedTuple

import numpy as np

from keras_mp.numerics.exponents.histogram import (
    EVERYWHERE,
    UPDATES,
    Fate,
    Format,
    Histogram,
    Window,
    format_of,
)
from keras_mp.support import text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

# Kind and path of a row.
RowKey = tuple[str, str]

COMPUTED = ("gradient", "input", "output", "output gradient")
KINDS = (*COMPUTED, "weight", "update")
SCALED = ("gradient", "output gradient")

# Which share of a gradient may become zero: a few values of a large one are always next to zero.
TOLERANCE = 0.001

# Which share of updates may be lost. In every model some are far below others.
UPDATE_TOLERANCE = 0.1


class Statistics(NamedTuple):
    """Numbers about a weight that its histogram does not have.

    Attributes:
        amax: float. The largest magnitude.
        mean: float.
        std: float. The standard deviation.
        l1_norm: float. The sum of magnitudes.
        l2_norm: float. The root of the sum of squares.

    Example:

    >>> import numpy as np
    >>> keras_mp.numerics.exponents.rows.Statistics.of(np.float32([3.0, -4.0])).l2_norm
    5.0
    """

    amax: float
    mean: float
    std: float
    l1_norm: float
    l2_norm: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Statistics":
        """Returns the numbers of an array.

        Args:
            values: array of floats, not empty.
        """
        values = np.asarray(values, np.float64).reshape(-1)
        sizes = np.abs(values)
        norms = sizes.sum(), np.sqrt(np.square(values).sum())
        return cls(*map(float, (sizes.max(), values.mean(), values.std(), *norms)))


class Row(NamedTuple):
    """The counts of one tensor of a model.

    Attributes:
        kind: "gradient" of a variable, "output" of a layer, "output gradient", "weight", or
            "update" of a variable: what a step adds to each weight, divided by the power of two at
            or below the weight.
        path: the variable's or the layer's path, such as "encoder/dense/kernel".
        dtype: str. What it was computed in: the tensor's own dtype; for a variable's gradient, what
            its layer computes in; for weights and updates, what the optimizer sees. Values that
            were too small for it are among the zeros.
        histogram: a `Histogram`; that of a gradient is as if the loss had not been scaled.
        overflowed_at: float. The smallest loss scale at which values were infinite or NaN, or
            infinity.
        statistics: `Statistics` of a weight when it was read last; None for other kinds.

    Example:

    >>> import numpy as np
    >>> from keras_mp.numerics.exponents.histogram import Histogram
    >>> from keras_mp.numerics.exponents.rows import Row
    >>> row = Row("gradient", "dense/kernel", "float16", Histogram.of(np.float32([2.0**-20])))
    >>> str(row.window("float16"))
    '2^-4..2^35'
    """

    kind: str
    path: str
    dtype: str
    histogram: Histogram
    overflowed_at: float = float("inf")
    statistics: Statistics | None = None

    @property
    def key(self) -> RowKey:
        """Its kind and its path, by which a `Report` has it."""
        return self.kind, self.path

    def fate(self, dtype: str, loss_scale: float = 1.0) -> Fate:
        """Returns what becomes of the values in a dtype; of updates, in variables of it.

        Args:
            dtype: "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2".
            loss_scale: float, a power of two, by which gradients are multiplied. Defaults to 1.

        Returns:
            A `Fate`. An update that does not change its weight counts as `zero`.
        """
        borders = borders_of(self.kind, dtype)
        return self.histogram.fate(borders, loss_scale if self.is_scaled else 1.0)

    @property
    def is_scaled(self) -> bool:
        """Whether the loss scale multiplies it."""
        return self.kind in SCALED

    @property
    def hides_updates(self) -> bool:
        """Whether it has updates that are unknown, since the weights did not take them."""
        is_rounded = self.kind == "update" and self.dtype in LOW_PRECISION_NAMES
        return is_rounded and self.histogram.zeros > 0

    def window(self, dtype: str, tolerance: float | None = None) -> Window:
        """Returns the scales at which nothing is lost.

        For gradients these are loss scales. For updates they are factors of the learning rate at
        which updates arrive in variables of the dtype.

        What has overflowed in the dtype that it was computed in may have been of any size. So for
        that dtype, the window ends below the loss scale at which it did.

        Args:
            dtype: "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2".
            tolerance: float, from 0 to 1. Which share of the values may become zero. Defaults to 0,
                and for updates to 0.1: in every model some are far below others.

        Returns:
            A `Window`.
        """
        if tolerance is None:
            tolerance = UPDATE_TOLERANCE if self.kind == "update" else 0.0
        window = self.histogram.window(borders_of(self.kind, dtype), tolerance)
        if self.dtype == dtype and np.isfinite(self.overflowed_at):
            window &= Window(EVERYWHERE.low, int(np.ceil(np.log2(self.overflowed_at))) - 1)
        return window

    def has_unknown_zeros(self, loss_scale: float, tolerance: float = TOLERANCE) -> bool:
        """Whether zeros of a gradient may be values that were too small for its dtype.

        They may be if no other value is left, or if the others reach down to subnormal numbers.

        Args:
            loss_scale: float. The loss scale at which it was computed.
            tolerance: float, from 0 to 1. Which share of zeros does not matter.

        Returns:
            bool.
        """
        histogram = self.histogram
        if self.dtype not in LOW_PRECISION_NAMES or not self.is_scaled:
            return False
        if histogram.zeros <= tolerance * histogram.total:
            return False
        smallest = min(histogram.exponents, default=None)
        normal, _ = format_of(self.dtype).normal
        return smallest is None or smallest + np.log2(loss_scale) <= normal

    def __add__(self, other: "Row") -> "Row":
        overflowed_at = min(self.overflowed_at, other.overflowed_at)
        return self._replace(
            dtype=other.dtype,
            histogram=self.histogram + other.histogram,
            overflowed_at=overflowed_at,
            statistics=other.statistics,
        )


def borders_of(kind: str, dtype: str) -> Format:
    """Returns the borders of a dtype for rows of a kind.

    Args:
        kind: one of `KINDS`.
        dtype: its name.

    Raises:
        ValueError: there is no such dtype.
    """
    borders = format_of(dtype)
    return UPDATES[dtype] if kind == "update" else borders


def ranked(
    row: Row, dtype: str, loss_scale: float, noise: set[RowKey], is_full: bool = False
) -> text_tables.RankedRow:
    """Returns a row of a table, ranked by how much it loses and how near it is to losing more.

    Args:
        row: `Row`.
        dtype: str. As for `Report.table`.
        loss_scale: float, a power of two.
        noise: set of (kind, path). See `Report.noise`.
        is_full: bool. Whether there is room for columns that do not say what is lost.
    """
    # The tolerance is that of the headline, which would contradict the table otherwise.
    tolerance = UPDATE_TOLERANCE if row.kind == "update" else TOLERANCE
    histogram, window = row.histogram, row.window(dtype, tolerance)
    fate, exponents = row.fate(dtype, loss_scale), histogram.exponents
    bad = histogram.infinities + histogram.nans
    is_noise = row.key in noise
    cells = (
        *(row.kind, f"{row.path} (noise)" if is_noise else row.path, row.dtype),
        f"{histogram.total:,}" * is_full,
        percent(histogram.zeros, histogram.total),
        percent(bad, histogram.total),
        f"2^{min(exponents)}..2^{max(exponents)}" if exponents else "",
        percent(fate.zero, fate.values),
        percent(fate.subnormal, fate.values) * is_full,
        percent(fate.infinite, fate.values),
        "unknown" if row.hides_updates else str(window),
    )
    lost = (
        bad / max(histogram.total, 1),
        fate.share("infinite"),
        fate.share("zero") * (fate.share("zero") > tolerance),
        float(row.hides_updates or row.has_unknown_zeros(loss_scale)) * histogram.zeros,
    )
    # Nothing of what is kept in float32 is lost.
    matters = not is_noise and (row.kind in COMPUTED or row.dtype in LOW_PRECISION_NAMES)
    margin = min(window.margins(loss_scale if row.is_scaled else 1.0))
    alike = row.kind, row.dtype, histogram.total, is_noise, *(share > 0 for share in lost)
    return text_tables.RankedRow(cells, (float(matters), *lost, -margin), alike)


def percent(count: int, total: int) -> str:
    """Returns a share as text, which is empty only for zero.

    Args:
        count: int.
        total: int, how many there are in all.

    Returns:
        str: "" for none, else such as "12.5 %" or "<0.1 %".
    """
    if not count:
        return ""
    share = 100 * count / total
    return "<0.1 %" if share < 0.1 else f"{share:.1f} %"
