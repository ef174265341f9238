"""The batches that tools run models on: as tensors, with errors for those that do not fit."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

# Lines of an error message around the one that says what is wrong.
_AROUND = re.compile(
    r"\s*(File \"|in user code:|Exception encountered|(Call a|A)rguments received|•|Graph execution"
    r"|Detected at|Stack trace|\[\[\{\{node|$)"
)
_COLORS = re.compile(r"\x1b\[\d*m")
_EXPECTED = "Expected a batch as `fit` takes it: x, (x, y) or (x, y, sample_weight)"
_FRAME = re.compile(r"\s*File \"")
_KIND = re.compile(r"^\w+(Error|Exception): ")


# A tensor or array, or a list, tuple or dict of such.
Structure: TypeAlias = tf.Tensor | np.ndarray | Sequence[Any] | Mapping[str, Any] | None

# Several batches, as `listed` knows them.
Batches: TypeAlias = tf.data.Dataset | Iterator[Any] | Sequence[tuple[Structure, ...]]

# One batch, or several.
Given: TypeAlias = Structure | Batches


class Batch(NamedTuple):
    """The data of one step of `fit`.

    Attributes:
        x: tensor, or a structure of tensors.
        y: the same, or None.
        sample_weight: the same, or None.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None

    @property
    def data(self) -> tuple[Structure, ...]:
        """The tuple that `train_step` takes."""
        return self[: 3 if self.sample_weight is not None else 2 if self.y is not None else 1]

    def parts(self) -> list[Any]:
        """Returns its tensors or arrays."""
        return [each for each in tf.nest.flatten(tuple(self)) if each is not None]

    def rows(self, start: int, end: int) -> "Batch":
        """Returns the samples from `start` to `end`."""
        return tf.nest.map_structure(lambda each: None if each is None else each[start:end], self)


def listed(model: tf.keras.Model, batches: Given) -> list[Batch]:
    """Returns the batches that a tool was given, one or several, as `fit` takes them.

    Several batches are a `tf.data.Dataset`, a `Sequence` of Keras (`PyDataset`), a generator or
    another iterator, or a list of tuples: a list of arrays is one batch, with an array for each
    input of the model. Each of them is a tuple `(x, y)` or `(x, y, sample_weight)`, or x alone,
    which is no tuple.

    Args:
        model: a model of `tf.keras`.
        batches: one batch or several.

    Raises:
        TypeError: x is None.
        ValueError: there is no batch, or no end of them, or one does not suit the model.
    """
    given: Any = batches
    if isinstance(given, tf.data.Dataset) and given.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "Expected a dataset that ends: pass dataset.take(4). Received: one without an end"
        )
    if isinstance(given, tf.keras.utils.Sequence):
        given = map(given.__getitem__, range(len(given)))
    is_list = isinstance(given, list) and given and all(isinstance(each, tuple) for each in given)
    if not is_list and not isinstance(given, tf.data.Dataset | Iterator):
        given = [given]
    made = [as_fit_takes_it(model, each) for each in given]
    if not made:
        raise ValueError(f"Expected at least one batch. Received: {batches!r} without any")
    return made


def as_fit_takes_it(model: tf.keras.Model, batch: Given | tuple[Given, ...]) -> Batch:
    """Converts a batch to tensors, in the dtypes that `fit` gives them.

    Args:
        model: a model of `tf.keras`.
        batch: a tuple `(x, y)` or `(x, y, sample_weight)` of arrays, tensors or structures of them;
            or x alone, which is no tuple then.

    Raises:
        TypeError: it is None or a dataset.
        ValueError: the tuple has another length, there is nothing in x, or x is a list with more or
            fewer parts than the model has inputs.
    """
    parts = batch if isinstance(batch, tuple) else (batch,)
    if not 1 <= len(parts) <= 3:
        raise ValueError(f"{_EXPECTED}. Received a tuple of {len(parts)}.")
    x = parts[0]
    if x is None or isinstance(x, tf.data.Dataset):
        raise TypeError(f"{_EXPECTED}; of a dataset, next(iter(dataset)). Received: {type(x)}")
    inputs = getattr(model, "inputs", None)
    if isinstance(x, list) and inputs and len(x) != len(inputs):
        raise ValueError(
            f"A list is x, with one array for each input, of which {model.name!r} has "
            f"{len(inputs)}. Received a list of {len(x)}. For x and y, pass a tuple (x, y)."
        )
    made = Batch(*tf.nest.map_structure(_as_tensor, parts))
    for each in tf.nest.flatten(made.x):
        if each is not None and each.shape.rank and 0 in each.shape.as_list():
            raise ValueError(f"Expected x with values in it. Received: x of the shape {each.shape}")
    return made


@contextlib.contextmanager
def suiting(what: str, batch: Batch) -> Iterator[None]:
    """Tells errors about the shapes of a batch, or labels that it lacks, with its shapes.

    Args:
        what: str. What is run or traced, such as "the training step of 'model'".
        batch: Batch.
    """
    try:
        yield
    except (ValueError, AttributeError, tf.errors.InvalidArgumentError) as error:
        if isinstance(error, AttributeError) and batch.y is not None:
            raise
        received = []
        for name, part in batch._asdict().items():
            if shapes := [str(each.shape) for each in tf.nest.flatten(part) if each is not None]:
                received.append(f"{name} of the shape {' and '.join(shapes)}")
        raise ValueError(
            f"Expected a batch of shapes that suit {what}. Received: {'; '.join(received)}. "
            f"The error is: {reason(error)}"
        ) from error


def reason(error: Exception) -> str:
    """Returns the line of an error message that says what is wrong.

    Args:
        error: of TensorFlow or Keras, as it leaves a `tf.function`, or its call.
    """
    lines = _COLORS.sub("", str(getattr(error, "message", error))).splitlines()
    pairs = zip(["", *lines], lines)
    kept = [e for before, e in pairs if not (_AROUND.match(e) or _FRAME.match(before))]
    return _KIND.sub("", kept[-1].strip()) if kept else str(error)


def _as_tensor(value: Any) -> Any:
    if value is None or tf.is_tensor(value):
        return value
    value = tf.convert_to_tensor(value)
    # As `fit` does with arrays; it takes tensors as they are.
    return tf.cast(value, tf.keras.backend.floatx()) if value.dtype.is_floating else value
