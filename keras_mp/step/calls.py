"""The record of the calls of a step, by which gradients are scaled and unscaled exactly once.

RFC 293, "LossScaleOptimizer Overview". The states of an optimizer are

    ready --scale--> scaled --unscale--> unscaled --apply--> applied --update--> ready

It goes from scaled to applied directly if applying unscales. The state of all optimizers that share
a scale is one int, in which each fact is a bit.

The record is a variable, these facts, and the factor of the loss beside it. Eager code, functions,
and all that were traced long ago share it: if gradients come from another `tf.function`, nobody
else knows what was called. In ::

    gradients = compute()  # a function that calls `scale_loss`
    apply(gradients)       # a function that calls `apply_gradients`

both are traced once. Later a function that also calls `get_unscaled_gradients` may replace
`compute` (`test_the_dialect_may_change_between_functions_traced_once`).

Where Python runs with the calls, in eager and within one graph, it knows the facts as well. Then
`Facts` leaves out what would do nothing, such as a pass over gradients that are unscaled already.
"""

import abc
import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.step.gradients import Gradient
from keras_mp.support import host, messages

LossScaleValue = Callable[[], tf.Tensor]

# Facts about all optimizers: a loss was scaled; applying unscales, since `get_unscaled_gradients`
# is not called; a tape has scaled the loss, and unscaled its gradients.
SCALED, TO_APPLY, BY_TAPE = 1, 2, 4
# In the place of the last one, for a single optimizer: the step began while another one was under
# way that unscales at the other call.
OVERLAPS = BY_TAPE
# Facts about each optimizer: its gradients were unscaled; a step was made of them; something was
# wrong, and reported; they were unscaled after the last loss was scaled; one was not finite.
UNSCALED, APPLIED, SPOILED, JUST_UNSCALED, OVERFLOWED = 1, 2, 4, 8, 16
EVERY_FACT = 31
# The numbers of optimizers: 0 for one that was not named, or the only one; 1 to `MAX_OPTIMIZERS`;
# one number for all others. A step that was refused counts as one of optimizer 0.
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
    """The facts about a step: an int in eager; in a graph a tensor, of which some bits are known.

    What is known leaves out operations. The rules about facts are the same for both, since the
    answers of `has` go through `both`, `either` and `negated`.

    Args:
        ones: int. The bits that are known to be 1. Defaults to 0.
        tensor: int64 scalar tensor. Defaults to None: then all bits are known.
        known: int. The bits that are known. Defaults to all, or with a tensor to those of `ones`.
    """

    def __init__(
        self, ones: int = 0, tensor: tf.Tensor | None = None, known: int | None = None
    ) -> None:
        everything = ALL_BITS if tensor is None else ones
        self.ones, self._known = ones, everything if known is None else known
        self._tensor = tensor if self._known != ALL_BITS else None

    @property
    def number(self) -> int | None:
        """All facts as an int, None if only run time knows them."""
        return self.ones if self._tensor is None else None

    @property
    def tensor(self) -> tf.Tensor:
        """All facts, an int64 scalar tensor."""
        return tf.constant(self.ones, tf.int64) if self._tensor is None else self._tensor

    @property
    def value(self) -> Any:
        """All facts, as an int or as a tensor."""
        return self.ones if self._tensor is None else self._tensor

    def has(self, bits: int) -> Truth:
        """Whether any of these facts is true."""
        if self.ones & bits:
            return True
        unknown = bits & ~self._known
        return tf.not_equal(self.tensor & unknown, 0) if unknown else False

    def changed(self, *, add: int = 0, remove: int = 0, when: Truth = True) -> "Facts":
        """Returns the facts after some have become true and others false, if `when` is true."""
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


def _changed(facts: tf.Tensor, add: int, remove: int) -> tf.Tensor:
    kept = facts & ~remove if remove else facts
    return kept | add if add else kept


