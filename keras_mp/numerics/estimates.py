"""An estimate of how fast a function could be, from its work and the speed of the device."""

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from keras_mp.numerics.census_text import NO_LAYER, between, place
from keras_mp.support import text_tables, turns
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

if TYPE_CHECKING:
    from keras_mp.numerics.census import Graph, Operation

_BYTES = 2**24


class Change(NamedTuple):
    """A change that would make a function faster.

    Attributes:
        what: str. What to change.
        seconds: float. What a call would gain.

    Example:

    >>> from keras_mp.numerics.estimates import Change
    >>> Change("compute 'dense' in bfloat16", 0.001).seconds
    0.001
    """

    what: str
    seconds: float


class Estimate(NamedTuple):
    """The time that products and casts take, by the measured speeds of the device.

    Attributes:
        seconds: float. What products, convolutions and casts of a call take at least.
        fastest: float. The same, with each product in the dtype that is fastest here, and no cast.
        changes: tuple of at most three `Change`s, that which brings most first.

    Example:

    >>> from keras_mp.numerics.estimates import Estimate
    >>> print(Estimate(0.002, 0.001, ()))
    Products and casts take at least 2 ms here; 1 ms with the fastest dtypes and no casts.
    """

    seconds: float
    fastest: float
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        head = (
            f"Products and casts take at least {milliseconds(self.seconds)} here; "
            f"{milliseconds(self.fastest)} with the fastest dtypes and no casts."
        )
        changes = (f"  {milliseconds(each.seconds)}: {each.what}" for each in self.changes)
        return "\n".join([head, *(("What would bring most:",) if self.changes else ()), *changes])


def estimate(
    graph: "Graph", speeds: Mapping[str, Mapping[str, float]], bandwidth: float
) -> Estimate:
    """Estimates the time of products and casts.

    Args:
        graph: `Graph`.
        speeds: floating-point operations a second by kind and dtype.
        bandwidth: bytes a second that casts move.
    """
    half = next((dtype for dtype in graph.work() if dtype in LOW_PRECISION_NAMES), "bfloat16")

    def seconds(each: "Operation", dtype: str) -> float:
        return each.work / speeds[each.kind].get(dtype, speeds[each.kind]["float32"])

    products = [each for each in graph.operations if each.work]
    now = sum(seconds(each, each.dtype) for each in products)
    fastest = sum(min(seconds(each, dtype) for dtype in ("float32", half)) for each in products)
    casting = sum(each.bytes for each in graph.casts) / bandwidth
    gains: dict[tuple[str, str], float] = defaultdict(float)
    for each in products:
        other = half if each.dtype not in LOW_PRECISION_NAMES else "float32"
        where, what = f"the {each.kind}s of {each.layer or NO_LAYER}", f"compute {{}} in {other}"
        # If 16 bits are slower for this product, they are for all products of its kind.
        if each.dtype in LOW_PRECISION_NAMES:
            where = f"all {each.kind}s that are in {each.dtype} now"
        gains[what, where] += seconds(each, each.dtype) - seconds(each, other)
    places: dict[frozenset[str], str] = {}
    for each in graph.casts:
        # The cast of the backward pass is between the same layers, and goes with this one.
        ends = frozenset((each.after or NO_LAYER, each.before or NO_LAYER))
        where = places.setdefault(ends, place(between(each)))
        gains["leave out the casts {}", where] += each.bytes / bandwidth
    # Equal layers of repeated blocks are one change.
    kinds = text_tables.merged(gains, lambda gain: gain[1], lambda gain: gain[0])
    sums = [Change(k[0][0].format(where), sum(gains[each] for each in k)) for where, k in kinds]
    changes = sorted((each for each in sums if each.seconds > 0), key=lambda each: -each.seconds)
    return Estimate(now + casting, fastest, tuple(changes[:3]))


def bandwidth_of_casts() -> float:
    """Measures the bytes a second that a cast reads and writes, of the fastest of some."""
    source = tf.zeros([_BYTES // 4])
    cast = {"cast": lambda: tf.cast(source, tf.bfloat16)[0].numpy()}
    return 1.5 * _BYTES / turns.fastest(turns.take(cast, 6))["cast"]


def milliseconds(seconds: float) -> str:
    """Returns a time in words, such as "2.5 ms"."""
    return f"{seconds * 1000:.3g} ms"
