"""The two faces of a 16-bit tensor.

In code in reach, a 16-bit tensor has two faces: the 16-bit one, which the program sees and products
take, and the float32 one that it was rounded from, which whatever must be exact takes
(`kernels/door.py`). A tensor has a note of its float32 face. In a graph, that is the input of the
cast that made the tensor; in eager, the note keeps it.

A face is *exact* if what it was rounded from was meant so: results of operations that compute in
float32, inputs that a layer casts, whole numbers, and constants that 16 bits do not hold. What
meets it is computed in float32. Other faces are weak: they are taken where an exact operation, or
another face, asks for them. Weights are exact among themselves.

This module needs TensorFlow only.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.hooks import reach
from keras_mp.support import marks
from keras_mp.support.attributes import replaced
from keras_mp.support.dtypes import is_low
from keras_mp.tensorflow_api import gradients

# The kinds of faces; a larger one decides. `LEFT` says only that the tensor was made in reach.
# `MADE` is computed again if an exact operation takes it; `CAST` is what a cast of the program has
# rounded.
# `LAST` is exact, and made by a layer that makes outputs of a model.
LEFT, MADE, CAST, WEIGHT, EXACT, LAST = 0, 1, 2, 3, 4, 5
# Notes of float32 tensors, which models return in the place of 16-bit ones: casts of these, or
# computed a second time.
OUTPUT, AGAIN = 6, 7
# Those of float32 tensors in a region of `autocast`, which are casts of 16-bit ones; those of
# `BOUNDED` are at most 1.
LOW, BOUNDED = 8, 9
# What a face is made of at the most, and what operations count. In eager they keep their inputs
# alive.
_DEPTH, _OF_MOVE, _OF_ARITHMETIC = 32, 1, 4
NOTE = "_keras_mp_face"
# How far a constant in 16 bits may be from the number, as a part of it. Constants that lose more
# keep a face that is exact.
_ROUNDS_BY = 2.0**-8


class Face(NamedTuple):
    """A note on a tensor.

    Attributes:
        tensor: the float32 tensor that a 16-bit one was rounded from; a number or an array in place
            of a constant; a `Lazy`, which makes the tensor. On a float32 tensor that is read from a
            weight, and on a tensor that has left the reach without a face, None; on an output of
            a model, and on a result in a region, the 16-bit tensor that was cast.
        kind: int. `LEFT`, `MADE`, `CAST`, `WEIGHT`, `EXACT`, `LAST`, `OUTPUT`, `AGAIN`, `LOW` or
            `BOUNDED`.
    """

    tensor: Any
    kind: int


def made_by(make: Callable[[Any], Any] | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which something else may make a face.

    Args:
        make: takes a 16-bit tensor without an exact face, and returns a float32 one or None. None
            is nothing else.
    """
    return replaced(reach.thread, "make", make)


