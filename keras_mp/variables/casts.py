"""Casts the values of variables: once where that is sound, else each time.

In a graph, a second read of a variable gets the cast of the first one, if nothing can have written
to the variable in between. A graph shows that, since an operation that writes takes the variable's
handle. Eager code does not show it: an operation may write to a handle without the variable. In
eager, and from one graph to the next (the body of a loop runs many times), casts are reused only
under `hold`, by which the user promises that nothing is written. This module needs TensorFlow only.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.hooks import faces, own_gradient, reach
from keras_mp.support import features, function_graphs, host, variable_ops
from keras_mp.support.attributes import replaced
from keras_mp.tensorflow_api.features import FACES


class _SharedCast(NamedTuple):
    """A cast that was made before, by name, and the writes that came before it.

    It has the name of the tensor, and the names of the operations that may have written to the
    variable by then.
    """

    name: str
    writers: frozenset[str]


# By graph, then by handle, dtype and device. Tensors are kept by name, as one would keep its graph.
_Key = tuple[str, str, str]
_shared_casts: weakref.WeakKeyDictionary[tf.Graph, dict[_Key, _SharedCast]] = (
    weakref.WeakKeyDictionary()
)


class _Held(NamedTuple):
    """A cast that `hold` keeps, and the graph for which it does; None is eager."""

    cast: tf.Tensor
    graph: tf.Graph | None


class _HeldCasts(threading.local):
    """The casts that `hold` keeps in this thread, by the id of the variable."""

    held: Mapping[int, _Held] = {}


_thread = _HeldCasts()


def read(variable: tf.Variable, dtype: tf.DType) -> tf.Tensor:
    """Returns the value of a variable in a dtype.

    Args:
        variable: a `tf.Variable`, not one that casts itself.
        dtype: DType.
    """
    # Not all variables that are summed over replicas when they are read have `value`.
    value = tf.convert_to_tensor(variable)
    held = _thread.held.get(id(variable))
    if held is not None and held.cast.dtype == dtype and _can_share(held.graph):
        return read_as(value, held.cast)
    return cast(value, dtype)


def cast(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Casts the value of a variable.

    The gradient of each read comes back in the dtype of `value`. So the gradients of many reads
    that share one cast are summed as precisely as if each read had its own.

    Args:
        value: tensor that was read.
        dtype: DType.

    Returns:
        A tensor of that dtype; `value` itself if that is its dtype.
    """
    if value.dtype == dtype:
        return value
    graph = host.current_graph()
    if not function_graphs.is_of_function(graph) or not features.is_on(FACES):
        return tf.cast(value, dtype)
    handle = _handle_that_was_read(value)
    if handle is None:
        return tf.cast(value, dtype)
    shared = _shared_casts.setdefault(graph, {})
    # One handle may stand for a variable on each of several devices.
    key = handle.name, dtype.name, value.device
    writers = _writers(handle)
    if writers is None:
        return tf.cast(value, dtype)
    if key in shared and shared[key].writers == writers:
        return read_as(value, graph.get_tensor_by_name(shared[key].name))
    result = tf.cast(value, dtype)
    shared[key] = _SharedCast(result.name, writers)
    return result


def _can_share(held_in: tf.Graph | None) -> bool:
    """Whether the code that runs now can read a cast that a graph, or eager, holds."""
    if _graphs_within(held_in) is None:
        return False
    return tf.executing_eagerly() or features.is_on(FACES)


def read_as(value: tf.Tensor, cast_before: tf.Tensor) -> tf.Tensor:
    """Returns a cast of `value` that was made before.

    Gradients go to `value`, in its dtype.
    """
    if tf.executing_eagerly():
        result = _read_as_in_eager(value, cast_before)
    else:
        gradient = _register_gradient(value.dtype, str(value.shape))
        result = own_gradient.identity(gradient, [value, cast_before]).outputs[1]
    if value.dtype == tf.float32 and reach.current() is not None:
        faces.note(result, value, faces.WEIGHT)
    return result


@functools.cache
def _register_gradient(dtype: tf.DType, shape: str) -> str:
    """Registers the gradient, and returns its name.

    There is a name for each shape: in a SavedModel, one name stands for one function of one shape.
    """
    name = f"KerasMpReadAs_{dtype.name}_{shape}"

    @tf.RegisterGradient(name)
    def gradient(
        op: tf.Operation | None, of_value: tf.Tensor | None, of_cast: tf.Tensor
    ) -> list[tf.Tensor | None]:
        del op, of_value  # They are None in a SavedModel, and zeros elsewhere.
        return [tf.cast(of_cast, dtype), None]

    return name


@tf.custom_gradient
def _read_as_in_eager(value: tf.Tensor, cast_before: tf.Tensor) -> Any:
    return cast_before, lambda gradient: (tf.cast(gradient, value.dtype), None)


def refuse_if_held(variable: object) -> None:
    """Refuses a write to a variable if `hold` has promised that there is none.

    Args:
        variable: a `tf.Variable`, not one that casts itself.

    Raises:
        RuntimeError: it is held.
    """
    if id(variable) in _thread.held:
        raise RuntimeError(
            "A variable was assigned to inside of `keras_mp.cast_once`, where its cast is kept. "
            f"Assign outside of it, or leave it out of the list. Received: {variable!r}"
        )


def hold(casts: Mapping[int, tf.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which reads of variables take casts made before.

    Args:
        casts: the casts, by the ids of the variables.
    """
    graph = host.current_graph()
    held = {key: _Held(cast, graph) for key, cast in casts.items()}
    return replaced(_thread, "held", {**_thread.held, **held})


def _graphs_within(outer: tf.Graph | None) -> list[tf.Graph] | None:
    """Returns the graphs of branches and loops being built in a graph.

    The innermost comes first. Returns None if the graph that is built now is not part of `outer`.
    The trace of a `tf.function` or of a dataset never is: it may run when nothing is held.
    """
    graph, within = host.current_graph(), []
    while graph is not outer:
        # The graphs of branches and loops are instances of subclasses.
        if function_graphs.is_trace(graph) or not function_graphs.is_of_function(graph):
            return None
        within.append(graph)
        graph = graph.outer_graph
    return within


def is_in_a_loop_of(graph: tf.Graph) -> bool:
    """Whether the body or the condition of a loop of a graph is being built.

    Args:
        graph: a graph other than the current one, or the current one, which gives False.
    """
    within = _graphs_within(graph) or []
    return any(not function_graphs.is_branch(each) for each in within)


def _handle_that_was_read(value: tf.Tensor) -> tf.Tensor | None:
    """Returns the handle whose value a tensor is, or None.

    It is None for a slice, a sum over replicas and the like, and also where the user orders the
    read by control dependencies.
    """
    op = value.op
    while op.type == "Identity" and not op.control_inputs:
        op = op.inputs[0].op
    return op.inputs[0] if op.type == "ReadVariableOp" and not op.control_inputs else None


def _writers(handle: tf.Tensor) -> frozenset[str] | None:
    """Returns the operations that may have written to a variable.

    Returns None if some of them may be unseen.
    """
    writers = [op for op in handle.consumers() if not variable_ops.only_reads(op, handle)]
    if any(output.dtype == tf.resource for op in writers for output in op.outputs):
        return None
    return frozenset(op.name for op in writers)
