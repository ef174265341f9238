"""Which calls of a `GradScaler` were made since its last `update`, and whether one was wrong.

A wrong call is an error where Python knows, which is in eager and while a function is traced. What
only run time can know is a warning, and the step in question is not made.
"""

import contextlib
import enum
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.step import overflows
from keras_mp.step.knowledge import Knowledge
from keras_mp.step.scaled_step import Guard
from keras_mp.support import host, messages

# The facts. Of all: a loss was scaled; a tape has scaled the loss, and unscaled its gradients.
_SCALED, _BY_TAPE = 1, 2
# Of each optimizer: were gradients unscaled, since the last loss was scaled too, and was one of
# them not finite; was a step made; were they unscaled wrongly? The step of nobody is a refused one.
_UNSCALED, _JUST_UNSCALED, _OVERFLOWED, _STEPPED, _SPOILED = 1, 2, 4, 8, 16
# Whose gradients they are: of one that was not named; of one of so many; of any other.
_ANYBODY, MOST, _OTHERS = 0, 10, 11


def _of(index: int, facts: int) -> int:
    return facts << (2 + 5 * index)


def _of_any(facts: int) -> int:
    return sum(_of(index, facts) for index in range(_OTHERS + 1))


def _spoiled(index: int) -> int:
    return _of(_ANYBODY, _SPOILED) | _of(index, _SPOILED)


class _Call(enum.IntEnum):
    SCALE = 0
    UNSCALE = 1
    STEP = 2
    UPDATE = 3
    TAPE = 4


def _what_is_wrong(call: int, index: int, facts: int) -> str | None:
    """Says what is wrong with a call; None if it is right.

    Args:
        call: a `_Call`.
        index: int. Whose gradients they are.
        facts: int, what was known before the call.
    """
    if call == _Call.UPDATE:
        return None if facts & _of_any(_STEPPED | _SPOILED) else _NO_STEP
    if call == _Call.SCALE:
        return _TWO_WAYS if facts & _BY_TAPE else None
    if call == _Call.TAPE:
        return _TWO_WAYS if facts & _SCALED else None
    if index != _OTHERS and facts & _of(index, _STEPPED):
        return _NO_UPDATE if call == _Call.STEP else _TOO_LATE
    if call == _Call.STEP and facts & _spoiled(index):
        return _WRONGLY_UNSCALED
    if call == _Call.UNSCALE and facts & (_BY_TAPE | _of(index, _JUST_UNSCALED)):
        return _TWICE
    if not facts & (_SCALED | _BY_TAPE):
        return _NOT_SCALED.format("unscale" if call == _Call.UNSCALE else "step")
    return None


class Step(NamedTuple):
    """What is known of the gradients that are given to `step`.

    Attributes:
        scaled: bool, or bool scalar tensor. Are they still scaled?
        was_finite: bool scalar tensor, the verdict when they were unscaled; None if nobody did.
        unscaled: the gradients as they were then, as far as they are known.
        guard: refuses the step if the call is wrong; None where that is an error.
    """

    scaled: bool | tf.Tensor
    was_finite: tf.Tensor | None
    unscaled: list[Any]
    guard: Guard | None


class _Mine(threading.local):
    """What one thread remembers of the graph, or the eager code, in which its last call was made.

    Attributes:
        graph: reference to the graph; None for eager.
        seen: facts that were noted in that graph since its last `update`.
        facts: all facts after the last call, a tensor of that graph; None in eager.
        uses: how many operations of the graph take the variable of the facts.
        scaled_by: what losses are multiplied by, a tensor of that graph.
        losses: the losses that were scaled there.
        unscaled: by the number of an optimizer, what returns its gradients as they were when they
            were unscaled.
    """

    graph: weakref.ref[Any] | None = None
    seen = 0
    facts: tf.Tensor | None = None
    uses = 0
    scaled_by: tf.Tensor | None = None
    losses: tuple[tf.Tensor, ...] = ()

    def __init__(self) -> None:
        self.unscaled: dict[int, Callable[[], list[Any]]] = {}