class Lazy:
    """A face that is made when it is taken.

    Tapes that know the 16-bit tensor hear of it then. Other tapes do not, though they may know what
    the tensor was made of: for them it is a constant.

    Attributes:
        made: the float32 tensor, once it has been made.
        depth: int. What the operations that it is made of count.

    Args:
        op: str. The operation that made the 16-bit tensor.
        inputs: its inputs.
        pairs: names and values of its attributes in turn.
        position: int. Which of its results the tensor is; None for its only one.
        depth: int.
    """

    __slots__ = (
        *("_inputs", "_is_recorded", "_op", "_pairs", "_position", "_watches"),
        *("depth", "made"),
    )

    def __init__(
        self, op: str, inputs: Sequence[Any], pairs: Sequence[Any], position: int | None, depth: int
    ) -> None:
        self._op, self._inputs, self._pairs = op, inputs, pairs
        self._position, self.made, self.depth = position, None, depth
        self._is_recorded, self._watches = False, reach.thread.watches

    def make(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the face; None where it cannot be that of all tapes.

        Args:
            tensor: the 16-bit tensor.
        """
        is_recorded = gradients.possible_types([tensor]) > 0
        is_made = self.made is not None and _is_in_this_graph(self.made)
        if not is_made or (is_recorded and not self._is_recorded):
            if is_recorded and self._watches != reach.thread.watches:
                return None  # A tape may be new, and know an input only.
            stopped = contextlib.nullcontext() if is_recorded else gradients.stop_recording()
            with stopped:
                wide = [widened(each) for each in self._inputs]
                with reach.decided():
                    results = run(self._op, wide, self._pairs)
            self.made = results if self._position is None else results[self._position]
            self._is_recorded = is_recorded
        return self.made


def _is_in_this_graph(tensor: Any) -> bool:
    if not tf.is_symbolic_tensor(tensor):
        return True
    return not tf.executing_eagerly() and tensor.graph is tf.compat.v1.get_default_graph()


@functools.cache
def _parameters(op: str) -> tuple[str, ...]:
    """Returns the names of an operation's inputs, and then those of its attributes."""
    return tuple(inspect.signature(getattr(tf.raw_ops, op)).parameters)


def run(op: str, inputs: Sequence[Any], pairs: Sequence[Any]) -> Any:
    """Runs an operation by its public function.

    Args:
        op: str. The operation.
        inputs: its inputs.
        pairs: names and values of its attributes in turn.
    """
    return getattr(tf.raw_ops, op)(**arguments(op, inputs, pairs))


def arguments(op: str, inputs: Sequence[Any], pairs: Sequence[Any]) -> dict[str, Any]:
    """Returns the arguments of an operation's public function by name.

    Args:
        op: str. The operation.
        inputs: its inputs.
        pairs: names and values of its attributes in turn, as generated code has them.
    """
    names, found = _parameters(op), dict(zip(pairs[::2], pairs[1::2]))
    if "squeeze_dims" in found:
        found["axis"] = found["squeeze_dims"]
    return {each: found[each] for each in names if each in found} | dict(zip(names, inputs))


def of(value: Any) -> Face | None:
    """Returns the note of a tensor, or None."""
    return value.__dict__.get(NOTE)


def note(result: Any, tensor: Any, kind: int) -> None:
    """Notes a face on a tensor.

    Args:
        result: tensor.
        tensor: as in `Face`.
        kind: int, as in `Face`.
    """
    result._keras_mp_face = Face(tensor, kind)


def is_low_tensor(value: Any) -> bool:
    """Whether a value is a 16-bit tensor, which may have a face."""
    return isinstance(value, tf.Tensor) and is_low(value.dtype)


def kind_of(value: Any) -> int:
    """Returns the kind of a tensor's face, or 0 without one."""
    face = of(value)
    return 0 if face is None else face.kind


def is_weight(value: Any, views: Container[str], reads: Container[str]) -> bool:
    """Whether a tensor is the value of a weight, or a view of it.

    In eager, a note tells.

    Args:
        value: tensor.
        views: types of operations whose result counts as a weight if their input does.
        reads: types of operations that read weights.
    """
    if not tf.is_symbolic_tensor(value):
        return kind_of(value) == WEIGHT
    op = value.op
    while op.type in views:
        op = op.inputs[0].op
    return op.type in reads


def is_exact(value: Any) -> bool:
    """Whether a tensor has a face that is exact."""
    return kind_of(value) in (EXACT, LAST)


def drop(value: Any) -> None:
    """Forgets the face of a tensor, as if the program had made it in 16 bits.

    In a region, operations take the float32 tensor itself, so its note stays.
    """
    if isinstance(value, tf.Tensor) and of(value) is not None and kind_of(value) < LOW:
        note(value, None, LEFT)


def lazily(
    op: str, args: Sequence[Any], pairs: Sequence[Any], results: Any, kind: int, is_move: bool
) -> None:
    """Notes faces on the results of an operation that are made when they are taken.

    Args:
        op: str. The operation.
        args: its inputs.
        pairs: names and values of its attributes in turn.
        results: its result, or a list of them.
        kind: int, as in `Face`.
        is_move: bool. Whether the operation moves numbers and changes none.
    """
    depth = 0
    for value in args:
        for each in value if isinstance(value, list | tuple) else (value,):
            face = of(each) if isinstance(each, tf.Tensor) else None
            if face is not None and type(face.tensor) is Lazy:
                depth = max(depth, face.tensor.depth)
    depth += _OF_MOVE if is_move else _OF_ARITHMETIC
    if depth > _DEPTH:
        return
    is_list = isinstance(results, list | tuple)
    for i, result in enumerate(results if is_list else (results,)):
        if is_low_tensor(result):
            note(result, Lazy(op, args, pairs, i if is_list else None, depth), kind)


def float32_of(value: Any) -> tf.Tensor | None:
    """Returns the float32 face of a 16-bit tensor, or None."""
    tensor = _float32_of(value)
    if tensor is not None and tf.is_symbolic_tensor(tensor):
        tensor.set_shape(value.shape)  # The program may know more of it by now.
    return tensor


def _float32_of(value: Any) -> tf.Tensor | None:
    face = value.__dict__.get(NOTE)
    make = reach.thread.make
    if make is not None and (face is None or face.kind <= MADE):
        made = make(value)
        if made is not None:
            return made
    if face is None or face.kind >= OUTPUT:
        return None
    if type(face.tensor) is Lazy:
        return face.tensor.make(value)
    if type(face.tensor) in (float, np.ndarray):
        return tf.constant(face.tensor, tf.float32)
    return face.tensor


def widened(value: Any) -> Any:
    """Returns the float32 face of a 16-bit tensor, or a cast of it.

    Args:
        value: tensor, or a list of them. Anything else is returned as it is.
    """
    return _in_float32(value, float32_of)


def factor(value: Any) -> Any:
    """Returns a factor of an exact product: the face of a weight, or a cast.

    Args:
        value: tensor, or a list of them. Anything else is returned as it is.
    """
    return _in_float32(
        value, lambda each: float32_of(each) if kind_of(each) in (WEIGHT, LAST) else None
    )


def cast(value: Any) -> Any:
    """Returns a 16-bit tensor, or a list of them, in float32, as it was rounded."""
    return _in_float32(value, lambda _: None)


def _in_float32(value: Any, face_of: Callable[[Any], tf.Tensor | None]) -> Any:
    """Returns a face of each 16-bit tensor, or a cast where there is none."""
    if isinstance(value, list | tuple):
        return [_in_float32(each, face_of) for each in value]
    if not is_low_tensor(value):
        return value
    face = face_of(value)
    if face is not None:
        return face
    with reach.decided():
        return tf.raw_ops.Cast(x=value, DstT=tf.float32)  # `tf.cast` takes twice as long.


def rounded(value: Any, dtype: tf.DType, kind: int) -> Any:
    """Rounds a float32 tensor to 16 bits, which keeps it as its face.

    Args:
        value: float32 tensor. Anything else is returned as it is.
        dtype: DType of 16 bits.
        kind: int, as in `Face`; 0 keeps no face.
    """
    if not isinstance(value, tf.Tensor) or value.dtype != tf.float32:
        return value
    with reach.decided():
        result = tf.cast(value, dtype)
    if kind:
        note(result, value, kind)
    return result


def of_its_own(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor for a face, whose gradient has no other uses of `value`."""
    if tf.executing_eagerly() and not gradients.could_record():
        return value
    with reach.decided():
        return tf.raw_ops.Identity(input=value)


def cast_input(value: Any, result: Any) -> Any:
    """Returns what a layer or a model of keras_mp takes in the place of an input.

    Args:
        value: the input.
        result: what it was cast to.

    Returns:
        A tensor equal to `result`, with a face if it is a 16-bit tensor, and the input was a
        float32 or float64 one.
    """
    if value is result or not is_low_tensor(result):
        return result
    if not isinstance(value, tf.Tensor | np.ndarray) or value.dtype not in (tf.float32, tf.float64):
        return result
    with reach.decided():
        own = of_its_own(tf.cast(value, tf.float32))
        if own is not value:
            # A 16-bit tensor is a cast of its face.
            result = marks.copy(result, tf.cast(own, result.dtype))
    note(result, own, EXACT)
    return result


def note_cast(value: tf.Tensor, result: tf.Tensor, is_weight: bool) -> None:
    """Notes on the result of a cast that the program has written what was cast.

    Args:
        value: tensor of another dtype than 16 bits.
        result: the 16-bit tensor.
        is_weight: bool. Whether `value` was read from a weight.
    """
    if is_weight:
        note(result, value, WEIGHT)
    elif value.dtype == tf.float32:
        number = _number(value)
        is_number_held = number is None or is_held(number, result.dtype)
        note(result, value, CAST if is_number_held else EXACT)
    elif value.dtype in _WHOLE_NUMBERS:
        with reach.decided():
            note(result, tf.cast(value, tf.float32), EXACT)
    elif value.dtype == tf.float64:
        with reach.decided():
            note(result, tf.cast(value, tf.float32), CAST)


# Those that 16 bits may not hold.
_WHOLE_NUMBERS = (tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64, tf.uint64)
# The largest number of values in a constant of a graph that are looked at.
_LARGEST_CONSTANT = 2**20


def _number(value: tf.Tensor) -> Any:
    """Returns the value of a float32 tensor that is or may be a constant, or None."""
    if tf.is_symbolic_tensor(value):
        return tf.get_static_value(value) if value.op.type == "Const" else None
    if tf.executing_eagerly():
        # It does not tell how it was made. Reading a number from a GPU would wait for the GPU.
        is_cheap = value.shape.rank == 0 and "CPU" in value.device
    else:
        is_cheap = value.shape.num_elements() <= _LARGEST_CONSTANT
    return value.numpy() if is_cheap else None


def is_held(value: Any, dtype: tf.DType) -> bool:
    """Whether a constant in 16 bits is about the number that the program wrote.

    Args:
        value: a number, or an array of them.
        dtype: DType of 16 bits.
    """
    if type(value) is float or type(value) is int:
        size = abs(value)
        if dtype is tf.bfloat16:
            return not _LARGEST_BFLOAT16 < size <= _MAX
        return size == 0 or _SMALLEST_FLOAT16 <= size <= _LARGEST_FLOAT16 or not size <= _MAX
    wide = np.asarray(value)
    # Positions and counts are meant as they are.
    rounds_by = 0.0 if wide.dtype.kind in "iu" and wide.ndim else _ROUNDS_BY
    wide = wide.astype(np.float64)
    with np.errstate(all="ignore"):
        low = wide.astype(dtype.as_numpy_dtype).astype(np.float64)
        lost = np.abs(low - wide) > rounds_by * np.abs(wide)
    return not np.any(lost & (np.abs(wide) <= _MAX))


_MAX = float(tf.float32.max)
_LARGEST_BFLOAT16, _LARGEST_FLOAT16 = float(tf.bfloat16.max), float(tf.float16.max)
# From here on, float16 has 7 digits or more.
_SMALLEST_FLOAT16 = 2.0**-18


def constant(
    make: Callable[..., Any], value: Any, low: tf.DType, keeps_scalars: bool = True
) -> Any:
    """Makes a constant in 16 bits, which keeps the number that the program wrote.

    Args:
        make: takes a value and a dtype, and returns a tensor.
        value: a number, or a list or array of numbers and tensors.
        low: DType of 16 bits.
        keeps_scalars: bool. Whether those of NumPy are kept, too, that the program has not cast.
    """
    try:
        is_lossy = not is_held(value, low)
    except (TypeError, ValueError, NotImplementedError):  # There are tensors in it.
        return make(value, low)
    if not is_lossy:
        result, is_number = make(value, low), type(value) in (float, int)
        # A list may have tensors in it, whose gradients would be lost.
        is_wide = _is_list_of_numbers(value) or (
            isinstance(value, np.ndarray | np.generic if keeps_scalars else np.ndarray)
            and value.dtype in (np.float32, np.float64)
        )
        if isinstance(result, tf.Tensor) and (is_number or is_wide):
            wide = float(value) if is_number else np.array(value, np.float32)  # It may change.
            if result.shape == np.shape(wide):
                note(result, wide, WEIGHT)
        return result
    with reach.decided():
        face = make(value, tf.float32)
        result = tf.cast(face, low)
    note(result, face, EXACT)
    return result


def _is_list_of_numbers(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return False
    return all(type(each) in (float, int) for each in tf.nest.flatten(value))


def without_face(values: Any) -> None:
    """Forgets the faces of all tensors in a structure."""
    flat = [values] if isinstance(values, tf.Tensor) else tf.nest.flatten(values)
    for each in flat:
        drop(each)


# Tensors out of reach.


def leave(outputs: Any, inputs: Any) -> None:
    """Notes on 16-bit tensors that leave the reach in eager.

    The notes say that they were made in it. In a graph their operations have marks
    (`kernels/backward.py`).

    Args:
        outputs: structure of tensors.
        inputs: those from which they were made, which may be among them.
    """
    flat = [outputs] if isinstance(outputs, tf.Tensor) else _flat(outputs)
    low = [each for each in flat if is_low_tensor(each)]
    if not low:
        return
    given = set(map(id, _flat(inputs)))
    for each in low:
        if of(each) is None and id(each) not in given:
            note(each, None, LEFT)
    reach.thread.has_left = True


def follow(inputs: Sequence[Any], outputs: Any) -> None:
    """Notes on the results of an operation what its inputs have said.

    Out of reach, a result was made of a tensor that was made in reach. Float32 results are
    followed, too: functions of TensorFlow compute in float32 what they return in 16 bits.

    Args:
        inputs: the arguments of the operation.
        outputs: its result, or a list of them.
    """
    flat = outputs if isinstance(outputs, list | tuple) else (outputs,)
    followed = [each for each in flat if isinstance(each, tf.Tensor) and _is_followed(each.dtype)]
    if followed and any(_has_left(each) for each in _flat(inputs)):
        for each in followed:
            note(each, None, LEFT)


def _is_followed(dtype: tf.DType) -> bool:
    return is_low(dtype) or dtype is tf.float32


def _has_left(value: Any) -> bool:
    """Whether a tensor, or what it was made of, is of 16 bits and made in reach."""
    face = of(value) if isinstance(value, tf.Tensor) else None
    return face is not None and (face.kind == LEFT or is_low(value.dtype))


def reach_of(op: Any) -> tf.DType | None:
    """Returns the 16-bit dtype that was in reach when an operation was made, or None."""
    return getattr(op, "_keras_mp_made", None)


def was_made_in_reach(tensor: tf.Tensor) -> bool:
    """Whether a 16-bit tensor comes from one that was made in reach.

    Args:
        tensor: tensor of eager code, or of a graph.
    """
    seen: set[int] = set()
    waiting = [tensor]
    while waiting:
        each: Any = waiting.pop()
        if _has_left(each):
            return True
        if not tf.is_symbolic_tensor(each) or id(each) in seen:
            continue
        seen.add(id(each))
        if reach_of(each.op) is not None:
            if is_low(each.dtype):
                return True
            continue
        captured = getattr(each.graph, "captures", ()) if each.op.type == "Placeholder" else ()
        before = [*each.op.inputs, *(outer for outer, inner in captured if inner is each)]
        waiting += [value for value in before if _is_followed(value.dtype)]
    return False


def _flat(values: Any) -> list[Any]:
    return tf.nest.flatten(values, expand_composites=True)
