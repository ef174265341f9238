"""Computes a tensor again in float32, from 16-bit activations.

A loss that a layer adds has 8 or 11 bits if the layer computes it in 16 bits, and what `fit` prints
and callbacks compare has no more. Between activations and a loss there are many roundings but
little work, so these steps are made again in float32. Activations are what layers are called with
and return, and the results of operations that are not in the table below, such as products.

A tensor in a graph knows the operation that made it. An eager tensor gets a note of its operation,
if that is in the table and a layer is called in reach. Since a note keeps what the tensor was
computed from, and a tape may keep the tensor, all notes are gone when the layer returns.

This module needs TensorFlow only.
"""

import collections
import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.hooks import reach
from keras_mp.support import marks, op_table
from keras_mp.support.dtypes import LOW_PRECISION
from keras_mp.tensorflow_api import gradients

# Operations whose inputs decide their results, and that take about as long in either dtype.
OPS = (
    op_table.ops(
        *("sums over axes", "running sums", "sums of tensors", "norms", "products over axes"),
        *("maxima over axes", "additions", "multiplications", "squared differences", "squares"),
        *("powers", "divisions", "divisions without NaN", "reciprocals", "roots", "exponentials"),
        *("logarithms", "maxima of two", "selections", "signs", "relu", "leaky relu", "softsign"),
        *("sigmoids", "exponential units", "softplus", "softmax", "log softmax", "cross entropies"),
        *("casts", "identities", "identities without a gradient", "identities that check"),
        *("reshapes", "views", "moves"),
    )
    | {"Acos", "Acosh", "Asin", "Asinh", "Atan", "Atan2", "Atanh", "Cos", "Cosh", "Digamma"}
    | {
        *("Erfinv", "Lgamma", "Ndtri", "Sin", "Sinh", "Tan", "Xlog1py", "Xlogy"),
    }
)
# Further operations that are noted, for the outputs of models (`op_autocast/exact_outputs.py`).
PRODUCTS = op_table.ops("matrix products", "convolutions", "transposed convolutions")
NOTED = OPS | PRODUCTS
# Longer chains begin with an activation.
_DEPTH = 100
# The number of layers whose notes outlive them. More would keep more activations.
_LAYERS = 32
# Names that functions have for what operations call otherwise.
_NAMES_OF_ATTRIBUTES = {"axis": "squeeze_dims"}
_NAMES_OF_ARGUMENTS: dict[Any, Any] = {name: each for each, name in _NAMES_OF_ATTRIBUTES.items()}
_ERRORS = (TypeError, ValueError, tf.errors.InvalidArgumentError, tf.errors.NotFoundError)


class _Made(NamedTuple):
    """How an eager tensor was made.

    Attributes:
        op: str. The operation.
        args: its inputs, then names and values of attributes in turn.
        position: int. Which of its results the tensor is; None for its only one.
        is_decided: bool. Whether the operation stands in the place of a kernel in 16 bits.
    """

    op: str
    args: tuple[Any, ...]
    position: int | None
    is_decided: bool


class Made(NamedTuple):
    """How a tensor was made, in eager or in a graph.

    Attributes:
        op: str. The operation.
        inputs: its inputs; a list is one.
        attributes: dict of its attributes.
        position: int. Which of its results the tensor is; None for its only one.
        key: int that tells the operation's calls apart.
        is_decided: bool. Whether the operation stands in the place of a kernel in 16 bits.
    """

    op: str
    inputs: list[Any]
    attributes: dict[str, Any]
    position: int | None
    key: int
    is_decided: bool

    def again(self, inputs: Sequence[Any]) -> Any:
        """Calls the operation once more, with other inputs.

        Returns:
            All of its results.
        """
        arguments = {**dict(zip(_arguments(self.op), inputs)), **self.attributes}
        return getattr(tf.raw_ops, self.op)(**arguments)

    def result_among(self, results: Any) -> Any:
        """Returns that one of an operation's results that the tensor is."""
        return results if self.position is None else results[self.position]


_References = list["weakref.ref[Any]"]


class _Notes(threading.local):
    """The tensors with notes in this thread.

    Attributes:
        tensors: those of the layer that is being called; None where none is.
        ended: those of the last layers that have returned; None where these are forgotten.
    """

    tensors: _References | None = None
    ended: "collections.deque[_References] | None" = None


# Functions that run for each operation read it directly.
notes = _Notes()


