"""Numbers the optimizers that share a scale. Each has bits of its own in the state of calls."""

import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from keras_mp.step.call_states import MAX_OPTIMIZERS, OTHERS, UNNAMED
from keras_mp.support import host


class NumberedOptimizers:
    """Numbers the optimizers of a scaler, as long as they, or functions that use them, live."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By number: a reference to the optimizer, and the graphs in which it makes steps.
        self._entries: dict[int, tuple[Callable[[], Any], weakref.WeakSet[Any]]] = {}
        self._was_left_out = False

    def index(self, optimizer: Any) -> int:
        """Returns the number of an optimizer; None stands for the only one.

        Raises:
            ValueError: there are several.
        """
        with self._lock:
            living = {i: entry for i, entry in self._entries.items() if entry[0]() is not None}
            if optimizer is None:
                if len(living) > 1:
                    raise ValueError(_WHOSE.format([entry[0]() for entry in living.values()]))
                self._was_left_out = True
                return next(iter(living), UNNAMED)
            index = self._number(optimizer, living)
            graph = host.current_graph()
            if graph is not None and index != OTHERS:
                self._entries[index][1].add(graph)
            return index

    def _number(self, optimizer: Any, living: dict[int, Any]) -> int:
        for index, (reference, _) in living.items():
            if reference() == optimizer if _is_method(optimizer) else reference() is optimizer:
                return index
        is_function = isinstance(optimizer, types.FunctionType)
        if living and self._was_left_out and not is_function:
            raise ValueError(_WHOSE.format([*(entry[0]() for entry in living.values()), optimizer]))
        for index in range(1, MAX_OPTIMIZERS + 1):
            if index not in living and not (index in self._entries and self._entries[index][1]):
                self._entries[index] = (_reference(optimizer), weakref.WeakSet())
                return index
        return OTHERS


def _is_method(optimizer: Any) -> bool:
    return isinstance(optimizer, types.MethodType)


def _reference(optimizer: Any) -> Callable[[], Any]:
    try:
        return (weakref.WeakMethod if _is_method(optimizer) else weakref.ref)(optimizer)
    except TypeError:  # an object with slots, but none for weak references
        return lambda: optimizer


_WHOSE = (
    "GradScaler.unscale() was called without an optimizer, and there are several, of which each "
    "has a verdict of its own. Say whose gradients they are: scaler.unscale(gradients, optimizer). "
    "Received: optimizer=None with {}"
)
