"""Observers of the gradients of a step, as they are before anything is done to them."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.support import attributes

Observer = Callable[
    [Sequence[tuple[Any, Any]], "tf.Tensor | None", "tf.Tensor | None"],
    None,
]


class _ObserverState(threading.local):
    observers: tuple[Observer, ...] = ()


_thread = _ObserverState()


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Shows an observer the gradients of the steps that this thread, a replica's, makes inside.

    Args:
        observer: called with the (gradient, variable) pairs of this replica, with what these are
            still to be divided by and with what the loss was multiplied by (float32 scalar tensors,
            or None).
    """
    with attributes.replaced(_thread, "observers", (*_thread.observers, observer)):
        yield


def show(
    pairs: Sequence[tuple[Any, Any]],
    divisor: Callable[[], tf.Tensor | None],
    scaled_by: tf.Tensor | None,
) -> None:
    """Shows the gradients of a step to the observers of this thread, if there are any.

    Args:
        pairs: sequence of (gradient, variable) pairs, not summed over replicas yet.
        divisor: returns what they are still to be divided by, a float32 scalar tensor or None.
        scaled_by: float32 scalar tensor, what the loss was multiplied by, or None.
    """
    for observer in _thread.observers:
        observer(pairs, divisor(), scaled_by)
