"""What is known of a step between its calls: in Python where Python runs, in a variable elsewhere.

Each thread remembers what it did itself, in eager or in the graph that it is building. Where
gradients come from another function, Python may not have run since; so a variable remembers as
well, and tells at run time. This module needs TensorFlow only.
"""

import threading
import weakref
from typing import Any

import tensorflow as tf

from keras_mp.support import host


class _Mine(threading.local):
    """What one thread remembers. MirroredStrategy runs each replica in a thread of its own.

    Attributes:
        graph: reference to the graph in which the last call was made; None for eager.
        facts: what that call led to; None where that is known only at run time.
    """

    graph: weakref.ref[Any] | None = None
    facts: int | None = 0


class Knowledge:
    """A set of facts, as the bits of an int. 0 is the beginning.

    Attributes:
        variable: int64 variable that holds them for functions.
        are_looked_up: bool. Has a function been traced that takes them from the variable? Then
            eager code does, too, since it cannot know when that function runs.
    """

    def __init__(self) -> None:
        self._mine = _Mine()
        self.variable = host.local_variable("facts", 0)
        self.are_looked_up = False
        # Graphs in which calls were made that have not led to the end of a step.
        self._open_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        # In which thread the last call was made.
        self._latest: int | None = None

    @property
    def of_last_call(self) -> int | None:
        """What this thread's last call led to, in whatever graph; None if only a graph knows."""
        return self._mine.facts

    def here(self, since: int = -1, in_all_threads: bool = False) -> int | None:
        """Returns the facts, or None where only the variable knows, at run time.

        Args:
            since: int. The facts of which one tells that this thread has begun a step.
            in_all_threads: bool. Is it one step that all threads make together?
        """
        graph, mine = host.current_graph(), self._mine
        if graph is None:
            crosses = self.are_looked_up or bool(self._open_graphs)
            if in_all_threads and self._latest != threading.get_ident():
                crosses = True
            has_begun = mine.facts is not None and mine.facts & since
            if mine.graph is None and has_begun and not crosses:
                return mine.facts
            return self.read()
        if mine.graph is not None and mine.graph() is graph and mine.facts is not None:
            return mine.facts
        return 0 if host.in_v1_graph() else None

    def read(self) -> int:
        """Reads the variable, in eager."""
        return int(tf.convert_to_tensor(self.variable))

    def at_run_time(self) -> tf.Tensor:
        """Reads the variable in a graph, an int64 scalar tensor."""
        return tf.convert_to_tensor(self.variable)

    def note(self, facts: int | tf.Tensor, *, is_open: bool | None = None) -> None:
        """Notes what a call led to.

        Args:
            facts: int, or int64 scalar tensor.
            is_open: bool. Does the graph in which it was made go on, or leave to another function,
                what ends the step? None leaves that as it was.
        """
        graph = host.current_graph()
        if graph is not None and is_open is not None:
            (self._open_graphs.add if is_open else self._open_graphs.discard)(graph)
        self._latest = threading.get_ident()
        self._mine.graph = None if graph is None else weakref.ref(graph)
        self._mine.facts = None if tf.is_tensor(facts) else int(facts)
        if not host.in_v1_graph():
            self.variable.assign(facts if tf.is_tensor(facts) else int(facts), read_value=False)
