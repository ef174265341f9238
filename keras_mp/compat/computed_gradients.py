"""The record of `compute_gradients` of an optimizer of TensorFlow 1."""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from keras_mp.support import function_graphs, host


class ComputedGradients:
    """Records the gradients that `compute_gradients` has computed, to warn of all others.

    The record is in Python only, so it costs a step nothing. Gradients that another thread or
    function may have computed are presumed to be right.
    """

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        # Graphs that have not applied their gradients, so that eager code may do so.
        self._open_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        # By thread, ids of variables with gradients that were computed, and not applied in eager.
        self._computed: dict[int, set[int]] = {}

    def note(self, variables: Iterable[Any]) -> None:
        """Records that gradients of these variables are computed."""
        self._computed.setdefault(threading.get_ident(), set()).update(map(id, variables))
        graph = host.current_graph()
        if graph is not None:
            self._graphs.add(graph)
            self._open_graphs.add(graph)

    def may_include(self, variables: Iterable[Any]) -> bool:
        """Whether gradients that are applied to these variables may be recorded ones."""
        graph = host.current_graph()
        if graph is None:
            computed = self._computed.get(threading.get_ident())
            if computed is None:
                return bool(self._computed)
            return not computed.isdisjoint(map(id, variables)) or bool(self._open_graphs)
        is_function = function_graphs.is_of_function(graph)
        while graph is not None:
            if graph in self._graphs:
                return True
            graph = getattr(graph, "outer_graph", None)
        return is_function and bool(self._computed)

    def applied(self, variables: Iterable[Any]) -> None:
        """Records that gradients of these variables were applied."""
        graph = host.current_graph()
        if graph is not None:
            self._open_graphs.discard(graph)
            return
        computed = self._computed.get(threading.get_ident())
        if computed is not None:
            computed.difference_update(map(id, variables))