class ScalerCalls:
    """The calls of one `GradScaler`, which all threads share."""

    def __init__(self) -> None:
        self._mine = _Mine()
        self._known = Knowledge()
        self._scaled_by = host.local_variable("scaled_by", 1.0, tf.float32)
        self._optimizers = _Optimizers()
        self._reports = host.HostCallback(_report, size=3)

    def scale(self, loss_scale: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Notes that losses are scaled.

        Args:
            loss_scale: returns the current scale, a float32 scalar tensor.

        Returns:
            What to multiply them by, a float32 scalar tensor: the same for all between two updates.
        """
        seen, facts = self._so_far()
        _raise(_Call.SCALE, _ANYBODY, facts if isinstance(facts, int) else seen)
        goes_on = bool((facts if isinstance(facts, int) else seen) & _SCALED)
        if goes_on:
            scaled_by = self.scaled_by()
        elif isinstance(facts, int):
            scaled_by = loss_scale()
        else:
            is_first = tf.equal(facts & _SCALED, 0)
            scaled_by = tf.where(is_first, loss_scale(), self._scaled_by)
        if not goes_on:
            self._mine.losses = ()
        if not seen & _SCALED or seen & _of_any(_JUST_UNSCALED):
            before = ~_of_any(_JUST_UNSCALED)
            self._note(facts & before | _SCALED, seen & before | _SCALED)
        self._mine.scaled_by = scaled_by
        self._scaled_by.assign(scaled_by, read_value=False)
        return scaled_by

    def saw(self, losses: Iterable[tf.Tensor], are_all: bool = False) -> None:
        """Remembers losses as they are before they are scaled.

        Args:
            losses: iterable of tensors.
            are_all: bool. Do they replace those that were seen before?
        """
        self._mine.losses = (*(() if are_all else self._mine.losses), *losses)

    def losses(self) -> list[tf.Tensor]:
        """The losses that were scaled here since the last `update`."""
        return [loss for loss in self._mine.losses if _is_of_this_graph(loss)]

    def scaled_by(self) -> tf.Tensor:
        """What the losses were multiplied by, a float32 scalar tensor."""
        if self._is_known_here(host.current_graph()) and self._mine.scaled_by is not None:
            return self._mine.scaled_by
        return tf.convert_to_tensor(self._scaled_by)

    def unscale(
        self, optimizer: Any, grads: Sequence[Any], finite: Callable[[], tf.Tensor] | None
    ) -> None:
        """Notes that gradients are unscaled.

        Args:
            optimizer: whose they are; None for the only one.
            grads: the gradients, unscaled.
            finite: tells whether they are finite, a bool scalar tensor; None where that does not
                count.
        """
        index = self._optimizers.index(optimizer)
        if index == _OTHERS:
            raise ValueError(
                f"A GradScaler keeps track of {MOST} optimizers. Leave the gradients of further "
                f"ones scaled: step() unscales them. Received: optimizer={optimizer!r}"
            )
        seen, facts = self._so_far()
        news = _of(index, _UNSCALED | _JUST_UNSCALED)
        overflowed = news | _of(index, _OVERFLOWED)
        if isinstance(facts, int):
            _raise(_Call.UNSCALE, index, facts)
            is_finite = finite is None or bool(finite())
            after = news if is_finite else overflowed
        else:
            _raise(_Call.UNSCALE, index, seen | _SCALED)
            after = news if finite is None else tf.where(finite(), *map(_int64, (news, overflowed)))
            if not seen & _SCALED:
                # Of gradients that are scaled here, `step` will tell.
                wrong = _BY_TAPE | _of(index, _JUST_UNSCALED | _STEPPED)
                is_wrong = tf.not_equal(facts & (_SCALED | wrong), _SCALED)
                self._reports.watch()
                self._reports.post(_letter(_Call.UNSCALE, index, facts), when=is_wrong)
                after = tf.where(is_wrong, _int64(news | _of(index, _SPOILED)), after)
        self._note(facts | after, seen | news)
        self._mine.unscaled[index] = overflows.remember(grads)

    def by_tape(self, scaled_by: tf.Tensor) -> None:
        """Notes that a tape has scaled a loss, and unscaled the gradients.

        Args:
            scaled_by: float32 scalar tensor, what it has found to be low enough.
        """
        seen, facts = self._so_far()
        _raise(_Call.TAPE, _ANYBODY, facts if isinstance(facts, int) else seen)
        self._note(facts | _BY_TAPE, seen | _BY_TAPE)
        self._mine.scaled_by = None
        self._scaled_by.assign(scaled_by, read_value=False)

    @contextlib.contextmanager
    def step(self, optimizer: Any) -> Iterator[Step]:
        """Notes that an optimizer makes a step, which is made in the context.

        One that raises an exception, or that is refused, was not made.

        Args:
            optimizer: the optimizer.
        """
        index = self._optimizers.index(optimizer)
        seen, facts = self._so_far()
        # What was unscaled for nobody in particular is of the first optimizer that makes a step.
        unnamed = _of(_ANYBODY, _UNSCALED | _JUST_UNSCALED | _OVERFLOWED)
        unscaled = _BY_TAPE | _of(_ANYBODY, _UNSCALED) | _of(index, _UNSCALED)
        overflowed = _of(_ANYBODY, _OVERFLOWED) | _of(index, _OVERFLOWED)
        once = _spoiled(index) | (0 if index == _OTHERS else _of(index, _STEPPED))
        guard = None
        if isinstance(facts, int):
            _raise(_Call.STEP, index, facts)
            scaled = not facts & unscaled
            was_finite = None if scaled else tf.constant(not facts & overflowed)
        else:
            _raise(_Call.STEP, index, seen | _SCALED)
            self._reports.watch()
            if seen & _SCALED and not seen & unscaled:
                # What another function has unscaled before is refused.
                scaled, was_finite = True, None
                is_allowed = tf.equal(facts & (_SCALED | unscaled | once), _SCALED)
            else:
                scaled = False if seen & unscaled else tf.equal(facts & unscaled, 0)
                was_finite = tf.equal(facts & overflowed, 0)
                is_allowed = tf.not_equal(facts & (_SCALED | _BY_TAPE), 0)
                is_allowed &= tf.equal(facts & once, 0)
            guard = Guard(is_allowed, lambda: self._refuse(index, facts))
        unclipped = [self._mine.unscaled.pop(i, list)() for i in (_ANYBODY, index)]
        stepped = _of(index, _STEPPED)
        after = facts if scaled is True else facts & ~unnamed
        self._note(after | stepped, seen & ~unnamed | stepped)
        try:
            yield Step(scaled, was_finite, [*unclipped[0], *unclipped[1]], guard)
        except BaseException:
            if isinstance(facts, int):
                # Other threads may have noted steps of theirs meanwhile.
                self._note(self._known.read() & ~(stepped & ~facts) | facts & unnamed, 0)
            raise
        if guard is not None:
            # The branch in which it is refused takes the variable of the facts.
            self._mine.uses = self._uses(host.current_graph())

    def _refuse(self, index: int, facts: tf.Tensor) -> None:
        self._post(_Call.STEP, index, facts)
        self._known.variable.assign(facts | _of(_ANYBODY, _STEPPED), read_value=False)

    def update(self) -> tuple[bool | tf.Tensor, Callable[[], None]]:
        """Notes that all steps were made.

        Returns:
            tuple of whether there was one, a bool or bool scalar tensor, and of a function that
            says that there was none.
        """
        seen, facts = self._so_far()
        steps = _of_any(_STEPPED | _SPOILED)
        self._note(0, 0)
        mine = self._mine
        mine.losses, mine.scaled_by, mine.facts = (), None, None
        mine.unscaled.clear()
        if isinstance(facts, int):
            return bool(facts & steps), lambda: _raise(_Call.UPDATE, 0, facts)
        if seen & steps:
            return True, lambda: None
        self._reports.watch()
        has_stepped = tf.not_equal(facts & steps, 0)
        return has_stepped, lambda: self._post(_Call.UPDATE, _ANYBODY, facts)

    def collect_reports(self) -> None:
        """Says what functions that XLA compiled had to say."""
        self._reports.collect()

    def variables(self) -> dict[str, tf.Variable]:
        """The variables of which a checkpoint knows nothing, by name."""
        return {
            "facts": self._known.variable,
            "scaled_by": self._scaled_by,
            "call_report": self._reports.buffer,
        }

    def _so_far(self) -> tuple[int, int | tf.Tensor]:
        """What was noted in this graph for certain, and all that is known: an int only in eager."""
        mine, graph = self._mine, host.current_graph()
        if graph is None:
            return 0, self._known.here(in_all_threads=True)
        # What a function does changes the facts each time that it runs.
        self._known.are_looked_up = True
        if self._is_known_here(graph):
            return mine.seen, mine.facts
        return 0, self._known.at_run_time()

    def _is_known_here(self, graph: Any) -> bool:
        """Was the last call made in this graph, and none since in a function that it calls?"""
        mine = self._mine
        if graph is None or mine.graph is None or mine.graph() is not graph:
            return False
        # A function may have been called that is not traced again.
        return mine.facts is not None and mine.uses == self._uses(graph)

    def _note(self, facts: int | tf.Tensor, seen: int) -> None:
        mine, graph = self._mine, host.current_graph()
        self._known.note(facts)
        mine.seen, mine.facts, mine.graph = seen, None, None
        if graph is not None:
            mine.facts, mine.graph, mine.uses = facts, weakref.ref(graph), self._uses(graph)

    def _uses(self, graph: Any) -> int:
        """How many operations of a graph take the variable of the facts: calls are among them."""
        if tf.distribute.in_cross_replica_context():
            return -1
        handle = self._known.variable.handle
        inside = [inner for outer, inner in graph.captures if outer is handle]
        return sum(len(tensor.consumers()) for tensor in inside)

    def _post(self, call: _Call, index: int, facts: tf.Tensor) -> None:
        self._reports.post(_letter(call, index, facts), when=tf.constant(True))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ScalerCalls":
        return ScalerCalls()

    def __reduce__(self) -> tuple[Any, ...]:
        return ScalerCalls, ()


class _Optimizers:
    """Numbers the optimizers of a scaler, as long as they, or functions that use them, live."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By number: reference to the optimizer, and the graphs in which it makes steps.
        self._entries: dict[int, tuple[Callable[[], Any], weakref.WeakSet[Any]]] = {}
        self._was_left_out = False

    def index(self, optimizer: Any) -> int:
        """Returns the number of an optimizer, or for None of the only one that there is.

        Raises:
            ValueError: there are several.
        """
        with self._lock:
            living = {i: entry for i, entry in self._entries.items() if entry[0]() is not None}
            if optimizer is None:
                if len(living) > 1:
                    raise ValueError(_WHOSE.format([entry[0]() for entry in living.values()]))
                self._was_left_out = True
                return next(iter(living), _ANYBODY)
            index = self._number(optimizer, living)
            graph = host.current_graph()
            if graph is not None and index != _OTHERS:
                self._entries[index][1].add(graph)
            return index

    def _number(self, optimizer: Any, living: dict[int, Any]) -> int:
        for index, (reference, _) in living.items():
            if reference() == optimizer if _is_method(optimizer) else reference() is optimizer:
                return index
        is_function = isinstance(optimizer, types.FunctionType)
        if living and self._was_left_out and not is_function:
            raise ValueError(_WHOSE.format([*(entry[0]() for entry in living.values()), optimizer]))
        for index in range(1, MOST + 1):
            if index not in living and not (index in self._entries and self._entries[index][1]):
                self._entries[index] = (_reference(optimizer), weakref.WeakSet())
                return index
        return _OTHERS


def _is_method(optimizer: Any) -> bool:
    return isinstance(optimizer, types.MethodType)


def _reference(optimizer: Any) -> Callable[[], Any]:
    try:
        return (weakref.WeakMethod if _is_method(optimizer) else weakref.ref)(optimizer)
    except TypeError:  # what has slots, and none for references
        return lambda: optimizer


def _is_of_this_graph(tensor: tf.Tensor | None) -> bool:
    return tensor is not None and getattr(tensor, "graph", None) is host.current_graph()


def _letter(call: _Call, index: int, facts: tf.Tensor) -> tf.Tensor:
    return tf.stack([_int64(call), _int64(index), facts])


def _int64(value: int) -> tf.Tensor:
    return tf.constant(int(value), tf.int64)


def _report(numbers: list[int], line: messages.Line | None) -> None:
    # What is right by itself was refused since another function had unscaled its gradients.
    what = _what_is_wrong(*numbers) or _ELSEWHERE
    messages.warn(f"The step was not made: {what}" if numbers[0] == _Call.STEP else what, line)


def _raise(call: _Call, index: int, facts: int) -> None:
    what = _what_is_wrong(call, index, facts)
    if what is not None:
        raise ValueError(what)


_EXAMPLE = """
    with tf.GradientTape() as tape:
        scaled_loss = scaler.scale(loss_fn())
    scaler.step(optimizer, zip(tape.gradient(scaled_loss, variables), variables))
    scaler.update()"""
_NO_UPDATE = (
    "GradScaler.step() was called twice with this optimizer, and update() was not called in "
    "between. Call update() once after all optimizers have made their steps; after an exception, "
    f"it begins anew:{_EXAMPLE}"
)
_WRONGLY_UNSCALED = (
    "GradScaler.step() was given gradients for which unscale() was called wrongly, as a warning "
    "said: they would be too small. Call update(), which begins anew, and compute them again."
)
_NO_STEP = (
    "GradScaler.update() was called, and no step() since the last one: there is nothing to learn "
    f"for the loss scale. Call it once after all optimizers have made their steps:{_EXAMPLE}"
)
_NOT_SCALED = (
    "GradScaler.{}() was called, and no loss was scaled since the last update(). If these are "
    "gradients from before it, they are scaled by another number: make the steps of all optimizers "
    f"first. If no loss was scaled, scale it under the tape:{_EXAMPLE}"
)
_TWICE = (
    "GradScaler.unscale() was given gradients that are unscaled already: do so once for each "
    "optimizer, with gradients that were added up before, or after each scale()."
)
_TOO_LATE = (
    "GradScaler.unscale() was called after step() with the same optimizer, which unscales by "
    f"itself. Unscale before it, or not at all, and call update() after it:{_EXAMPLE}"
)
_TWO_WAYS = (
    "A LossScaleGradientTape scales the loss by itself, and unscales the gradients: a "
    "GradScaler.scale() beside it, before the next update(), makes it unclear what is scaled."
)
_ELSEWHERE = (
    "GradScaler.step() was given gradients of a loss that was scaled just before, although "
    "unscale() had been called for the optimizer already, so it is unclear whether they are scaled."
)
_WHOSE = (
    "GradScaler.unscale() was called without an optimizer, and there are several, of which each "
    "has a verdict of its own. Say whose gradients they are: scaler.unscale(gradients, optimizer). "
    "Received: optimizer=None with {}"
)
