"""Computes gradients of operations that were made in reach, in reach.

TensorFlow calls the gradient function of an operation when somebody asks for a gradient, in any
thread, after the layer that made the operation has returned. So operations that are made in reach
get a mark, and the gradient function of a marked operation runs in the reach of the mark. The
operations that it makes are marked as well, so this also holds for gradients of gradients.

In eager, and on all tapes, the mark is one more attribute in the list that TensorFlow keeps for the
gradient function; the operation itself runs without it. In a graph, the mark is an attribute of the
operation's Python object, which is not written into files: a function that was saved and loaded
behaves as TensorFlow's own.

A `tf.function` has one trace for calls in reach, and another one for other calls.

This module needs TensorFlow only.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.hooks import Method, Replacement, When, face_gradients, faces, reach
from keras_mp.kernels import door, functions
from keras_mp.support.attributes import replaced
from keras_mp.support.dtypes import FLOATING, LOW_PRECISION
from keras_mp.tensorflow_api import gradients, graphs, operations
from keras_mp.tensorflow_api.features import FACES, VECTORIZED
from keras_mp.variables import scope

_thread = reach.thread
_MARK, _FLOATING = door.MARK, frozenset(FLOATING)
_DTYPES = {dtype.as_datatype_enum: dtype for dtype in LOW_PRECISION}


def _find_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method of registries that finds an operation's gradient function."""
    registry = gradients.registry.get()

    def of_cast(op: tf.Operation, upstream: Any) -> Any:
        # In eager each weight is cast, and TensorFlow's own takes twice as long.
        dtype = op.inputs[0].dtype
        if isinstance(upstream, tf.Tensor) and {dtype, upstream.dtype} <= _FLOATING:
            return tf.raw_ops.Cast(x=upstream, DstT=dtype)
        return original(registry, "Cast")(op, upstream)

    def lookup(self: object, name: str) -> Any:
        if self is not registry:
            return original(self, name)
        found = of_cast if name == "Cast" else original(self, name)
        return found and functools.partial(_differentiate, found)

    return lookup


def _differentiate(
    gradient: Callable[..., object], op: tf.Operation, *upstream: tf.Tensor | None
) -> object:
    """Calls a gradient function, in the reach in which the operation was made."""
    attributes = getattr(op, "attrs", None)
    if attributes is None:  # not on a tape
        dtype = faces.reach_of(op)
    else:
        names = attributes[::2]
        dtype = _DTYPES[attributes[2 * names.index(_MARK) + 1]] if _MARK in names else None
    # As `reach.entered` does, in half the time.
    before = _thread.dtype, _thread.in_gradient, _thread.region
    _thread.dtype, _thread.in_gradient, _thread.region = dtype, True, None
    try:
        return gradient(op, *upstream)
    finally:
        _thread.dtype, _thread.in_gradient, _thread.region = before


def _make_in_graph(original: Callable[..., tf.Operation]) -> Callable[..., tf.Operation]:
    """Returns the method that makes an operation in a graph, and marks it."""

    def make(*args: Any, **kwargs: Any) -> tf.Operation:
        op: Any = original(*args, **kwargs)
        op._keras_mp_made = _thread.dtype
        return op

    return make


def _out_of_reach(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that differentiates a graph.

    The graph's operations have their own marks, or none.
    """
    of_faces = face_gradients.in_graphs(original)

    def differentiate(*args: Any, **kwargs: Any) -> object:
        with reach.entered(None):
            return of_faces(*args, **kwargs)

    return differentiate


def _of_tape(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that computes the gradients of a tape.

    They are in the dtypes of the forward pass: nothing of it is autocast anew.
    """
    return _without_region(face_gradients.on_tapes(original))


def _without_region(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs outside of regions."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with reach.without_region():
            return original(*args, **kwargs)

    return call


def _key_of_trace(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that makes the key of a trace.

    The reach and the region are a part of the key, as the device is.
    """

    def make_function_context(*args: Any, **kwargs: Any) -> object:
        key = original(*args, **kwargs)
        return key._replace(context=(key.context, _MARK, _thread.dtype, _thread.region))

    return make_function_context


def _with_custom_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that runs `tf.custom_gradient`, with its gradient in reach."""

    def call(
        function: Callable[..., tuple[object, Callable[..., object]]],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> object:
        # What is beyond 16 bits goes through it, and its gradient is right in float32, too.
        is_silu = function.__module__ == tf.nn.silu.__module__
        if is_silu and any(faces.is_exact(x) for x in args if faces.is_low_tensor(x)):
            return functions.in_float32(lambda *wide: original(function, wide, kwargs))(*args)
        region, dtype = reach.state()

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> tuple[object, Callable[..., object]]:
            result, gradient = function(*args, **kwargs)
            in_scope, inputs = scope.in_current_scope(gradient), tf.nest.flatten(args)

            def backward(*args: Any, **kwargs: Any) -> object:
                # The program's own code, for which the door is open. `tf.recompute_grad` computes
                # the forward pass again in it, with variables as they were read there.
                with reach.in_region(region, dtype), replaced(_thread, "in_gradient", False):
                    found = in_scope(*args, **kwargs)
                if "variables" not in kwargs:
                    return _in_dtypes_of(inputs, found)
                of_inputs, of_variables = found  # pyright: ignore[reportGeneralTypeIssues]
                return _in_dtypes_of(inputs, of_inputs), of_variables

            # TensorFlow asks whether it has `variables`.
            backward.__signature__ = inspect.signature(gradient)  # pyright: ignore
            return result, backward

        results = original(forward, args, kwargs)
        # Their gradients are not those of the operations that have made them.
        faces.without_face(results)
        return results

    return call


def _in_dtypes_of(inputs: Sequence[Any], found: Any) -> Any:
    """Rounds float32 gradients of 16-bit inputs, which others are added to."""
    flat = tf.nest.flatten(found)
    if len(flat) != len(inputs):
        return found

    def rounded(gradient: Any, value: Any) -> Any:
        dtypes = [getattr(each, "dtype", None) for each in (gradient, value)]
        is_mixed = dtypes[0] == tf.float32 and dtypes[1] in LOW_PRECISION
        is_tensor = isinstance(gradient, tf.Tensor) and isinstance(value, tf.Tensor)
        return tf.cast(gradient, value.dtype) if is_mixed and is_tensor else gradient

    return tf.nest.pack_sequence_as(found, list(map(rounded, flat, inputs)))


def _rows() -> Iterator[Replacement]:
    for name, make in (
        (operations.run_in_eager, door.run_in_eager),
        (operations.make_in_graph, door.make_in_graph),
        (gradients.record_in_graph, door.on_tape),
        (graphs.create_op, _make_in_graph),
        (graphs.key_of_trace, _key_of_trace),
        (gradients.custom_in_eager, _with_custom_gradient),
        (gradients.custom_in_graph, _with_custom_gradient),
    ):
        yield Replacement(name, make, When.IN_REACH, FACES)
    yield Replacement(gradients.vectorize, _without_region, When.IN_REACH, VECTORIZED)
    for name, make in (
        (gradients.of_tape, _of_tape),
        (gradients.of_graph, _out_of_reach),
        (gradients.find, _find_gradient),
    ):
        yield Replacement(name, make, When.ALWAYS, FACES)
    for watching in (
        Method(tf.GradientTape, "watch"),
        Method(tf.autodiff.ForwardAccumulator, "__init__"),
    ):
        yield Replacement(watching, door.watch, When.ALWAYS, FACES)


REPLACEMENTS = tuple(_rows())
