"""The record of `compute_gradients` of an optimizer of TensorFlow 1."""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from keras_mp.support import function_graphs, host


class ComputedGradients:
    """Records the gradients of `compute_gradients`, to warn of all others.

    The record is in Python only, so it costs a step nothing. Gradients that another thread or
    function may have computed are presumed to be right.
    """

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        # Graphs that have not applied their gradients, so that eager code may do so.
        self._open_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        # By thread, ids of variables with gradients that were computed, and not applied in eager.
        # A thread's number would not do: the next thread gets it again.
        self._computed: weakref.WeakKeyDictionary[threading.Thread, set[int]] = (
            weakref.WeakKeyDictionary()
        )
        self._has_computed = False

    def note(self, variables: Iterable[Any]) -> None:
        """Records that gradients of these variables are computed."""
        self._computed.setdefault(threading.current_thread(), set()).update(map(id, variables))
        self._has_computed = True
        graph = host.current_graph()
        if graph is not None:
            self._graphs.add(graph)
            self._open_graphs.add(graph)

    def may_include(self, variables: Iterable[Any]) -> bool:
        """Whether gradients that are applied to these variables may be recorded ones."""
        graph = host.current_graph()
        if graph is None:
            computed = self._computed.get(threading.current_thread())
            if computed is None:
                return self._has_computed
            return not computed.isdisjoint(map(id, variables)) or bool(self._open_graphs)
        is_function = function_graphs.is_of_function(graph)
        while graph is not None:
            if graph in self._graphs:
                return True
            graph = getattr(graph, "outer_graph", None)
        return is_function and self._has_computed

    def applied(self, variables: Iterable[Any]) -> None:
        """Records that gradients of these variables were applied."""
        graph = host.current_graph()
        if graph is not None:
            self._open_graphs.discard(graph)
            return
        computed = self._computed.get(threading.current_thread())
        if computed is not None:
            computed.difference_update(map(id, variables))
