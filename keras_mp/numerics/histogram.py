"""Histograms of exponents, and what 16 bits would make of the values in them.

A value that is multiplied by a power of two moves by whole exponents. So a histogram of a float32
tensor tells what a dtype makes of it at any such scale; no second measurement is needed. To be
exact, that takes more than the exponent: where a dtype rounds to zero, to its smallest normal
number or to infinity is decided inside of an exponent. These borders, relative to the exponent, are
the same at each scale, and there are five of them for the dtypes in `FORMATS`. So each exponent has
six bins.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.support import autograph, kept_casts

# The exponents of float32's values, subnormal ones included.
LOWEST, HIGHEST = -149, 127

# Where the bins inside of an exponent begin: at 1, above 1, and at 2 - 2**-7, 2 - 2**-8, 2 - 2**-10
# and 2 - 2**-11. As the 23 bits that follow the leading 1.
EDGES = (0, 1, 0x7F0000, 0x7F8000, 0x7FE000, 0x7FF000)

# One row for zeros, one for each exponent, one for infinities (its first bin) and NaN.
ROWS, COLUMNS = HIGHEST - LOWEST + 3, len(EDGES)
# The first bin of finite values that are not zero, and that of infinities.
_FINITE, _INFINITE = COLUMNS, (ROWS - 1) * COLUMNS

_LARGEST_SHIFT = 300

# How many values 16 bits can have.
_PATTERNS = 2**16


# Of each dtype, which rounds to nearest and ties to even, three borders, each an exponent and the
# first of its bins whose values are beyond: of the values that are not zero then, of those that are
# normal, and of those that are infinite.
FORMATS = {
    "float16": ((-25, 1), (-15, 4), (15, 5)),
    "bfloat16": ((-134, 1), (-127, 2), (127, 3)),
}


class Fate(NamedTuple):
    """How a dtype changes the values of a histogram that are finite and not zero.

    Attributes:
        values: int. How many there are.
        zero: int. How many become zero.
        subnormal: int. How many keep fewer digits than the dtype has.
        infinite: int. How many become infinite.

    Example:

    >>> from keras_mp.numerics.histogram import Fate
    >>> Fate(values=8, zero=2, subnormal=1, infinite=0).share("zero")
    0.25
    """

    values: int
    zero: int
    subnormal: int
    infinite: int

    def share(self, name: str) -> float:
        """Returns a share of the values, from 0 to 1.

        Args:
            name: "zero", "subnormal" or "infinite".
        """
        return getattr(self, name) / self.values if self.values else 0.0


class Window(NamedTuple):
    """The scales at which nothing is lost, as exponents of 2; there are none if `low > high`.

    Attributes:
        low: int. The smallest at which no more than the tolerance becomes zero.
        high: int. The largest at which nothing becomes infinite.

    Example:

    >>> window = keras_mp.numerics.histogram.Window(low=6, high=13)
    >>> print(window, window.margins(2.0**10))
    2^6..2^13 (4.0, 3.0)
    """

    low: int
    high: int

    @property
    def is_empty(self) -> bool:
        """Whether there is no scale at which nothing is lost."""
        return self.low > self.high

    def __contains__(self, exponent: object) -> bool:
        return isinstance(exponent, int) and self.low <= exponent <= self.high

    def __and__(self, other: "Window") -> "Window":
        return Window(max(self.low, other.low), min(self.high, other.high))

    def margins(self, scale: float) -> tuple[float, float]:
        """Returns how far a scale is from either end, in factors of 2; negative if it is outside.

        Args:
            scale: float. A loss scale.

        Returns:
            tuple of the distances to the low and to the high end.
        """
        exponent = math.log2(scale)
        return exponent - self.low, self.high - exponent

    def __str__(self) -> str:
        if self.is_empty:
            return "none"
        low, high = (f"2^{end}" if abs(end) < _LARGEST_SHIFT else "" for end in self)
        one = f"up to {high}" if high else f"from {low}" if low else "any"
        return f"{low}..{high}" if low and high else one


EVERYWHERE = Window(-_LARGEST_SHIFT, _LARGEST_SHIFT)


class Histogram:
    """How many values of a tensor have which exponent.

    Histograms add up with `+`. They are equal if all of their bins are.

    Attributes:
        total: int. How many values there are, including zeros, infinities and NaN.
        zeros: int. How many are zero.
        infinities: int. How many are infinite.
        nans: int. How many are NaN.

    Args:
        bins: array of integers of the shape [279, 6]: zeros, exponents from -149 to 127, and
            infinities and NaN. `Histogram.count` counts those of a tensor.

    Example:

    >>> from keras_mp.numerics.histogram import Histogram
    >>> histogram = Histogram.count(tf.constant([0, 1e-9, 1e-5, 1.0, 70000.0]))
    >>> histogram.fate("float16")
    Fate(values=4, zero=1, subnormal=1, infinite=1)
    >>> histogram.fate("float16", scale=1 / 8).infinite
    0
    >>> histogram.window("bfloat16")
    Window(low=-104, high=111)
    """

    def __init__(self, bins: np.ndarray | Sequence[Sequence[int]]) -> None:
        counts = np.array(bins, np.int64)
        # A NaN may have any bits.
        counts[-1, 1:] = [counts[-1, 1:].sum(), *[0] * (COLUMNS - 2)]
        # Most are empty, and many histograms may be kept.
        self._places = np.flatnonzero(counts).astype(np.int16)
        self._counts = counts.reshape(-1)[self._places]
        self.total, self.zeros = int(counts.sum()), int(counts[0].sum())
        self.infinities, self.nans = counts[-1, :2].tolist()

    @classmethod
    def count(cls, tensor: tf.Tensor) -> "Histogram":
        """Counts the values of an eager tensor, where it is."""
        return cls(count_exponents(tensor).numpy())

    @property
    def bins(self) -> np.ndarray:
        """All bins, an int64 array of the shape [279, 6]."""
        bins = np.zeros(ROWS * COLUMNS, np.int64)
        bins[self._places] = self._counts
        return bins.reshape(ROWS, COLUMNS)

    @property
    def exponents(self) -> dict[int, int]:
        """The exponents that occur, and how many finite values have each."""
        rows = self.bins[1:-1].sum(axis=1)
        return {LOWEST + int(i): int(rows[i]) for i in np.flatnonzero(rows)}

    def _finite(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns places of finite values, 0 for 1, and how many values each has."""
        is_finite = (self._places >= _FINITE) & (self._places < _INFINITE)
        return self._places[is_finite] - (_FINITE - LOWEST * COLUMNS), self._counts[is_finite]

    def fate(self, dtype: str, scale: float = 1.0) -> Fate:
        """Returns what becomes of the values in a dtype, if they are multiplied by a scale first.

        The counts are exactly those of converting each value with NumPy and ml_dtypes.

        Args:
            dtype: "float16" or "bfloat16".
            scale: float. A power of two. Defaults to 1.

        Returns:
            A `Fate`.

        Raises:
            ValueError: the dtype is not one of these, or the scale is no power of two.
        """
        shift, (places, counts) = exponent_of(scale) * COLUMNS, self._finite()
        borders = (exponent * COLUMNS + column - shift for exponent, column in format_of(dtype))
        zero, small, finite = (int(counts[places < border].sum()) for border in borders)
        total = int(counts.sum())
        return Fate(total, zero, small - zero, total - finite)

    def window(self, dtype: str, tolerance: float = 0.0) -> Window:
        """Returns the scales at which no value becomes infinite and none, or few, become zero.

        Args:
            dtype: as for `fate`.
            tolerance: float, from 0 to 1. Which share of the values may become zero. Defaults to 0.

        Returns:
            A `Window`. It is open at an end that no value sets.

        Raises:
            ValueError: the dtype is not one of those.
        """
        (zero, _, infinite), (places, counts) = format_of(dtype), self._finite()
        if not places.size:
            return EVERYWHERE
        # The smallest values that must not become zero; those below may.
        first = np.searchsorted(counts.cumsum(), tolerance * counts.sum(), "right")
        ends = places[[min(first, places.size - 1), -1]].tolist()
        (small, is_above_a_power), (large, column) = (divmod(each, COLUMNS) for each in ends)
        # One above the border where it is a power of two; one below it where it is beyond.
        low = zero[0] - small + (not is_above_a_power)
        return Window(low, infinite[0] - large - (column >= infinite[1]))

    def to_dict(self) -> dict[str, int]:
        """Returns how many values have which exponent, and how many are none, as JSON has it."""
        special = {"zero": self.zeros, "inf": self.infinities, "nan": self.nans}
        counts = {str(exponent): count for exponent, count in self.exponents.items()}
        return counts | {name: count for name, count in special.items() if count}

    def __add__(self, other: "Histogram") -> "Histogram":
        return Histogram(self.bins + other.bins)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and np.array_equal(self.bins, other.bins)

    def __repr__(self) -> str:
        exponents = self.exponents
        ends = f", 2^{min(exponents)}..2^{max(exponents)}" if exponents else ""
        return f"<Histogram of {self.total} values{ends}>"