def both(*truths: Truth) -> Truth:
    """Whether all are true; in Python as far as it is known there."""
    if any(truth is False for truth in truths):
        return False
    unknown = [truth for truth in truths if truth is not True]
    return functools.reduce(tf.logical_and, unknown) if unknown else True


def either(*truths: Truth) -> Truth:
    """Whether one is true; in Python as far as it is known there."""
    return negated(both(*map(negated, truths)))


def negated(truth: Truth) -> Truth:
    """Whether it is false; in Python if it is known there."""
    return not truth if isinstance(truth, bool) else tf.logical_not(truth)


def has_begun(facts: Facts) -> Truth:
    """Whether calls of the next step were made."""
    return both(
        facts.has(SCALED | bits_of(UNNAMED, UNSCALED)),
        negated(facts.has(bits_of(UNNAMED, APPLIED))),
    )


class GradientState(NamedTuple):
    """What is known of the gradients of a step.

    Attributes:
        scaled: bool, or bool scalar tensor. Whether they are still scaled.
        scaled_by: float32 scalar tensor, the factor of the loss, even if it was not scaled; None if
            the optimizer scales no loss.
        is_divided: function that returns whether a call has divided them by it, a bool or bool
            scalar tensor.
        losses: the losses of this replica, as far as they are known.
        unclipped: the gradients of this replica as they were when they were unscaled, before the
            user may have clipped them; empty if they are unknown. A step empties the list, which
            in eager would keep them in memory while the step is made.
        was_finite: bool scalar tensor. An earlier verdict on gradients of this replica, which may
            have been changed since; None if there was none.
        is_allowed: bool scalar tensor, the same on every replica. If it is False, the step is not
            made, whatever its gradients are; None if no call can be wrong.
        refuse: function that reports this. It is called once for all replicas, in the branch that
            does not make the step.
    """

    scaled: Truth = False
    scaled_by: tf.Tensor | None = None
    is_divided: Callable[[], Truth] = lambda: False
    losses: Sequence[tf.Tensor] = ()
    unclipped: list[Gradient] | tuple[()] = ()
    was_finite: tf.Tensor | None = None
    is_allowed: tf.Tensor | None = None
    refuse: Callable[[], None] = lambda: None

    def divisor(self) -> tf.Tensor | None:
        """Returns the number that unscales the gradients, a float32 scalar; None if unscaled."""
        if tf.is_tensor(self.scaled):
            return tf.where(self.scaled, self.scaled_by, 1.0)
        return self.scaled_by if self.scaled else None


class _Notes:
    """What a thread knows of the calls that it has made in one graph, or in eager.

    MirroredStrategy runs each replica in a thread of its own.

    Attributes:
        facts: the facts after the last call; None if only the variable has them.
        uses: the number of operations of the graph that took the variable then.
        is_open: whether other functions may go on with the step, or have begun it.
        scaled_by: the factor of the losses.
        losses: the losses that were scaled.
        unclipped: by the number of an optimizer, its gradients as they were when unscaled.
        results: weak references to the results of the last call.
    """

    def __init__(self) -> None:
        self.facts: Facts | None = None
        self.uses = 0
        self.is_open = False
        self.scaled_by: tf.Tensor | None = None
        self.losses: tuple[tf.Tensor, ...] = ()
        self.unclipped: dict[int, list[Gradient]] = {}
        self.results: tuple[weakref.ref[Any], ...] = ()


_NotesOfThreads = weakref.WeakKeyDictionary[threading.Thread, _Notes]


