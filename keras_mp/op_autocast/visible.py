"""The two faces of a tensor: 16-bit for the operations of a region, float32 for everybody else.

What a 16-bit operation computed is cast to float32, and that is what user code sees: the *visible*
tensor. It remembers its 16-bit *origin*. The next operation gets a cast of the visible tensor, so
that the visible tensor stays a node of what is differentiated, and gradients with respect to it are
right. In eager that cast shares the memory of the origin. In a graph it is a cast, which
`cast_pairs` takes out.

This module needs TensorFlow only.
"""

import weakref
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import record as _record

from keras_mp.support import host
from keras_mp.support.dtypes import LOW_PRECISION
from keras_mp.variables import casts

_FLOATS = (tf.float32, *LOW_PRECISION)
# What casts are called, in graphs and on tapes.
NAME = "autocast"


class Origin(NamedTuple):
    """What is known of a float32 tensor.

    Attributes:
        narrow: 16-bit tensor that has the same value, or None.
        is_bounded: bool. Is the value at most 1?
        is_weight: bool. Is it the value of a variable?
    """

    narrow: tf.Tensor | None = None
    is_bounded: bool = False
    is_weight: bool = False


_UNKNOWN = Origin()


def origin(tensor: Any) -> Origin:
    """Returns what is known of a tensor."""
    return getattr(tensor, "_keras_mp_origin", _UNKNOWN)


def mark(tensor: tf.Tensor, known: Origin) -> None:
    """Notes what is known of a tensor."""
    tensor._keras_mp_origin = known


def narrow_of(tensor: Any, dtype: tf.DType) -> tf.Tensor | None:
    """Returns the 16-bit tensor that a visible one was made of, where it is of that dtype.

    Args:
        tensor: any tensor.
        dtype: DType.

    Returns:
        The tensor, or None; of a tensor of another graph always None.
    """
    narrow = origin(tensor).narrow
    if narrow is None or narrow.dtype != dtype:
        return None
    graph = host.current_graph()
    return narrow if graph is None or getattr(narrow, "graph", None) is graph else None


def narrowed(tensor: Any, dtype: tf.DType) -> tf.Tensor:
    """Casts what is visible for an operation of a region.

    Args:
        tensor: float32 tensor, or a number.
        dtype: DType.
    """
    if not tf.is_tensor(tensor):
        return tf.constant(tensor, dtype)
    if tensor.dtype == dtype:
        return tensor
    if not tf.executing_eagerly():
        return _narrowed_in_graph(tensor, dtype)
    narrow = narrow_of(tensor, dtype)
    if narrow is not None and not _record.could_possibly_record():
        return narrow
    with _record.stop_recording():
        result = tf.cast(tensor, dtype) if narrow is None else tf.identity(narrow)
    _record_cast(tensor, result)
    return result


def widened(narrow: tf.Tensor) -> tf.Tensor:
    """Casts a result of a 16-bit operation to float32. In a graph tapes are not told of it."""
    with _record.stop_recording():
        visible = tf.cast(narrow, tf.float32, name=NAME)
    if tf.executing_eagerly():
        _record_cast(narrow, visible)
    return visible


def cast(value: Any, dtype: tf.DType) -> Any:
    """Casts a float32 or 16-bit tensor or variable; returns anything else as it is.

    Args:
        value: anything.
        dtype: DType, float32 or of 16 bits.
    """
    if not isinstance(value, tf.Tensor | tf.Variable) or value.dtype not in _FLOATS:
        return value
    if value.dtype == tf.float32 != dtype:
        return narrowed(tf.convert_to_tensor(value), dtype)
    return value if value.dtype == dtype else tf.cast(value, dtype)


def _record_cast(given: tf.Tensor, result: tf.Tensor) -> None:
    """Tells tapes of a cast. Recorded as the operation Cast, tapes would keep `given` alive."""
    dtype = given.dtype
    if _record.could_possibly_record():
        _record.record_operation(
            NAME, [result], [given], lambda gradient: [tf.cast(gradient, dtype)]
        )


# Casts that were made outside of a loop's body for use inside: by graph, their names by the
# float32 tensor's name and dtype. A tensor would keep its graph.
_hoisted: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], str]] = weakref.WeakKeyDictionary()


def _narrowed_in_graph(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    graph = getattr(tensor, "graph", None)
    if not isinstance(graph, tf.Graph) or not casts.is_in_a_loop_of(graph):
        return tf.cast(tensor, dtype, name=NAME)
    # The body would cast it each time it runs. Gradients still are summed in float32.
    made = _hoisted.setdefault(graph, {})
    key = tensor.name, dtype.name
    if key not in made:
        with graph.as_default(), _record.stop_recording():
            made[key] = tf.cast(tensor, dtype, name=NAME).name
    return casts.read_as(tensor, graph.get_tensor_by_name(made[key]))
