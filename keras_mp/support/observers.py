"""Observers: what attaches to the core of keras_mp, and is not imported by it.

The core calls the methods of all observers at the moments that their docstrings name. The hooks on
Keras's layers, files and `compile`, and the modules for speed, for hardware and for the graph
rewrite attach their observers in `keras_mp/extensions.py`; those of `numerics` are attached while
its tools run. This module needs TensorFlow only.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_mp.support import attributes


class Observer:
    """The base class of observers, whose methods do nothing.

    An error that a method raises is raised by the call that it observes.
    """

    def reach_begins(self) -> None:
        """Is called before the process computes in reach for the first time."""

    def policy_was_made(self, policy: Any) -> None:
        """Is called with a policy of 16 bits that was made."""

    def policy_is_set(self, policy: Any) -> None:
        """Is called with a policy before it becomes the global one."""

    def model_is_compiled(self, model: Any) -> None:
        """Is called with a model of `tf.keras` before `Model.compile` compiles it."""

    def model_was_compiled(self, model: Any) -> None:
        """Is called with a model of `tf.keras` after `Model.compile` has compiled it."""

    def scaler_was_made(self) -> None:
        """Is called when an object that scales losses has been made."""

    def step_begins(self) -> None:
        """Is called when an object that scales losses begins a step of an optimizer.

        It is called in eager, or in a trace.
        """

    def workers_meet(self, owner: Any, grads: Sequence[Any], facts: Mapping[str, Any]) -> None:
        """Is called in a step of one of several workers, before they sum gradients.

        Args:
            owner: the object that makes the step.
            grads: the gradients of this worker.
            facts: dict of what has to be the same on all workers, by name.
        """

    def gradients(self, pairs: Sequence[tuple[Any, Any]], divisor: Any, scaled_by: Any) -> None:
        """Is called with a replica's gradients in a step, before anything changes them.

        Args:
            pairs: the (gradient, variable) pairs.
            divisor: float32 scalar, the number that unscales them; None if they are not scaled.
            scaled_by: float32 scalar, the number by which the loss was multiplied, or None.
        """


class _Thread(threading.local):
    """What tools have put into this thread.

    Attributes:
        observers: tuple of `Observer`s.
        wraps: dict from the id of a place (`hooks/wrapped.py`) to a list of the functions with
            which its attribute is wrapped, the innermost first.
    """

    observers: tuple[Observer, ...] = ()

    def __init__(self) -> None:
        self.wraps: dict[int, list[Callable[[Any], Any]]] = {}


thread = _Thread()
_of_process: list[Observer] = []


def attach(observer: Observer) -> None:
    """Attaches an observer for as long as the process runs.

    Args:
        observer: the `Observer`.
    """
    _of_process.append(observer)


def attached(observer: Observer) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that attaches an observer in this thread.

    Args:
        observer: the `Observer`.
    """
    return attributes.replaced(thread, "observers", (*thread.observers, observer))


def tell(event: Callable[..., None], *args: Any) -> None:
    """Calls a method of all observers of what this thread does.

    Args:
        event: the method, such as `Observer.step_begins`.
        *args: its arguments.
    """
    for observer in (*_of_process, *thread.observers):
        getattr(observer, event.__name__)(*args)
