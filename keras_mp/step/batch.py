"""The batch of a training step, and what a skipped step looks at in it.

This module needs TensorFlow only.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf


class Input(NamedTuple):
    """What a model is given in a step, and what a skipped step looks at.

    Attributes:
        name: str.
        value: floating-point tensor.
        limit: float. The smallest value that is infinite in the dtype in which the model computes.
    """

    name: str
    value: tf.Tensor
    limit: float


class Batch(NamedTuple):
    """The batch of a step, as far as it is known.

    Attributes:
        inputs: list of the inputs that a skipped step looks at.
        examples: a tensor of as many rows as there are examples, or None.
    """

    inputs: list[Input]
    examples: tf.Tensor | None = None

    def has_examples(self) -> tf.Tensor | None:
        """Returns whether there are examples; None if that is certain, or not known."""
        if self.examples is None:
            return None
        size = self.examples.shape[0]
        if size is not None:
            return None if size else tf.constant(False)
        return tf.shape(self.examples)[0] > 0


def batch_of(given: Iterable[tuple[str, Any, tf.DType]]) -> Batch:
    """Makes a batch of names, structures of tensors, and the dtypes of the model."""
    named = [(n, v, dtype) for name, each, dtype in given for n, v in _named(name, each)]
    inputs = [
        Input(name, value, _limit(dtype)) for name, value, dtype in named if value.dtype.is_floating
    ]
    return Batch(inputs, next((value for _, value, _ in named if value.shape.rank), None))


def _named(name: str, structure: Any) -> Iterator[tuple[str, tf.Tensor]]:
    """Yields the tensors of a structure with their names."""
    if isinstance(structure, dict):
        for key, value in structure.items():
            yield from _named(f"{name}[{key!r}]", value)
    elif isinstance(structure, (list, tuple)):
        for i, value in enumerate(structure):
            yield from _named(f"{name}[{i}]", value)
    elif isinstance(structure, tf.Tensor):
        yield name, structure


def _limit(dtype: tf.DType) -> float:
    # Halfway from the largest float16 to the next power of two, from where on rounding gives
    # infinity.
    return 65520.0 if dtype == tf.float16 else float("inf")
