"""What a task of `benchmarks parity` is, and how its batches and its quality are made."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


def as_float32(outputs: Any) -> np.ndarray:
    """Outputs in float32, in which they are judged."""
    return tf.cast(outputs, tf.float32).numpy()


class Task(NamedTuple):
    """Something to learn.

    Attributes:
        make: makes a compiled model under the global policy. For a model with a `train_step`, it
            takes `scaled`, which makes the calls that Keras's guide asks for, and `wrap`, for an
            optimizer that `compile` does not wrap.
        batches: x and y of so many samples, in the order of training, from a random generator.
        quality: of a trained model, on data that it has not seen.
        measure: what that is.
        is_error: whether less is better.
        steps: of training.
        batch: samples of a step.
        records_scale: whether to note each change of the loss scale.
    """

    make: Callable[..., Any]
    batches: Callable[[np.random.Generator, int], tuple[Any, Any]]
    quality: Callable[[Any], float]
    measure: str
    is_error: bool
    steps: int
    batch: int = 32
    records_scale: bool = False


def rows_of_epochs(generator: np.random.Generator, length: int, count: int) -> np.ndarray:
    """Rows of an epoch after the other, each in another order."""
    epochs = [generator.permutation(length) for _ in range(-(-count // length))]
    return np.concatenate(epochs)[:count]


def batches_from(part: tuple[Any, Any]) -> Callable:
    """Batches of a training part."""

    def batches(generator: np.random.Generator, count: int) -> tuple[Any, Any]:
        x, y = part
        rows = rows_of_epochs(generator, len(y), count)
        of_x = {name: a[rows] for name, a in x.items()} if isinstance(x, dict) else x[rows]
        return of_x, y[rows]

    return batches


def accuracy(test: tuple[Any, Any]) -> Callable:
    """The share of a test part that a model tells right, in percent."""

    def quality(model: Any) -> float:
        return 100 * float(np.mean(np.argmax(as_float32(model(test[0])), -1) == test[1]))

    return quality


def root_mean_square(test: tuple[Any, Any]) -> Callable:
    """The error of a model on a test part."""

    def quality(model: Any) -> float:
        return float(np.sqrt(np.mean((as_float32(model(test[0])) - test[1]) ** 2)))

    return quality


def bits(test: tuple[Any, Any]) -> Callable:
    """The cross entropy of a test part, in bits."""

    def quality(model: Any) -> float:
        logits = as_float32(model(test[0]))
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(test[1], logits)
        return float(tf.reduce_mean(entropy) / np.log(2))

    return quality
