"""Casts of a region: 16 bits for operations, float32 for the program.

The result of a 16-bit operation is cast to float32, and the program gets the cast, whose note
(`hooks/faces.py`) has the 16-bit tensor. The next operation gets a cast of the float32 tensor, so
that the latter stays a node of the differentiated graph, and gradients with respect to it are
right. In eager, that cast shares the memory of the 16-bit tensor. In a graph it is a real cast,
which `cast_pairs` takes out.

This module needs TensorFlow only.
"""

import weakref
from typing import Any

import tensorflow as tf

from keras_mp.hooks import faces
from keras_mp.support import host
from keras_mp.support.dtypes import LOW_PRECISION
from keras_mp.tensorflow_api import gradients
from keras_mp.variables import casts

FLOATS = (tf.float32, *LOW_PRECISION)
# The name of casts, in graphs and on tapes.
NAME = "autocast"


def low_precision_of(tensor: object, dtype: tf.DType) -> tf.Tensor | None:
    """Returns the 16-bit tensor from which a float32 one was cast in a region.

    It must have the given dtype.

    Args:
        tensor: any tensor, or a number.
        dtype: DType.

    Returns:
        The tensor; None also for a tensor of another graph.
    """
    face = faces.of(tensor) if isinstance(tensor, tf.Tensor) else None
    if face is None or face.kind < faces.LOW or face.tensor.dtype != dtype:
        return None
    graph = host.current_graph()
    is_here = graph is None or getattr(face.tensor, "graph", None) is graph
    return face.tensor if is_here else None


def to_low_precision(tensor: tf.Tensor | float, dtype: tf.DType) -> tf.Tensor:
    """Casts a float32 tensor for an operation of a region.

    Args:
        tensor: float32 tensor, or a number.
        dtype: DType.
    """
    if not isinstance(tensor, tf.Tensor):
        return tf.constant(tensor, dtype)
    if tensor.dtype == dtype:
        return tensor
    if not tf.executing_eagerly():
        return _cast_in_graph(tensor, dtype)
    known = low_precision_of(tensor, dtype)
    if known is not None and not gradients.could_record():
        return known
    with gradients.stop_recording():
        result = tf.cast(tensor, dtype) if known is None else tf.identity(known)
    _record_cast(tensor, result)
    return result


def to_float32(computed: tf.Tensor) -> tf.Tensor:
    """Casts a result of a 16-bit operation to float32.

    In a graph, tapes are not told of it.
    """
    with gradients.stop_recording():
        result = tf.cast(computed, tf.float32, name=NAME)
    if tf.executing_eagerly():
        _record_cast(computed, result)
    return result


def cast(value: Any, dtype: tf.DType) -> Any:
    """Casts a float32 or 16-bit tensor or variable; returns anything else as it is.

    Args:
        value: anything.
        dtype: DType, float32 or of 16 bits.
    """
    if not isinstance(value, tf.Tensor | tf.Variable) or value.dtype not in FLOATS:
        return value
    if value.dtype == tf.float32 != dtype:
        return to_low_precision(tf.convert_to_tensor(value), dtype)
    return value if value.dtype == dtype else tf.cast(value, dtype)


def _record_cast(source: tf.Tensor, result: tf.Tensor) -> None:
    """Tells tapes of a cast.

    If it were recorded as the operation Cast, tapes would keep `given` alive.
    """
    dtype = source.dtype
    if gradients.could_record():
        gradients.record_operation(
            NAME, [result], [source], lambda gradient: [tf.cast(gradient, dtype)]
        )


# Casts that were made outside of a loop's body for use inside: by graph, their names by the
# float32 tensor's name and dtype. A tensor would keep its graph.
_hoisted: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], str]] = weakref.WeakKeyDictionary()


def _cast_in_graph(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    graph = getattr(tensor, "graph", None)
    if not isinstance(graph, tf.Graph) or not casts.is_in_a_loop_of(graph):
        return tf.cast(tensor, dtype, name=NAME)
    # The body would cast it each time it runs. Gradients still are summed in float32.
    names = _hoisted.setdefault(graph, {})
    key = tensor.name, dtype.name
    if key not in names:
        with graph.as_default(), gradients.stop_recording():
            names[key] = tf.cast(tensor, dtype, name=NAME).name
    return casts.read_as(tensor, graph.get_tensor_by_name(names[key]))