class noted:
    """A context manager for the call of a layer, whose notes are gone at the end."""

    # A generator would take several times as long, and every call of a layer enters one.
    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, notes.tensors = notes.tensors, []

    def __exit__(self, *error: object) -> None:
        ended, notes.tensors = notes.tensors or [], self._before
        if notes.ended is None:
            _forget(ended)
            return
        notes.ended.append(ended)
        if len(notes.ended) > _LAYERS:
            _forget(notes.ended.popleft())


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Context manager in which the notes of the last layers outlive these layers."""
    if notes.ended is not None:
        yield
        return
    with noted():
        notes.ended = collections.deque()
        try:
            yield
        finally:
            for each in notes.ended:
                _forget(each)
            notes.ended = None


def _forget(references: _References) -> None:
    for reference in references:
        tensor = reference()
        if tensor is not None:
            vars(tensor).pop("_keras_mp_made_by", None)


def with_tensors(op: str, args: tuple[Any, ...]) -> list[Any]:
    """Returns an operation's arguments, with tensors for Keras's variables and shapes.

    With variables or shapes, an operation takes its slower way in eager, on which it gets no note.

    Args:
        op: str. The operation.
        args: its inputs, then names and values of attributes in turn.
    """
    number = _number_of_inputs(op, args)
    return [*map(_as_tensor, args[:number]), *args[number:]]


def _as_tensor(value: Any) -> Any:
    if isinstance(value, tf.Tensor):
        return value
    if isinstance(value, list | tuple):
        is_shape = all(type(each) is int for each in value)
        return tf.constant(value, tf.int32) if is_shape else value
    return tf.convert_to_tensor(value) if hasattr(value, "__tf_tensor__") else value


def _number_of_inputs(op: str, args: tuple[Any, ...]) -> int:
    # Each attribute has its name in front.
    return 2 * len(_arguments(op)) - len(args)


def note(results: Any, op: str, args: tuple[Any, ...]) -> None:
    """Notes how eager tensors were made, in a layer's call.

    Args:
        results: what an operation of `OPS` has returned.
        op: str. The operation.
        args: its inputs, then names and values of attributes in turn.
    """
    is_decided = reach.thread.is_decided
    if isinstance(results, list):
        for position, result in enumerate(results):
            _note(result, _Made(op, args, position, is_decided))
    else:
        _note(results, _Made(op, args, None, is_decided))


def _note(result: Any, made: _Made) -> None:
    result._keras_mp_made_by = made
    if notes.tensors is not None:
        notes.tensors.append(weakref.ref(result))


def note_number(number: float, result: tf.Tensor) -> None:
    """Notes the number from which a 16-bit tensor was made.

    16 bits may round it.

    Args:
        number: float.
        result: tensor.
    """
    result._keras_mp_number = number  # pyright: ignore[reportAttributeAccessIssue]


def mark_activations(outputs: Any) -> None:
    """Marks tensors as activations, from which losses are computed again.

    Args:
        outputs: structure of what a layer returns.
    """
    flat = [outputs] if isinstance(outputs, tf.Tensor) else tf.nest.flatten(outputs)
    for each in flat:
        if isinstance(each, tf.Tensor):
            each._keras_mp_is_activation = True  # pyright: ignore[reportAttributeAccessIssue]


def end_at(results: Any) -> None:
    """Forgets how tensors were made, if a function has its own gradient.

    Args:
        results: structure of the results of such a function.
    """
    flat = [results] if isinstance(results, tf.Tensor) else tf.nest.flatten(results)
    for each in flat:
        if isinstance(each, tf.Tensor):
            vars(each).pop("_keras_mp_made_by", None)
            each._keras_mp_has_own_gradient = True  # pyright: ignore[reportAttributeAccessIssue]


def was_made_in_reach(value: Any) -> bool:
    """Whether a value is a tensor made by an operation in reach, as far as known."""
    if not isinstance(value, tf.Tensor):
        return False
    if tf.is_symbolic_tensor(value):
        return hasattr(value.op, "_keras_mp_made_in")
    return hasattr(value, "_keras_mp_made_by")


def compute(tensor: Any) -> Any:
    """Returns a tensor in float32, computed again from activations.

    Args:
        tensor: a floating-point tensor. Anything else is returned as it is, and so is a tensor that
            was not computed from 16 bits.
    """
    if not isinstance(tensor, tf.Tensor) or tensor.dtype not in (*LOW_PRECISION, tf.float32):
        return tensor
    try:
        result = _Computation().of(tensor, 0)
    except _ERRORS:  # of an operation with values that only 16 bits fit
        return tf.cast(tensor, tf.float32)
    is_eager = not tf.is_symbolic_tensor(tensor)
    if is_eager and gradients.should_record([tensor]) != gradients.should_record([result]):
        return tf.cast(tensor, tf.float32)  # No tape was to know of it.
    return result


class _Computation:
    """Tensors in float32, by the ids of the tensors that they stand for."""

    def __init__(self) -> None:
        self._results: dict[int, Any] = {}
        # The results of operations, of which some have several.
        self._calls: dict[int, Any] = {}
        # An id is that of one object as long as this lives.
        self._kept: list[Any] = []

    def of(self, value: Any, depth: int) -> Any:
        """Returns an input of an operation as it is in float32, or unchanged."""
        if isinstance(value, list | tuple):
            return [self.of(each, depth) for each in value]
        if not isinstance(value, tf.Tensor):
            # A variable reads itself in 16 bits.
            is_variable = isinstance(value, tf.Variable) or hasattr(value, "__tf_tensor__")
            return self.of(tf.convert_to_tensor(value), depth) if is_variable else value
        if value.dtype not in LOW_PRECISION and value.dtype != tf.float32:
            return value
        if id(value) not in self._results:
            self._results[id(value)] = self._compute(value, depth)
            self._kept.append(value)
        return self._results[id(value)]

    def _compute(self, tensor: Any, depth: int) -> Any:
        number: float | None = getattr(tensor, "_keras_mp_number", None)
        if number is not None:
            return tf.constant(number, tf.float32, tensor.shape)
        notes_that_end = ("_keras_mp_unrounded", "_keras_mp_is_activation")
        if depth < _DEPTH and not any(hasattr(tensor, each) for each in notes_that_end):
            made = how_made(tensor)
            if made is not None and made.op in OPS:
                return marks.copy(tensor, self._call(made, tensor, depth + 1))
        return marks.cast(tensor, tf.float32)

    def _call(self, made: Made, tensor: tf.Tensor, depth: int) -> Any:
        """Calls the operation that made a tensor once more, with float32 inputs."""
        inputs = [self.of(each, depth) for each in made.inputs]
        flat = zip(tf.nest.flatten(inputs), tf.nest.flatten(made.inputs))
        if tensor.dtype == tf.float32 and all(new is old for new, old in flat):
            return tensor
        if made.op == "Cast":
            return tf.cast(inputs[0], tf.float32)
        if made.key not in self._calls:
            self._calls[made.key] = made.again(inputs)
        return made.result_among(self._calls[made.key])


def how_made(tensor: Any) -> Made | None:
    """Returns how a tensor was made in reach.

    None stands for a way that is not known, or of no use here.
    """
    if not isinstance(tensor, tf.Tensor) or hasattr(tensor, "_keras_mp_has_own_gradient"):
        return None
    return _made_in_graph(tensor) if tf.is_symbolic_tensor(tensor) else _made_in_eager(tensor)


def _made_in_eager(tensor: Any) -> Made | None:
    made: _Made | None = getattr(tensor, "_keras_mp_made_by", None)
    if made is None:
        return None
    number = _number_of_inputs(made.op, made.args)
    attributes: dict[str, Any] = {}
    for name, value in zip(made.args[number::2], made.args[number + 1 :: 2]):
        attributes[_NAMES_OF_ARGUMENTS.get(name, name)] = value
    inputs = list(made.args[:number])
    return Made(made.op, inputs, attributes, made.position, id(made.args), made.is_decided)


def _made_in_graph(tensor: Any) -> Made | None:
    op = tensor.op
    is_here = op.graph is tf.compat.v1.get_default_graph() and was_made_in_reach(tensor)
    if op.type not in NOTED or not is_here or "_gradient_op_type" in op.node_def.attr:
        return None
    inputs, remaining = [], iter(op.inputs)
    for argument in op.op_def.input_arg:
        several = argument.number_attr and op.get_attr(argument.number_attr)
        of_argument = [next(remaining) for _ in range(several)] if several else next(remaining)
        inputs.append(of_argument)
    names = {each.name for each in op.op_def.attr}
    attributes: dict[str, Any] = {}
    for name in _arguments(op.type)[len(inputs) :]:
        attributes[name] = op.get_attr(name if name in names else _NAMES_OF_ATTRIBUTES[name])
    position = tensor.value_index if len(op.outputs) > 1 else None
    is_decided = hasattr(op, "_keras_mp_is_decided")
    return Made(op.type, inputs, attributes, position, id(op), is_decided)


@functools.cache
def _arguments(op: str) -> tuple[str, ...]:
    """Returns the names of an operation's inputs, and then those of its attributes."""
    names = inspect.signature(getattr(tf.raw_ops, op)).parameters
    return tuple(name for name in names if name != "name")
