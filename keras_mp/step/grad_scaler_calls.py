"""The calls of a `GradScaler`.

PyTorch's AMP feature proposal, "Gradient scaling".
"""

import contextlib
import enum
import functools
import operator
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import finiteness, gradients
from keras_mp.step.calls import Calls, GradientState, LossScaleValue, RecordedCalls
from keras_mp.step.facts import (
    APPLIED,
    BY_TAPE,
    EVERY_FACT,
    JUST_UNSCALED,
    MAX_OPTIMIZERS,
    OTHERS,
    OVERFLOWED,
    SCALED,
    SPOILED,
    UNNAMED,
    UNSCALED,
    Facts,
    bits_of,
    bits_of_any,
    both,
    negated,
)
from keras_mp.step.record import Record, Truth
from keras_mp.support import host, messages
from keras_mp.support.references import reference
from keras_mp.support.selection import chosen


class Call(enum.IntEnum):
    """A call of a `GradScaler`."""

    SCALE = 0
    UNSCALE = 1
    STEP = 2
    UPDATE = 3
    TAPE = 4


class UnscaledGradScalerCalls(Calls):
    """The calls of a `GradScaler` that scales nothing.

    They keep the losses until `update`.
    """

    def scale(self, losses: Any, scaled_by: tf.Tensor | None = None) -> Any:
        """Notes losses, and returns them."""
        earlier = self._record.notes().losses
        losses = super().scale(losses, scaled_by)
        self._record.notes().losses = (*earlier, *self._record.notes().losses)
        return losses

    def refuse_tape_beside_scale(self) -> None:
        """Refuses a tape that scales losses after a loss was scaled in another way."""

    def by_tape(self, losses: Sequence[tf.Tensor]) -> None:
        """Records that a tape has scaled losses, and unscaled the gradients.

        Args:
            losses: sequence of tensors, not scaled.
        """

    @contextlib.contextmanager
    def applying(self, optimizer: Any, variables: Iterable[Any]) -> Iterator[GradientState]:
        """Context manager in which an optimizer makes a step."""
        yield GradientState(losses=self.losses())

    def update(self, *, begins_anew: bool = False) -> tuple[Truth, Callable[[], None]]:
        """Records that all optimizers have made their steps.

        Args:
            begins_anew: bool. Whether the call is right even if no step was made. Defaults to
                False.

        Returns:
            tuple of whether a step was made, and of a function that reports that none was.
        """
        self._record.notes().losses = ()
        return True, lambda: None


