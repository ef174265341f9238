"""Records how far a step has come, for functions that run without Python.

RFC 293, "LossScaleOptimizer Overview". Eager code and functions share a variable, even with
functions that were traced long ago. If gradients come from another `tf.function`, only the variable
knows what was called there. In ::

    gradients = compute()  # a function that calls `scale_loss`
    apply(gradients)       # a function that calls `apply_gradients`

both functions are traced once. Later a function that also calls `get_unscaled_gradients` may take
the place of `compute` (`test_the_dialect_may_change_between_functions_traced_once`).

Where Python runs along with the calls, in eager and within one graph, it knows the stage as well.
Then operations that would do nothing, such as a pass over gradients that are unscaled already, are
left out.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step.gradients import Gradient
from keras_mp.step.stages import KnownStages
from keras_mp.support import host


class Notes:
    """What a thread knows about its calls in one graph, or in eager.

    MirroredStrategy runs each replica in a thread of its own.

    Attributes:
        stages: the stages after the last call; None if only the variable has them.
        uses: the number of the graph's operations that took the variable as input by then.
        reads: whether the graph read the variable, because the step began elsewhere.
        scaled_by: the factor of the losses, a float32 scalar tensor; None if it is not known.
        losses: the losses that were scaled.
        unclipped: by the number of an optimizer, its gradients as they were when they were
            unscaled.
        results: weak references to the results of the last call.
    """

    def __init__(self) -> None:
        self.stages: KnownStages | None = None
        self.uses = 0
        self.reads = False
        self.scaled_by: tf.Tensor | None = None
        self.losses: tuple[tf.Tensor, ...] = ()
        self.unclipped: dict[int, list[Gradient]] = {}
        self.results: tuple[weakref.ref[Any], ...] = ()


class Notebook:
    """The `Notes` of each thread, in each graph and in eager."""

    def __init__(self) -> None:
        self._in_eager: weakref.WeakKeyDictionary[threading.Thread, Notes] = (
            weakref.WeakKeyDictionary()
        )

    def notes(self) -> Notes:
        """Returns the notes of this thread in the graph that is being built, or in eager."""
        graph, of_threads = host.current_graph(), self._in_eager
        if graph is not None:
            # The graph itself has its notes, so that they keep no graph alive.
            if not hasattr(graph, "_keras_mp_notes"):
                graph._keras_mp_notes = {}
            of_threads = graph._keras_mp_notes.setdefault(self, weakref.WeakKeyDictionary())
        thread = threading.current_thread()
        try:
            return of_threads[thread]
        except KeyError:
            return of_threads.setdefault(thread, Notes())


class Record(Notebook):
    """The stages of the step that is under way, and the factor of its losses.

    Variables hold both, for functions that run without Python. A thread uses its own notes instead,
    unless somebody else may have made a call since.

    Attributes:
        start: `KnownStages`. The stages before the first call.

    Args:
        possible: for each optimizer, the tuple of the stages that it may have, from the first one
            on.
        is_shared: bool. Whether all threads make one step together. Otherwise each makes its own.
    """

    def __init__(self, possible: Sequence[tuple[Any, ...]], is_shared: bool) -> None:
        super().__init__()
        self._possible, self._is_shared = possible, is_shared
        kind: Any = type(possible[0][0])
        self._known = [(stage,) for stage in kind]
        self.start = KnownStages([self._known[0]] * len(possible))
        # A graph of TensorFlow 1 makes its calls once, and would save any variable that it has.
        self.has_variables = not host.in_v1_graph()
        if self.has_variables:
            self._stages = host.local_variable("stages", self.start.numbers)
            self._scaled_by = host.local_variable("scaled_by", 1.0, tf.float32)
        # The graphs that make only a part of a step. While there are any, eager code reads the
        # variable, since it cannot know when these functions run.
        self._open_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._latest_thread: int | None = None

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables, by name."""
        return {"stages": self._stages, "scaled_by": self._scaled_by} if self.has_variables else {}

    def stages(self) -> KnownStages:
        """Returns the stages of the step that is under way.

        A graph that has to read them is noted as one that makes only a part of a step.
        """
        notes, graph = self.notes(), host.current_graph()
        if self._is_current(notes, graph):
            return self.noted()
        if graph is None:
            return self.in_variable()
        self._open_graphs.add(graph)
        notes.reads = True
        return KnownStages(self._possible, tf.convert_to_tensor(self._stages))

    def noted(self) -> KnownStages:
        """Returns the stages that this thread has noted in this graph, or in eager."""
        stages = self.notes().stages
        return self.start if stages is None else stages

    def in_variable(self) -> KnownStages:
        """Returns the stages that the variable has; works in eager only."""
        numbers: Any = tf.convert_to_tensor(self._stages)
        numbers = numbers.numpy().reshape(-1).tolist()
        return KnownStages(self._known[number] for number in numbers)

    def scaled_by(self) -> tf.Tensor | None:
        """Returns the factor of the losses, if this thread has noted it for this step.

        It must have done so in this graph, or in eager.
        """
        notes = self.notes()
        is_noted = notes.stages is not None and self._is_current(notes, host.current_graph())
        return notes.scaled_by if is_noted else None

    def scaled_by_in_variable(self) -> tf.Tensor:
        """Returns the variable's factor of the losses, a float32 scalar tensor."""
        return tf.convert_to_tensor(self._scaled_by)

    def note(
        self, stages: KnownStages, *, before: KnownStages | None = None, ends: bool = False
    ) -> None:
        """Records the stages after a call.

        Args:
            stages: the stages after the call.
            before: the stages before the call, if other threads may note those of other optimizers
                at the same time. Defaults to None.
            ends: bool. Whether the call ends a step. Defaults to False.
        """
        notes, graph = self.notes(), host.current_graph()
        if self._is_in_variables():
            if before is None:
                self.assign(stages)
            else:
                # An addition is atomic, so it can come in any order with those of other threads.
                self._stages.assign_add(stages.numbers - before.numbers, read_value=False)
        notes.stages = stages
        self._latest_thread = threading.get_ident()
        if graph is not None:
            if ends and not notes.reads:
                self._open_graphs.discard(graph)
            else:
                self._open_graphs.add(graph)
            self.note_uses()

    def assign(self, stages: KnownStages) -> None:
        """Changes the variable of the stages, but no notes."""
        self._stages.assign(stages.numbers, read_value=False)

    def note_scale(self, scaled_by: tf.Tensor) -> None:
        """Records the factor of the losses, a float32 scalar tensor."""
        self.notes().scaled_by = scaled_by
        if self._is_in_variables():
            self._scaled_by.assign(scaled_by, read_value=False)

    def note_uses(self) -> None:
        """Notes that all uses of the variable in this graph are known here."""
        if self._is_in_variables():
            self.notes().uses = self._uses(host.current_graph())

    def may_be_changed_elsewhere(self) -> bool:
        """Whether eager code, or another function than this one, may have begun a step."""
        graph = host.current_graph()
        with tf.init_scope():
            is_open = any(each is not graph for each in self._open_graphs)
            return self.noted().known().has_begun() or is_open or not tf.executing_eagerly()

    @contextlib.contextmanager
    def as_before_an_exception(self) -> Iterator[None]:
        """Context manager that restores the record if an exception leaves it."""
        notes = self.notes()
        before = {**vars(notes), "unclipped": dict(notes.unclipped)}
        values = []
        if self.has_variables and tf.executing_eagerly():
            values = [(v, tf.convert_to_tensor(v)) for v in (self._stages, self._scaled_by)]
        try:
            yield
        except BaseException:
            stages = notes.stages
            vars(notes).update(before)
            for variable, value in values:
                variable.assign(value, read_value=False)
            if not values and notes.stages is not None and notes.stages is not stages:
                self.note(notes.stages)
            raise

    def _is_in_variables(self) -> bool:
        return self.has_variables and not host.in_v1_graph()

    def _is_current(self, notes: Notes, graph: Any) -> bool:
        """Whether the notes hold.

        They do if nobody else may have made a call since this thread noted the stages here.
        """
        if not self._is_in_variables():
            return True
        if notes.stages is None:
            return False
        if graph is not None:
            # A function that the graph calls may make calls itself. It is not always traced again.
            return notes.uses == self._uses(graph)
        if self._is_shared:
            return self._latest_thread == threading.get_ident() and not self._open_graphs
        # A function that makes a whole step does not affect a step that eager code has begun.
        return notes.stages.known().has_begun() and not self._open_graphs

    def _uses(self, graph: Any) -> int:
        """Returns how many operations of a graph take the variable of the stages.

        Each call adds some.
        """
        if tf.distribute.in_cross_replica_context():
            return -1
        handle = self._stages.handle
        inside = [inner for outer, inner in graph.captures if outer is handle]
        return sum(len(tensor.consumers()) for tensor in inside)