class Calls:
    """The calls of a step that scales nothing, or of an optimizer that records calls itself.

    Attributes:
        scales: whether these calls scale the loss.
        reports: the `HostCallback` that reports wrong calls in graphs; None if there is none.

    Args:
        loss_scale: function that returns the current loss scale, a float32 scalar tensor.
    """

    scales = False
    reports: host.HostCallback | None = None

    def __init__(self, loss_scale: LossScaleValue) -> None:
        self._loss_scale = loss_scale
        self._in_eager: _NotesOfThreads = weakref.WeakKeyDictionary()

    def scale(self, losses: Any, scaled_by: tf.Tensor | None = None) -> Any:
        """Multiplies the loss, or a structure of losses, by the loss scale.

        Args:
            losses: tensor, or structure of tensors.
            scaled_by: float32 scalar tensor. Defaults to the current loss scale.
        """
        flat = tf.nest.flatten(losses)
        self._notes().losses = tuple(each for each in flat if tf.is_tensor(each))
        return losses

    def begin(self, scaled_by: tf.Tensor, *, to_apply: bool) -> None:
        """Records that a loss was scaled, which begins a step of a `LossScaleOptimizer`.

        Args:
            scaled_by: float32 scalar tensor.
            to_apply: bool. True if `apply` unscales, False if `unscale` does.
        """

    def begin_by_hand(self, grads: Sequence[Any]) -> None:
        """Records that the user has multiplied the loss of these gradients by the loss scale."""

    def unscale(
        self,
        grads: Sequence[Any],
        optimizer: Any = None,
        *,
        by_tape: bool = False,
        may_skip: bool = True,
    ) -> list[Any]:
        """Divides gradients by the factor of the loss.

        Args:
            grads: sequence of gradients.
            optimizer: the optimizer of the gradients; None for the only one.
            by_tape: bool. Whether the tape has done so. Defaults to False.
            may_skip: bool. Whether a step can be skipped, so that they may have to be tested.
                Defaults to True.
        """
        return list(grads)

    def unscale_early(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Unscales gradients that `apply` would unscale, before a wrapper sees them."""
        return grads

    def refuse_tape_beside_scale(self) -> None:
        """Refuses a tape that scales after a loss was scaled otherwise."""

    def by_tape(self, losses: Sequence[tf.Tensor]) -> None:
        """Records that a tape has scaled losses, and unscaled the gradients.

        Args:
            losses: sequence of tensors, not scaled.
        """

    def whole_step(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager in which one call, `minimize`, makes a whole step.

        It may come between the calls of another step, which it does not affect.
        """
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def apply(self, optimizer: Any, variables: Iterable[Any]) -> Iterator[GradientState]:
        """Context manager in which gradients are applied, which it records at the end.

        Args:
            optimizer: the optimizer.
            variables: iterable of the variables that the gradients are applied to.
        """
        yield GradientState(losses=self.losses())

    def update(self, *, begins_anew: bool = False) -> tuple[Truth, Callable[[], None]]:
        """Records that all optimizers have made their steps.

        Args:
            begins_anew: bool. Whether it is right without any step. Defaults to False.

        Returns:
            tuple of whether a step was made, and of a function that reports that none was.
        """
        return True, lambda: None

    def as_before_an_exception(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that an exception leaves with the record as it was.

        It is for calls in which users' code may make other calls before it raises.
        """
        return contextlib.nullcontext()

    def losses(self) -> list[tf.Tensor]:
        """Returns the unscaled losses of this step, as far as they are known here."""
        return list(self._notes().losses)

    def collect_reports(self) -> None:
        """Gives the warnings of functions that XLA has compiled, which cannot call Python."""
        if self.reports is not None:
            self.reports.collect()

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {}

    def _notes(self) -> _Notes:
        graph = host.current_graph()
        of_threads = self._in_eager
        if graph is not None:
            # The graph has the notes about it, so that they keep no graph alive.
            if not hasattr(graph, "_keras_mp_notes"):
                graph._keras_mp_notes = {}
            of_threads = graph._keras_mp_notes.setdefault(self, weakref.WeakKeyDictionary())
        thread = threading.current_thread()
        try:
            return of_threads[thread]
        except KeyError:
            return of_threads.setdefault(thread, _Notes())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Calls":
        return type(self)(copy.deepcopy(self._loss_scale, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._loss_scale,)


class RecordedCalls(Calls, abc.ABC):
    """Calls that scale, and that are recorded in variables, for functions run without Python."""

    scales = True
    reports: host.HostCallback
    # The length of a report.
    _report_size = 1
    # Whether all threads make one step together. Otherwise each makes its own.
    _is_shared = False

    def __init__(self, loss_scale: LossScaleValue) -> None:
        super().__init__(loss_scale)
        # A graph of TensorFlow 1 saves all variables that it has, and makes its calls once.
        self._has_variables = not host.in_v1_graph()
        if self._has_variables:
            self._facts = host.local_variable("facts", 0)
            self._scaled_by = host.local_variable("scaled_by", 1.0, tf.float32)
            self.reports = host.HostCallback(self._report, size=self._report_size)
        # Graphs whose calls are a part of a step only. While there are any, eager code reads the
        # variable, since it cannot know when these functions run.
        self._open_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._latest_thread: int | None = None

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the record and the buffer of reports."""
        if not self._has_variables:
            return {}
        own = {"facts": self._facts, "scaled_by": self._scaled_by}
        return {**own, **self.reports.variables("call_report")}

    def _so_far(self) -> Facts:
        """Returns the facts of the step that is under way."""
        notes, graph = self._notes(), host.current_graph()
        if notes.facts is not None and self._is_current(notes, graph):
            return notes.facts
        if not self._are_variables_in_use():
            return notes.facts or Facts()
        if graph is None:
            return Facts(int(tf.convert_to_tensor(self._facts)))
        self._open_graphs.add(graph)
        notes.is_open = True
        return Facts(tensor=tf.convert_to_tensor(self._facts))

    def _are_variables_in_use(self) -> bool:
        return self._has_variables and not host.in_v1_graph()

    def _is_current(self, notes: _Notes, graph: Any) -> bool:
        """Whether this thread made the last call here, and no function may have made one since."""
        if not self._are_variables_in_use():
            return True
        if graph is not None:
            # A function may have been called that is not traced again.
            return notes.uses == self._uses(graph)
        if self._is_shared and self._latest_thread != threading.get_ident():
            return False
        # Outside of graphs, facts are those of an int.
        return notes.facts is not None and bool(has_begun(notes.facts)) and not self._open_graphs

    def _uses(self, graph: Any) -> int:
        """Returns how many operations of a graph take the variable of the facts; calls do."""
        if tf.distribute.in_cross_replica_context():
            return -1
        handle = self._facts.handle
        inside = [inner for outer, inner in graph.captures if outer is handle]
        return sum(len(tensor.consumers()) for tensor in inside)

    def _note(self, facts: Facts, *, before: Facts | None = None, ends: bool = False) -> None:
        """Records the facts after a call.

        Args:
            facts: the facts.
            before: the facts before the call, if other threads may note other facts at the same
                time. Defaults to None.
            ends: bool. Whether the call ends a step. Defaults to False.
        """
        notes, graph = self._notes(), host.current_graph()
        if self._are_variables_in_use():
            if before is None:
                self._facts.assign(facts.value, read_value=False)
            elif facts is not before:
                # An addition of bits is atomic, and so in any order with those of others.
                self._facts.assign_add(facts.value - before.value, read_value=False)
        if graph is not None:
            (self._open_graphs.discard if ends and not notes.is_open else self._open_graphs.add)(
                graph
            )
            if self._are_variables_in_use():
                notes.uses = self._uses(graph)
        self._latest_thread = threading.get_ident()
        notes.facts = facts

    def _note_scale(self, scaled_by: tf.Tensor) -> None:
        self._notes().scaled_by = scaled_by
        if self._are_variables_in_use():
            self._scaled_by.assign(scaled_by, read_value=False)

    def _known_scale(self) -> tf.Tensor | None:
        """Returns the factor of the losses, if this thread has noted it here for this step."""
        notes = self._notes()
        is_current = notes.facts is not None and self._is_current(notes, host.current_graph())
        return notes.scaled_by if is_current else None

    @abc.abstractmethod
    def _report(self, numbers: list[int], line: messages.Line | None) -> None:
        """Warns of a wrong call, given the numbers that were posted."""