def format_of(dtype: str) -> tuple[tuple[int, int], ...]:
    """Returns the borders of a dtype, or raises a ValueError."""
    if dtype not in FORMATS:
        raise ValueError(f"Expected one of the dtypes {list(FORMATS)}. Received: dtype={dtype!r}")
    return FORMATS[dtype]


def round_down(scale: float) -> float:
    """Returns the largest power of two that is at most a scale."""
    return 2.0 ** math.floor(math.log2(scale))


def exponent_of(scale: float) -> int:
    """Returns the exponent of a power of two.

    Args:
        scale: float.

    Raises:
        ValueError: it is no power of two.
    """
    fraction, exponent = math.frexp(scale)
    if fraction == 0.5:
        return exponent - 1
    nearest = f" Near it are 2.0**{exponent - 1} and 2.0**{exponent}." if fraction > 0 else ""
    raise ValueError(
        "Expected a scale that is a power of two: at others every value is rounded, which a "
        f"histogram does not know of.{nearest} Received: scale={scale!r}"
    )


@autograph.do_not_convert
def count_exponents(tensor: tf.Tensor, scale: tf.Tensor | None = None) -> tf.Tensor:
    """Counts values on the device, in eager and in functions.

    Args:
        tensor: float tensor of any shape.
        scale: float32 scalar tensor, by which the values are divided first. Defaults to None: by
            nothing.

    Returns:
        int64 tensor, the bins of a `Histogram`.
    """
    values, counts = tf.reshape(tensor, [-1]), None
    if tensor.dtype.size == 2 and (values.shape[0] or _PATTERNS) >= _PATTERNS:
        # There are so few different values that it is quicker to count each, and then to find its
        # bin.
        counts = _bincount(tf.cast(tf.bitcast(values, tf.uint16), tf.int32), _PATTERNS)
        values = tf.bitcast(tf.cast(tf.range(_PATTERNS), tf.uint16), tensor.dtype)
    # Of what 16 bits have left of the values.
    values = kept_casts.as_float32(values)
    if scale is not None:
        values *= 1.0 / scale
    # In uint32: GPUs leave arithmetic in int32 to the host.
    bits = tf.bitwise.bitwise_and(tf.bitcast(values, tf.uint32), 0x7FFFFFFF)
    # The exponent of a float32 subnormal is that of its bits, read as a whole number.
    as_number = tf.bitcast(tf.cast(bits, tf.float32), tf.uint32)
    is_normal = bits >= 1 << 23
    bits = tf.where(is_normal, bits, as_number)
    row = tf.bitwise.right_shift(bits, 23) + tf.cast(is_normal, tf.uint32) * (126 + 23)
    row = tf.maximum(row, 126) - 126
    fraction = tf.bitwise.bitwise_and(bits, 0x7FFFFF)
    column = tf.add_n([tf.cast(fraction >= edge, tf.uint32) for edge in EDGES[1:]])
    bins = _bincount(tf.cast(row * COLUMNS + column, tf.int32), ROWS * COLUMNS, counts)
    return tf.cast(tf.reshape(bins, [ROWS, COLUMNS]), tf.int64)


def _bincount(places: tf.Tensor, size: int, weights: tf.Tensor | None = None) -> tf.Tensor:
    # `tf.math.bincount` looks at the values for the number of bins first.
    weights = tf.constant([], tf.int32) if weights is None else weights
    return tf.raw_ops.DenseBincount(input=places, size=size, weights=weights, binary_output=False)