class GradScalerCalls(RecordedCalls[Facts], UnscaledGradScalerCalls):
    """The calls of a `GradScaler`, which all threads share.

    A wrong call is an error where Python can tell, which is in eager and while a function is
    traced. Where it only shows at run time, there is a warning, and the step is not made.
    """

    _report_size = 3

    def __init__(self, loss_scale: LossScaleValue) -> None:
        super().__init__(loss_scale)
        self._lock = threading.RLock()
        self._optimizers = _NumberedOptimizers()

    def _new_record(self) -> Record[Facts]:
        return Record(Facts, lambda tensor: Facts(tensor=tensor), is_shared=True)

    def scale(self, losses: Any, scaled_by: Any = None) -> Any:
        """Multiplies losses, by the same number between two updates."""
        flat = [_checked_loss(loss) for loss in tf.nest.flatten(losses)]
        with self._lock:
            facts, notes = self._record.state(), self._record.notes()
            _raise(Call.SCALE, UNNAMED, facts)
            goes_on = facts.has(SCALED)
            if scaled_by is None:
                scaled_by = chosen(goes_on, self._scale_of_step, self._loss_scale)
            scaled = [gradients.scale_loss(loss, scaled_by) for loss in flat]
            if goes_on is not True or facts.has(bits_of_any(JUST_UNSCALED)) is not False:
                just_unscaled = bits_of_any(JUST_UNSCALED)
                self._record.note(facts.changed(add=SCALED, remove=just_unscaled))
            self._record.note_scale(scaled_by)
            notes.losses = (*notes.losses, *flat) if goes_on is True else tuple(flat)
        return tf.nest.pack_sequence_as(losses, scaled)

    def unscale(
        self,
        grads: Sequence[Any],
        optimizer: Any = None,
        *,
        by_tape: bool = False,
        may_skip: bool = True,
    ) -> list[Any]:
        """Divides gradients by the factor of the losses."""
        unscaled = gradients.unscale(grads, self._scale_of_step())
        finite = finiteness.all_finite(unscaled) if may_skip else True
        with self._lock:
            facts = self._record.state()
            index = self._optimizers.index(optimizer, facts.number)
            if index == OTHERS:
                raise ValueError(
                    f"A GradScaler keeps track of {MAX_OPTIMIZERS} optimizers. Leave the gradients "
                    "of further ones scaled: step() unscales them. "
                    f"Received: optimizer={optimizer!r}"
                )
            _raise(Call.UNSCALE, index, facts, or_else=SCALED)
            after = facts.changed(add=bits_of(index, UNSCALED | JUST_UNSCALED))
            after = after.changed(add=bits_of(index, OVERFLOWED), when=negated(_in_python(finite)))
            if facts.number is None and facts.has(SCALED) is not True:
                # Otherwise the loss is scaled here, and `applying` checks its gradients.
                is_wrong = tf.convert_to_tensor(negated(_is_right(Call.UNSCALE, index, facts)))
                self.reports.watch()
                self._post(Call.UNSCALE, index, facts, when=is_wrong)
                after = after.changed(add=bits_of(index, SPOILED), when=is_wrong)
            self._record.note(after, before=facts)
            self._record.notes().unclipped[index] = list(unscaled)
        return unscaled

    def refuse_tape_beside_scale(self) -> None:
        """Raises an error if a loss was scaled since the last update."""
        _raise(Call.TAPE, UNNAMED, self._record.state())

    def by_tape(self, losses: Sequence[tf.Tensor]) -> None:
        """Records that a tape has scaled losses, and unscaled the gradients."""
        with self._lock:
            facts, notes = self._record.state(), self._record.notes()
            known = notes.losses if facts.has(BY_TAPE) is True else ()
            self._record.note(facts.changed(add=BY_TAPE))
            self._record.note_scale(self._loss_scale())
            notes.losses = (*known, *losses)

    @contextlib.contextmanager
    def applying(self, optimizer: Any, variables: Iterable[Any]) -> Iterator[GradientState]:
        """Context manager in which an optimizer makes a step.

        It records the step. A step that raises an exception, or that is refused, does not count.
        """
        del variables
        with self._lock:
            scaled_by = self._scale_of_step()
            facts, notes = self._record.state(), self._record.notes()
            index = self._optimizers.index(optimizer, facts.number)
            _raise(Call.STEP, index, facts, or_else=SCALED)
            given, after = self._given(index, facts, scaled_by)
            # Other threads have to know of the step while it is made.
            self._record.note(after, before=facts)
            notes.unclipped = {
                i: grads for i, grads in notes.unclipped.items() if i not in (UNNAMED, index)
            }
        try:
            yield given
        except BaseException:
            with self._lock:
                if facts.number is not None:
                    changed, now = facts.ones ^ after.ones, self._record.in_variable()
                    undone = now.changed(add=facts.ones & changed, remove=changed)
                    self._record.note(undone, before=now)
            raise
        if given.is_allowed is not None:
            # The branch that refuses the step also takes the variable of the facts.
            self._record.note_uses()

    def _given(self, index: int, facts: Facts, scaled_by: tf.Tensor) -> tuple[GradientState, Facts]:
        """Returns the state of an optimizer's gradients, and the facts after its step."""
        # If gradients were unscaled without an optimizer, they belong to the first one to make a
        # step.
        unnamed = bits_of(UNNAMED, UNSCALED | JUST_UNSCALED | OVERFLOWED)
        if_unscaled = BY_TAPE | bits_of(UNNAMED, UNSCALED) | bits_of(index, UNSCALED)
        is_unscaled, also_wrong = facts.has(if_unscaled), 0
        if facts.has(SCALED) is True and is_unscaled is not True:
            # Gradients that another function has unscaled are refused.
            is_unscaled, also_wrong = False, if_unscaled
        is_allowed = _is_right(Call.STEP, index, facts, also_wrong)
        overflowed = facts.has(bits_of(UNNAMED, OVERFLOWED) | bits_of(index, OVERFLOWED))
        was_finite = None
        if is_unscaled is not False:
            was_finite = tf.convert_to_tensor(negated(overflowed))
        noted = self._record.notes().unclipped
        unclipped = [gradient for i in (UNNAMED, index) for gradient in noted.get(i, [])]
        scaled = negated(is_unscaled)
        given = GradientState(
            scaled,
            scaled_by,
            lambda: is_unscaled,
            self.losses(),
            unclipped,
            was_finite,
            None if is_allowed is True else tf.convert_to_tensor(is_allowed),
            functools.partial(self._refuse, index, facts),
        )
        after = facts if is_unscaled is False else facts.changed(remove=unnamed)
        if is_allowed is not True:
            self.reports.watch()
        return given, after.changed(add=bits_of(index, APPLIED))

    def update(self, *, begins_anew: bool = False) -> tuple[Truth, Callable[[], None]]:
        """Records that all steps were made.

        After that, nothing is known.
        """
        with self._lock:
            facts, notes = self._record.state(), self._record.notes()
            has_stepped = _is_right(Call.UPDATE, UNNAMED, facts)
            if has_stepped is False and not begins_anew:
                _raise(Call.UPDATE, UNNAMED, facts)
            self._record.note(Facts())
            notes.losses, notes.scaled_by, notes.state = (), None, None
            notes.unclipped = {}
        if isinstance(has_stepped, bool) or begins_anew:
            return has_stepped, lambda: None
        self.reports.watch()
        return has_stepped, lambda: self._post(Call.UPDATE, UNNAMED, facts, tf.constant(True))

    def _scale_of_step(self) -> tf.Tensor:
        """Returns the factor of the losses, a float32 scalar tensor."""
        known = self._record.scaled_by()
        return self._record.scaled_by_in_variable() if known is None else known

    def _refuse(self, index: int, facts: Facts) -> None:
        self._post(Call.STEP, index, facts, tf.constant(True))
        self._record.assign(facts.changed(add=bits_of(UNNAMED, APPLIED)))

    def _post(self, call: Call, index: int, facts: Facts, when: tf.Tensor) -> None:
        numbers = [tf.constant(int(value), tf.int64) for value in (call, index)]
        self.reports.post(tf.stack([*numbers, facts.tensor]), when=when)

    def _report(self, numbers: list[int], line: messages.Line | None) -> None:
        # If the call was right, it was refused because another function had unscaled the gradients.
        what = _what_is_wrong(*numbers) or UNSCALED_ELSEWHERE
        messages.warn(f"The step was not made: {what}" if numbers[0] == Call.STEP else what, line)


