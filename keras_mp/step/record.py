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
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import tensorflow as tf

from keras_mp.step.gradients import Gradient
from keras_mp.support import host

Truth = bool | tf.Tensor


class State(Protocol):
    """How far a step has come, as far as Python knows it."""

    @property
    def number(self) -> int | None:
        """The state as an int, or None if it is only known at run time."""

    @property
    def tensor(self) -> tf.Tensor:
        """The state as an int64 scalar tensor."""
        ...

    def has_begun(self) -> Truth:
        """Whether a loss was scaled, or gradients were unscaled, but not yet applied."""
        ...


S = TypeVar("S", bound=State)


class Notes(Generic[S]):
    """What a thread knows about its calls in one graph, or in eager.

    MirroredStrategy runs each replica in a thread of its own.

    Attributes:
        state: the state after the last call; None if only the variable has it.
        uses: the number of the graph's operations that took the variable as input by then.
        reads: whether the graph read the variable, because the step began elsewhere.
        scaled_by: the factor of the losses, a float32 scalar tensor; None if it is not known.
        losses: the losses that were scaled.
        unclipped: by the number of an optimizer, its gradients as they were when they were
            unscaled.
        results: weak references to the results of the last call.
    """

    def __init__(self) -> None:
        self.state: S | None = None
        self.uses = 0
        self.reads = False
        self.scaled_by: tf.Tensor | None = None
        self.losses: tuple[tf.Tensor, ...] = ()
        self.unclipped: dict[int, list[Gradient]] = {}
        self.results: tuple[weakref.ref[Any], ...] = ()


class Notebook(Generic[S]):
    """The `Notes` of each thread, in each graph and in eager."""

    def __init__(self) -> None:
        self._in_eager: weakref.WeakKeyDictionary[threading.Thread, Notes[S]] = (
            weakref.WeakKeyDictionary()
        )

    def notes(self) -> Notes[S]:
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


class Record(Notebook[S]):
    """The state of the step that is under way, and the factor of its losses.

    Variables hold both, for functions that run without Python. A thread uses its own notes instead,
    unless somebody else may have made a call since.

    Args:
        known: function that takes the number of a state, and returns the state. It is 0 before the
            first call.
        unknown: function that takes such a number as an int64 scalar tensor.
        is_shared: bool. Whether all threads make one step together. Otherwise each makes its own.
    """

    def __init__(
        self, known: Callable[[int], S], unknown: Callable[[tf.Tensor], S], is_shared: bool
    ) -> None:
        super().__init__()
        self._known, self._unknown, self._is_shared = known, unknown, is_shared
        # A graph of TensorFlow 1 makes its calls once, and would save any variable that it has.
        self.has_variables = not host.in_v1_graph()
        if self.has_variables:
            self._state = host.local_variable("state", 0)
            self._scaled_by = host.local_variable("scaled_by", 1.0, tf.float32)
        # The graphs that make only a part of a step. While there are any, eager code reads the
        # variable, since it cannot know when these functions run.
        self._open_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._latest_thread: int | None = None

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables, by name."""
        return {"state": self._state, "scaled_by": self._scaled_by} if self.has_variables else {}

    def state(self) -> S:
        """Returns the state of the step that is under way.

        A graph that has to read it is noted as one that makes only a part of a step.
        """
        notes, graph = self.notes(), host.current_graph()
        if self._is_current(notes, graph):
            return self.noted()
        if graph is None:
            return self.in_variable()
        self._open_graphs.add(graph)
        notes.reads = True
        return self._unknown(tf.convert_to_tensor(self._state))

    def noted(self) -> S:
        """Returns the state that this thread has noted in this graph, or in eager."""
        state = self.notes().state
        return self._known(0) if state is None else state

    def in_variable(self) -> S:
        """Returns the state that the variable has; works in eager only."""
        return self._known(int(tf.convert_to_tensor(self._state)))

    def scaled_by(self) -> tf.Tensor | None:
        """Returns the factor of the losses, if this thread has noted it for this step.

        It must have done so in this graph, or in eager.
        """
        notes = self.notes()
        is_noted = notes.state is not None and self._is_current(notes, host.current_graph())
        return notes.scaled_by if is_noted else None

    def scaled_by_in_variable(self) -> tf.Tensor:
        """Returns the variable's factor of the losses, a float32 scalar tensor."""
        return tf.convert_to_tensor(self._scaled_by)

    def note(self, state: S, *, before: S | None = None, ends: bool = False) -> None:
        """Records the state after a call.

        Args:
            state: the state after the call.
            before: the state before the call, if other threads may note other facts at the same
                time. Defaults to None.
            ends: bool. Whether the call ends a step. Defaults to False.
        """
        notes, graph = self.notes(), host.current_graph()
        if self._is_in_variables() and state is not before:
            if before is None:
                self.assign(state)
            else:
                # An addition of bits is atomic, so it can come in any order with those of other
                # threads.
                self._state.assign_add(_value(state) - _value(before), read_value=False)
        notes.state = state
        self._latest_thread = threading.get_ident()
        if graph is not None:
            if ends and not notes.reads:
                self._open_graphs.discard(graph)
            else:
                self._open_graphs.add(graph)
            self.note_uses()

    def assign(self, state: S) -> None:
        """Changes the variable of the state, but no notes."""
        self._state.assign(_value(state), read_value=False)

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
            return bool(self.noted().has_begun()) or is_open or not tf.executing_eagerly()

    @contextlib.contextmanager
    def as_before_an_exception(self) -> Iterator[None]:
        """Context manager that restores the record if an exception leaves it."""
        notes = self.notes()
        before = {**vars(notes), "unclipped": dict(notes.unclipped)}
        values = []
        if self.has_variables and tf.executing_eagerly():
            values = [(v, tf.convert_to_tensor(v)) for v in (self._state, self._scaled_by)]
        try:
            yield
        except BaseException:
            state = notes.state
            vars(notes).update(before)
            for variable, value in values:
                variable.assign(value, read_value=False)
            if not values and notes.state is not None and notes.state is not state:
                self.note(notes.state)
            raise

    def _is_in_variables(self) -> bool:
        return self.has_variables and not host.in_v1_graph()

    def _is_current(self, notes: Notes[S], graph: Any) -> bool:
        """Whether the notes hold.

        They do if nobody else may have made a call since this thread noted the state here.
        """
        if not self._is_in_variables():
            return True
        if notes.state is None:
            return False
        if graph is not None:
            # A function that the graph calls may make calls itself. It is not always traced again.
            return notes.uses == self._uses(graph)
        if self._is_shared and self._latest_thread != threading.get_ident():
            return False
        # A function that makes a whole step does not affect a step that eager code has begun.
        return bool(notes.state.has_begun()) and not self._open_graphs

    def _uses(self, graph: Any) -> int:
        """Returns how many operations of a graph take the variable of the state.

        Each call adds some.
        """
        if tf.distribute.in_cross_replica_context():
            return -1
        handle = self._state.handle
        inside = [inner for outer, inner in graph.captures if outer is handle]
        return sum(len(tensor.consumers()) for tensor in inside)


def _value(state: State) -> Any:
    return state.tensor if state.number is None else state.number
