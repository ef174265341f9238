"""What a hazard is: numbers that are measured in a step, and a judge of them."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.numerics.hazards.traced_step import TracedStep


class Said(NamedTuple):
    """What a judge says: a finding without its place.

    Attributes:
        hazard: str. Its name.
        why: str. Why it matters, with the numbers.
        cure: str. What to change.
        units: float. As in `Finding`.
        at: the operation that it is about, if it is another one than that which was observed.
        where: str. What it is about, if that is no layer.
    """

    hazard: str
    why: str
    cure: str
    units: float | None = None
    at: tf.Operation | None = None
    where: str | None = None


class Observed:
    """Something in a step that may be a hazard, with the numbers that tell.

    Args:
        at: an operation, or words for what it is about.
        **numbers: tensors of the graph, which are computed together with the step; or what is
            known already.
    """

    def __init__(self, at: tf.Operation | str, **numbers: Any) -> None:
        self.at, self.numbers = at, numbers


class Hazard(NamedTuple):
    """A known hazard of 16 bits.

    Attributes:
        measure: called with the `TracedStep`; yields what is `Observed`.
        judge: called with the numbers of one, by name, each a number, a str or an array; returns
            what is `Said`, or None. It needs neither a model nor a graph.
    """

    measure: Callable[[TracedStep], Iterator[Observed]]
    judge: Callable[..., Said | None]
