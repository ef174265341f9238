"""Gradients as they were before the user clipped them, for the report of a skipped step."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import gradients
from keras_mp.support import host


def remember(grads: Sequence[gradients.Gradient]) -> Callable[[], list[gradients.Gradient]]:
    """Remembers gradients until they are applied, without keeping a graph alive.

    Args:
        grads: sequence of gradients of the graph that is being built, or of eager code.

    Returns:
        A function that returns them in the same graph, or in eager; elsewhere an empty list.
    """
    graph = host.current_graph()
    if graph is None:
        return lambda: list(grads) if host.current_graph() is None else []
    # A graph keeps its tensors alive, but not the sparse gradients that consist of them.
    parts = [tuple(map(_weak, _parts(gradient))) for gradient in grads]
    reference = weakref.ref(graph)

    def recall() -> list[gradients.Gradient]:
        if reference() is not host.current_graph():
            return []
        tensors: list[list[Any]] = [[part() for part in each] for each in parts]
        return [
            tf.IndexedSlices(*each) if each[1:] and each[0] is not None else each[0]
            for each in tensors
        ]

    return recall


def _parts(gradient: gradients.Gradient) -> Sequence[tf.Tensor | None]:
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, gradient.indices, gradient.dense_shape
    return (gradient,)


def _weak(tensor: tf.Tensor | None) -> Callable[[], tf.Tensor | None]:
    return (lambda: None) if tensor is None else weakref.ref(tensor)


def changed_since(
    before: Sequence[gradients.Gradient], now: Sequence[gradients.Gradient]
) -> list[gradients.Gradient]:
    """Returns gradients as they were before the user changed them, by clipping for example.

    Args:
        before: the gradients that the user was given, in their order.
        now: the gradients that are applied.

    Returns:
        list, one for each of `now`; empty if none has changed, or if they do not correspond.
    """
    old = [gradient for gradient in before if gradient is not None]
    new = {i: gradient for i, gradient in enumerate(now) if gradient is not None}
    pairs = list(zip(old, new.values()))
    if len(old) != len(new) or all(_parts(a)[0] is _parts(b)[0] for a, b in pairs):
        return []
    if not all(a.shape.is_compatible_with(b.shape) for a, b in pairs):
        return []
    aligned: list[gradients.Gradient] = [None] * len(now)
    for i, gradient in zip(new, old):
        aligned[i] = gradient
    return aligned