# The collection of the optimizers that a graph uses.
_USED = "keras_mp_optimizers"


class _NumberedOptimizers:
    """Numbers the optimizers of a scaler for as long as they live."""

    def __init__(self) -> None:
        self._references: dict[int, Callable[[], Any]] = {}
        self._was_left_out = False

    def index(self, optimizer: Any, facts: int | None) -> int:
        """Returns the number of an optimizer; None stands for the only one.

        A graph keeps the optimizers that it uses alive, since their numbers are part of the graph.

        Args:
            optimizer: the optimizer, or None.
            facts: int. The facts of the step; None if they are only known at run time. The number
                of an optimizer that is gone is used again once no fact is about it.

        Raises:
            ValueError: `optimizer` is None, and there are several.
        """
        graph, references = host.current_graph(), self._references.items()
        if graph is not None and optimizer is not None:
            graph.add_to_collection(_USED, optimizer)
        living = {i: each for i, reference in references if (each := reference()) is not None}
        if optimizer is None:
            if len(living) > 1:
                raise ValueError(_WHOSE.format([*living.values()]))
            self._was_left_out = True
            return next(iter(living), UNNAMED)
        for index, each in living.items():
            if each == optimizer if isinstance(optimizer, types.MethodType) else each is optimizer:
                return index
        if living and self._was_left_out and not isinstance(optimizer, types.FunctionType):
            raise ValueError(_WHOSE.format([*living.values(), optimizer]))
        never_given = [i for i in range(1, MAX_OPTIMIZERS + 1) if i not in self._references]
        free = [i for i in self._references if i not in living]
        if facts is not None:
            free = [index for index in free if not facts & bits_of(index, EVERY_FACT)]
        index = next(iter([*never_given, *free]), OTHERS)
        if index != OTHERS:
            self._references[index] = reference(optimizer)
        return index


def _checked_loss(loss: Any) -> tf.Tensor:
    if loss is None:
        raise TypeError("A loss must be a floating-point tensor. Received: None")
    return tf.convert_to_tensor(loss)


def _in_python(truth: Truth) -> Truth:
    return bool(truth) if tf.executing_eagerly() else truth


