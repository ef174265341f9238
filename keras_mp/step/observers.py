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
        observer: called with the (gradient, variable) pairs of this replica, the number that
            unscales them and the factor of the loss (float32 scalar tensors, or None).
    """
    with attributes.replaced(_thread, "observers", (*_thread.observers, observer)):
        yield


def of_this_thread() -> tuple[Observer, ...]:
    """Returns the observers of the steps that this thread makes."""
    return _thread.observers
