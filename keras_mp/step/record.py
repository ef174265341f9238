"""Records the calls of a step in a variable, for all that make calls.

RFC 293, "LossScaleOptimizer Overview". An optimizer goes through these states:

    ready --scale--> scaled --unscale--> unscaled --apply--> applied --update--> ready

It goes from scaled to applied directly if applying unscales the gradients. `update` is a call of a
`GradScaler`; a `LossScaleOptimizer` stays in the state applied until the next loss is scaled. The
states of all optimizers that share a scale are one int, in which each fact is a bit.

Eager code and functions share the variable, even with functions that were traced long ago. If
gradients come from another `tf.function`, only the variable knows what was called there. In ::

    gradients = compute()  # a function that calls `scale_loss`
    apply(gradients)       # a function that calls `apply_gradients`

both functions are traced once. Later a function that also calls `get_unscaled_gradients` may take
the place of `compute` (`test_the_dialect_may_change_between_functions_traced_once`).

Where Python runs along with the calls, in eager and within one graph, it knows the facts as well.
Then operations that would do nothing, such as a pass over gradients that are unscaled already, are
left out thanks to `Facts`.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_mp.step.gradients import Gradient
from keras_mp.support import host

# Facts about all optimizers: a loss was scaled; applying unscales, so `get_unscaled_gradients` is
# not called; a tape has scaled the loss, and unscaled its gradients.
SCALED, TO_APPLY, BY_TAPE = 1, 2, 4
# Facts about one optimizer: its gradients were unscaled; a step was made of them; something was
# wrong, and was reported; its gradients were unscaled after the last loss was scaled; one of them
# was not finite.
UNSCALED, APPLIED, SPOILED, JUST_UNSCALED, OVERFLOWED = 1, 2, 4, 8, 16
EVERY_FACT = 31
# The numbers of optimizers: 0 for one that was not named, or is the only one; 1 to
# `MAX_OPTIMIZERS`; and one number for all others. A step that was refused counts as one of
# optimizer 0.
UNNAMED, MAX_OPTIMIZERS, OTHERS = 0, 10, 11

ALL_BITS = 2**63 - 1

Truth = bool | tf.Tensor


def bits_of(index: int, facts: int) -> int:
    """Returns the bits of facts about one optimizer."""
    return facts << (3 + 5 * index)


def bits_of_any(facts: int) -> int:
    """Returns the bits of facts about every optimizer."""
    return sum(bits_of(index, facts) for index in range(OTHERS + 1))


class Facts:
    """The facts about a step.

    They are an int in eager. In a graph they are a tensor, some bits of which are known. What is
    known spares operations. The rules about facts are the same in both cases, since the answers of
    `has` are combined with `both`, `either` and `negated`.

    Attributes:
        ones: int. The bits that are known to be 1.

    Args:
        ones: int. As the attribute. Defaults to 0.
        tensor: int64 scalar tensor. Defaults to None, for which all bits are known.
        known: int. The bits that are known. Defaults to all; with a tensor, to the bits of `ones`.
    """

    def __init__(
        self, ones: int = 0, tensor: tf.Tensor | None = None, known: int | None = None
    ) -> None:
        everything = ALL_BITS if tensor is None else ones
        self.ones, self._known = ones, everything if known is None else known
        self._tensor = tensor if self._known != ALL_BITS else None

    @property
    def number(self) -> int | None:
        """All facts as an int, or None if they are only known at run time."""
        return self.ones if self._tensor is None else None

    @property
    def tensor(self) -> tf.Tensor:
        """All facts, an int64 scalar tensor."""
        return tf.constant(self.ones, tf.int64) if self._tensor is None else self._tensor

    def has(self, bits: int) -> Truth:
        """Whether any of some facts is true."""
        if self.ones & bits:
            return True
        unknown = bits & ~self._known
        return tf.not_equal(self.tensor & unknown, 0) if unknown else False

    def changed(self, *, add: int = 0, remove: int = 0, when: Truth = True) -> "Facts":
        """Returns the facts after some have become true and others false.

        They change if `when` is true.
        """
        if tf.is_tensor(when):
            if tf.executing_eagerly():
                when = bool(when)
            else:
                now = tf.where(when, _changed(self.tensor, add, remove), self.tensor)
                unknown = add & ~self.ones | remove & (self.ones | ~self._known)
                return Facts(self.ones & ~unknown, now, self._known & ~unknown)
        if not when:
            return self
        tensor = None if self._tensor is None else _changed(self._tensor, add, remove)
        return Facts(self.ones & ~remove | add, tensor, self._known | add | remove)


def _value(facts: Facts) -> Any:
    return facts.tensor if facts.number is None else facts.number


def _changed(facts: tf.Tensor, add: int, remove: int) -> tf.Tensor:
    kept = facts & ~remove if remove else facts
    return kept | add if add else kept


def both(*truths: Truth) -> Truth:
    """Whether all are true; a bool as far as Python knows."""
    if any(truth is False for truth in truths):
        return False
    unknown = [truth for truth in truths if truth is not True]
    return functools.reduce(tf.logical_and, unknown) if unknown else True


def either(*truths: Truth) -> Truth:
    """Whether one is true; a bool as far as Python knows."""
    return negated(both(*map(negated, truths)))


def negated(truth: Truth) -> Truth:
    """Whether a truth is false; a bool if Python knows."""
    return not truth if isinstance(truth, bool) else tf.logical_not(truth)


def has_begun(facts: Facts) -> Truth:
    """Whether some loss was scaled, or gradients unscaled, but not yet applied."""
    return both(
        facts.has(SCALED | bits_of(UNNAMED, UNSCALED)),
        negated(facts.has(bits_of(UNNAMED, APPLIED))),
    )


class Notes:
    """What a thread knows about its calls in one graph, or in eager.

    MirroredStrategy runs each replica in a thread of its own.

    Attributes:
        facts: the facts after the last call; None if only the variable has them.
        uses: the number of the graph's operations that took the variable as input by then.
        reads: whether the graph read the variable, because the step began elsewhere.
        scaled_by: the factor of the losses, a float32 scalar tensor; None if it is not known.
        losses: the losses that were scaled.
        unclipped: by the number of an optimizer, its gradients as they were when they were
            unscaled.
        results: weak references to the results of the last call.
    """

    def __init__(self) -> None:
        self.facts: Facts | None = None
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
    """The facts of the step that is under way, and the factor of its losses.

    Variables hold both, for functions that run without Python. A thread uses its own notes instead,
    unless somebody else may have made a call since.

    Args:
        is_shared: bool. Whether all threads make one step together. Otherwise each makes its own.
    """

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self._is_shared = is_shared
        # A graph of TensorFlow 1 makes its calls once, and would save any variable that it has.
        self.has_variables = not host.in_v1_graph()
        if self.has_variables:
            self._facts = host.local_variable("facts", 0)
            self._scaled_by = host.local_variable("scaled_by", 1.0, tf.float32)
        # The graphs that make only a part of a step. While there are any, eager code reads the
        # variable, since it cannot know when these functions run.
        self._open_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._latest_thread: int | None = None

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables, by name."""
        return {"facts": self._facts, "scaled_by": self._scaled_by} if self.has_variables else {}

    def facts(self) -> Facts:
        """Returns the facts of the step that is under way.

        A graph that has to read them is noted as one that makes only a part of a step.
        """
        notes, graph = self.notes(), host.current_graph()
        if self._is_current(notes, graph):
            return notes.facts or Facts()
        if graph is None:
            return self.in_variable()
        self._open_graphs.add(graph)
        notes.reads = True
        return Facts(tensor=tf.convert_to_tensor(self._facts))

    def in_variable(self) -> Facts:
        """Returns the facts that the variable has; works in eager only."""
        return Facts(int(tf.convert_to_tensor(self._facts)))

    def scaled_by(self) -> tf.Tensor | None:
        """Returns the factor of the losses, if this thread has noted it for this step.

        It must have done so in this graph, or in eager.
        """
        notes = self.notes()
        is_noted = notes.facts is not None and self._is_current(notes, host.current_graph())
        return notes.scaled_by if is_noted else None

    def scaled_by_in_variable(self) -> tf.Tensor:
        """Returns the variable's factor of the losses, a float32 scalar tensor."""
        return tf.convert_to_tensor(self._scaled_by)

    def note(self, facts: Facts, *, before: Facts | None = None, ends: bool = False) -> None:
        """Records the facts after a call.

        Args:
            facts: the facts after the call.
            before: the facts before the call, if other threads may note other facts at the same
                time. Defaults to None.
            ends: bool. Whether the call ends a step. Defaults to False.
        """
        notes, graph = self.notes(), host.current_graph()
        if self._is_in_variables() and facts is not before:
            if before is None:
                self.assign(facts)
            else:
                # An addition of bits is atomic, so it can come in any order with those of other
                # threads.
                self._facts.assign_add(_value(facts) - _value(before), read_value=False)
        notes.facts = facts
        self._latest_thread = threading.get_ident()
        if graph is not None:
            if ends and not notes.reads:
                self._open_graphs.discard(graph)
            else:
                self._open_graphs.add(graph)
            self.note_uses()

    def assign(self, facts: Facts) -> None:
        """Changes the variable of the facts, but no notes."""
        self._facts.assign(_value(facts), read_value=False)

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
            in_eager = self.notes().facts or Facts()
            is_open = any(each is not graph for each in self._open_graphs)
            return bool(has_begun(in_eager)) or is_open or not tf.executing_eagerly()

    @contextlib.contextmanager
    def as_before_an_exception(self) -> Iterator[None]:
        """Context manager that restores the record if an exception leaves it."""
        notes = self.notes()
        before = {**vars(notes), "unclipped": dict(notes.unclipped)}
        values = []
        if self.has_variables and tf.executing_eagerly():
            values = [(v, tf.convert_to_tensor(v)) for v in (self._facts, self._scaled_by)]
        try:
            yield
        except BaseException:
            facts = notes.facts
            vars(notes).update(before)
            for variable, value in values:
                variable.assign(value, read_value=False)
            if not values and notes.facts is not None and notes.facts is not facts:
                self.note(notes.facts)
            raise

    def _is_in_variables(self) -> bool:
        return self.has_variables and not host.in_v1_graph()

    def _is_current(self, notes: Notes, graph: Any) -> bool:
        """Whether the notes hold.

        They do if nobody else may have made a call since this thread noted the facts here.
        """
        if not self._is_in_variables():
            return True
        if notes.facts is None:
            return False
        if graph is not None:
            # A function that the graph calls may make calls itself. It is not always traced again.
            return notes.uses == self._uses(graph)
        if self._is_shared and self._latest_thread != threading.get_ident():
            return False
        # A function that makes a whole step does not affect a step that eager code has begun.
        return bool(has_begun(notes.facts)) and not self._open_graphs

    def _uses(self, graph: Any) -> int:
        """Returns how many operations of a graph take the variable of the facts.

        Each call adds some.
        """
        if tf.distribute.in_cross_replica_context():
            return -1
        handle = self._facts.handle
        inside = [inner for outer, inner in graph.captures if outer is handle]
        return sum(len(tensor.consumers()) for tensor in inside)
