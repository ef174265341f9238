"""Gradients of tensors with two faces.

A 16-bit tensor is a cast of its float32 face, so a source of a gradient is replaced by its face.

This module needs TensorFlow only.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.hooks import faces, reach


def on_tapes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that computes the gradients of a tape."""

    @functools.wraps(original)
    def imperative_grad(
        tape: Any,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        sources_raw: Sequence[Any] | None = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        stands_for = _Sources(sources)
        if not stands_for.found:
            found = original(
                tape, target, sources, output_gradients, sources_raw, unconnected_gradients
            )
        else:
            found = original(tape, target, stands_for.all, output_gradients)
            found = stands_for.merged(found, unconnected_gradients)
        if reach.thread.dtype is None:
            for gradient, source in zip(found, sources):
                is_low = faces.is_low_tensor(gradient) and faces.is_low_tensor(source)
                if is_low and faces.was_made_in_reach(source):
                    faces.note(gradient, None, faces.LEFT)
        return found

    return imperative_grad


def in_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that differentiates a graph."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        xs, stops = (_Sources(_as_list(given[name])) for name in ("xs", "stop_gradients"))
        if not xs.found and not stops.found:
            return original(*args, **kwargs)
        unconnected = given["unconnected_gradients"]
        given["unconnected_gradients"] = tf.UnconnectedGradients.NONE
        given["xs"], given["stop_gradients"] = xs.all, [*stops.given, *stops.all]
        return xs.merged(original(*call.args, **call.kwargs), unconnected)

    return differentiate


class _Sources:
    """Sources of gradients: the faces in their places.

    A 16-bit tensor is a cast of its face, so the gradient of the face has that of both. A face that
    was made later has a gradient of its own, which is added.

    Attributes:
        given: the sources.
        found: dict from positions to the tensors in their places.
        all: the sources, with these in their places, and then the faces that were made later.

    Args:
        sources: sequence of tensors and variables.
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        self.given = list(sources)
        self.found: dict[int, Any] = {}
        self._later: list[int] = []
        self.all, later = list(sources), []
        for i, source in enumerate(sources):
            face = faces.of(source) if isinstance(source, tf.Tensor) else None
            if face is None or face.kind >= faces.LOW:
                continue
            tensor = face.tensor.made if type(face.tensor) is faces.Lazy else face.tensor
            if not isinstance(tensor, tf.Tensor) or not _is_of_same_graph(source, tensor):
                continue
            self.found[i] = tensor
            if type(face.tensor) is faces.Lazy or face.kind == faces.AGAIN:
                self._later.append(i)
                later.append(tensor)
            else:
                self.all[i] = tensor
        self.all += later

    def merged(self, found: Sequence[Any], unconnected: Any) -> list[Any]:
        """Returns the gradients of the sources that were given.

        Args:
            found: gradients of `all`, or None for each.
            unconnected: the `tf.UnconnectedGradients`.
        """
        results = list(found[: len(self.given)])
        for i, gradient in zip(self._later, found[len(self.given) :]):
            if gradient is not None:
                of_face = tf.cast(gradient, self.given[i].dtype)
                results[i] = of_face if results[i] is None else results[i] + of_face
        for i in self.found:
            if results[i] is not None:
                results[i] = tf.cast(tf.convert_to_tensor(results[i]), self.given[i].dtype)
        if tf.UnconnectedGradients(unconnected) is tf.UnconnectedGradients.ZERO:
            pairs = zip(results, self.given)
            results = [tf.zeros_like(source) if each is None else each for each, source in pairs]
        return results


def _is_of_same_graph(source: Any, tensor: Any) -> bool:
    """Whether a face may stand for a source; a function may capture either."""
    if not tf.is_symbolic_tensor(source):
        return not tf.is_symbolic_tensor(tensor)
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    return tf.is_symbolic_tensor(tensor) and tensor.graph is graph


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