def _raise(call: Call, index: int, facts: Facts, *, or_else: int = 0) -> None:
    """Raises an error about a call that is known to be wrong.

    Of the facts that are not known, those in `or_else` are taken to be true.
    """
    known = facts.ones if facts.number is not None else facts.ones | or_else
    what = _what_is_wrong(call, index, known)
    if what is not None:
        raise ValueError(what)


_WHOSE = (
    "GradScaler.unscale() was called without an optimizer, and there are several, of which each "
    "has a verdict of its own. Say whose gradients they are: scaler.unscale(gradients, optimizer). "
    "Received: optimizer=None with {}"
)


def _rules(call: int, index: int) -> tuple[dict[int, str], dict[int, str]]:
    """Returns the rules of a call of an optimizer, and the messages about them.

    Returns:
        tuple of two dicts from facts to messages. Before the call, no fact of the first dict may be
        true; of each entry in the second one, some fact has to be true.
    """
    if call == Call.UPDATE:
        return {}, {bits_of_any(APPLIED | SPOILED): _NO_STEP}
    if call in (Call.SCALE, Call.TAPE):
        return {BY_TAPE if call == Call.SCALE else SCALED: _TWO_WAYS}, {}
    applied = 0 if index == OTHERS else bits_of(index, APPLIED)
    if call == Call.UNSCALE:
        wrong = {applied: _TOO_LATE, BY_TAPE | bits_of(index, JUST_UNSCALED): _TWICE}
    else:
        spoiled = bits_of(UNNAMED, SPOILED) | bits_of(index, SPOILED)
        wrong = {applied: _NO_UPDATE, spoiled: _WRONGLY_UNSCALED}
    return wrong, {SCALED | BY_TAPE: _NOT_SCALED.format(Call(call).name.lower())}


def _is_right(call: Call, index: int, facts: Facts, also_wrong: int = 0) -> Truth:
    """Whether a call is right.

    No fact of `also_wrong` may be true either.
    """
    wrong, needed = _rules(call, index)
    any_wrong = functools.reduce(operator.or_, wrong, also_wrong)
    return both(*map(facts.has, needed), negated(facts.has(any_wrong)))


def _what_is_wrong(call: int, index: int, facts: int) -> str | None:
    """Returns the message about a wrong call, or None if the call is right.

    All facts are given.
    """
    wrong, needed = _rules(call, index)
    broken = [message for bits, message in wrong.items() if facts & bits]
    broken += [message for bits, message in needed.items() if not facts & bits]
    return broken[0] if broken else None


_SCALER_EXAMPLE = """
    with tf.GradientTape() as tape:
        scaled_loss = scaler.scale(loss_fn())
    scaler.step(optimizer, zip(tape.gradient(scaled_loss, variables), variables))
    scaler.update()"""
_NO_UPDATE = (
    "GradScaler.step() was called twice with this optimizer, and update() was not called in "
    "between. Call update() once after all optimizers have made their steps; after an exception, "
    f"it begins anew:{_SCALER_EXAMPLE}"
)
_WRONGLY_UNSCALED = (
    "GradScaler.step() was given gradients for which unscale() was called wrongly, as a warning "
    "said: they would be too small. Call update(), which begins anew, and compute them again."
)
_NO_STEP = (
    "GradScaler.update() was called without a step() since the last update(), so the loss scale "
    f"cannot move. Call it once after all optimizers have made their steps:{_SCALER_EXAMPLE}"
)
_NOT_SCALED = (
    "GradScaler.{}() was called, and no loss was scaled since the last update(). If these are "
    "gradients from before it, they are scaled by another number: make the steps of all optimizers "
    f"first. If no loss was scaled, scale it under the tape:{_SCALER_EXAMPLE}"
)
_TWICE = (
    "GradScaler.unscale() was given gradients that are unscaled already: do so once for each "
    "optimizer, with gradients that were added up before, or after each scale()."
)
_TOO_LATE = (
    "GradScaler.unscale() was called after step() with the same optimizer, which unscales by "
    f"itself. Unscale before it, or not at all, and call update() after it:{_SCALER_EXAMPLE}"
)
_TWO_WAYS = (
    "A LossScaleGradientTape scales the loss by itself, and unscales the gradients: a "
    "GradScaler.scale() beside it, before the next update(), makes it unclear what is scaled."
)
UNSCALED_ELSEWHERE = (
    "GradScaler.step() was given gradients of a loss that was scaled just before, although "
    "unscale() had been called for the optimizer already, so it is unclear whether they are scaled."
)
