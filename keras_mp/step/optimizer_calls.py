"""The calls of a `LossScaleOptimizer`.

RFC 293, "LossScaleOptimizer Overview", lists the four steps that the user and the optimizer take.
There is only one optimizer here, and no `update`: scaling a loss begins the next step.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import gradients, scaled_losses
from keras_mp.step.calls import GradientState, RecordedCalls
from keras_mp.step.record import (
    ALL_BITS,
    APPLIED,
    JUST_UNSCALED,
    SCALED,
    SPOILED,
    TO_APPLY,
    UNNAMED,
    UNSCALED,
    Facts,
    Truth,
    bits_of,
    both,
    either,
    has_begun,
    negated,
)
from keras_mp.support import host, messages
from keras_mp.support.selection import chosen


class _Parts(threading.local):
    """The ids of the variables of the step so far.

    Several functions may each make a part of one step.

    Attributes:
        applied: the ids of the variables whose gradients were applied.
        unscaled: the ids of the variables whose gradients were unscaled for a wrapper.
        is_whole: whether the gradients that are applied next make up the whole step. That is so if
            the step began while another one was under way: gradients that are applied later may
            belong to the other one.
    """

    applied: frozenset[int] = frozenset()
    unscaled: frozenset[int] = frozenset()
    is_whole = False


class OptimizerCalls(RecordedCalls):
    """The calls of a `LossScaleOptimizer`.

    A missing call is reported, and the step is made.
    """

    def __init__(self, loss_scale: Callable[[], tf.Tensor]) -> None:
        super().__init__(loss_scale)
        self._parts_of_step = _Parts()

    def begin(self, scaled_by: tf.Tensor, *, to_apply: bool) -> None:
        """Begins a step, whatever was called before."""
        notes, parts = self._record.notes(), self._parts_of_step
        before = notes.facts or Facts()
        is_under_way = both(has_begun(before), before.has(SCALED)) is True
        # Overlapping steps can be told apart only if different calls unscale their gradients.
        parts.is_whole = is_under_way and apply_unscales(before) is not to_apply
        parts.applied = parts.unscaled = frozenset()
        notes.unclipped.clear()
        self._record.note(Facts(SCALED | TO_APPLY if to_apply else SCALED))
        self._record.note_scale(scaled_by)

    def begin_by_hand(self, grads: Sequence[Any]) -> None:
        """Begins a step that `applying` unscales."""
        self._refuse_results(grads, "apply_gradients(scaled=True)")
        self.begin(self._loss_scale(), to_apply=True)

    def scale(self, losses: Any, scaled_by: tf.Tensor | None = None) -> tf.Tensor:
        """Multiplies a loss (not a structure of losses).

        `begin` records it.
        """
        self._refuse_results([losses], "get_scaled_loss")
        scaled_by = self._loss_scale() if scaled_by is None else scaled_by
        scaled = gradients.scale_loss(losses, scaled_by)
        notes = self._record.notes()
        # The losses since the last step that was made here. If a program makes none, a few are
        # kept.
        notes.losses = (*notes.losses, tf.convert_to_tensor(losses))[-_MOST_LOSSES:]
        notes.scaled_by = scaled_by
        self._remember_results([scaled])
        return scaled

    def unscale(
        self,
        grads: Sequence[Any],
        optimizer: Any = None,
        *,
        by_tape: bool = False,
        may_skip: bool = True,
    ) -> list[Any]:
        """Divides gradients by the factor of the loss, unless the tape has done so."""
        del optimizer, may_skip
        self._refuse_results(grads, "get_unscaled_gradients")
        facts, unscaled = self._record.facts(), list(grads)
        if not by_tape:
            unscaled = gradients.unscale(grads, self._scale_of_step(facts))
        self._note_unscaled(after_unscaling(facts), unscaled)
        self._remember_results(unscaled)
        return unscaled

    def unscale_early(self, grads: Sequence[Any], variables: Iterable[Any]) -> Sequence[Any]:
        """Unscales gradients that `applying` would unscale, before a wrapper sees them."""
        facts, parts = self._record.facts(), self._parts_of_step
        ids = frozenset(id(v) for v in variables)
        is_another_part = bool(parts.unscaled) and parts.unscaled.isdisjoint(ids)
        is_scaled = either(apply_unscales(facts), both(is_another_part, facts.has(_EARLY)))
        if is_scaled is False:
            return grads
        parts.unscaled |= ids
        scale = functools.partial(self._scale_of_step, facts)
        unscaled = gradients.unscale(grads, chosen(is_scaled, scale, lambda: tf.constant(1.0)))
        self._note_unscaled(facts.changed(add=_UNSCALED | _EARLY, when=is_scaled), unscaled)
        return unscaled

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[None]:
        """Context manager that records nothing, and restores the notes of another step."""
        notes = self._record.notes()
        kept = notes.losses, notes.scaled_by, notes.results
        with self.as_before_an_exception():
            yield
        notes.losses, notes.scaled_by, notes.results = kept

    @contextlib.contextmanager
    def applying(self, optimizer: Any, variables: Iterable[Any]) -> Iterator[GradientState]:
        """Context manager in which the step is made.

        It records the step, and warns of missing calls.
        """
        del optimizer
        variables = list(variables)
        notes, applied = self._record.notes(), frozenset(id(v) for v in variables)
        parts, facts = self._parts_of_step, self._record.facts()
        before = frozenset() if parts.is_whole else parts.applied
        # Gradients of other variables may be another part of the step that was applied last.
        goes_on = bool(before) and before.isdisjoint(applied)
        applied = before | applied if goes_on else applied
        is_missing = misses_a_call(facts, goes_on)
        if scaled_losses.are_by_tape(variables):
            is_missing = False
        elif facts.number is None:
            self._warn_at_run_time(facts, goes_on, is_missing)
        elif is_missing:
            messages.warn(missing_call(facts))
            applied = frozenset()
        given = GradientState(
            is_scaled(facts, goes_on),
            self._scale_of_step(facts),
            functools.partial(is_divided, facts, goes_on),
            self.losses(),
            notes.unclipped.pop(UNNAMED, []),
        )
        graph = host.current_graph()
        first = 0 if graph is None else len(graph.get_operations())
        yield given
        with tf.control_dependencies(self._decisions_since(first)):
            self._record.note(after_applying(facts, goes_on), ends=True)
        parts.applied = applied
        notes.losses = ()

    @contextlib.contextmanager
    def as_before_an_exception(self) -> Iterator[None]:
        """Context manager that restores the record if an exception leaves it."""
        parts = self._parts_of_step
        before = parts.applied, parts.unscaled, parts.is_whole
        try:
            with self._record.as_before_an_exception():
                yield
        except BaseException:
            parts.applied, parts.unscaled, parts.is_whole = before
            raise

    def _decisions_since(self, first: int) -> list[tf.Operation]:
        """Returns the operations that make or skip a step.

        The step is noted after them.
        """
        graph = host.current_graph()
        if graph is None or host.in_v1_graph():
            return []
        made = graph.get_operations()[first:]
        return [op for op in made if op.type in ("If", "StatelessIf")] or made[-1:]

    def _note_unscaled(self, facts: Facts, unscaled: Sequence[Any]) -> None:
        self._record.note(facts)
        self._record.notes().unclipped[UNNAMED] = list(unscaled)

    def _scale_of_step(self, facts: Facts) -> tf.Tensor:
        """Returns the factor by which the loss of this step was multiplied.

        The loss scale may have moved since then, by other steps or by another part of this one.
        """
        known = self._record.scaled_by()
        if known is not None:
            return known
        is_noted = both(self._record.has_variables, knows_its_scale(facts))
        return chosen(is_noted, self._record.scaled_by_in_variable, self._loss_scale)

    def _remember_results(self, results: Iterable[Any]) -> None:
        self._record.notes().results = tuple(weakref.ref(r) for r in results if r is not None)

    def _refuse_results(self, values: Iterable[Any], method: str) -> None:
        """Refuses results of the last call.

        They would be scaled or unscaled twice.
        """
        results = {id(ref()) for ref in self._record.notes().results}
        if any(value is not None and id(value) in results for value in values):
            raise ValueError(
                f"{method}() was given values that are already scaled or unscaled: call it once. "
                f"Received: {values!r}"
            )

    def _warn_at_run_time(self, facts: Facts, goes_on: bool, is_missing: Truth) -> None:
        if host.is_compiled_by_xla() and self._record.notes().facts is None:
            self._warn_while_tracing(goes_on)
        was_reported = facts.has(bits_of(UNNAMED, SPOILED))
        is_news = both(is_missing, negated(was_reported))
        self.reports.watch()
        self.reports.post(facts.tensor[tf.newaxis], when=tf.convert_to_tensor(is_news))

    def _warn_while_tracing(self, goes_on: bool) -> None:
        """Warns while tracing of a function that makes no call.

        When it runs, such a function cannot warn.
        """
        if self._record.may_be_changed_elsewhere():
            return
        with tf.init_scope():
            facts = self._record.in_variable()
            if misses_a_call(facts, goes_on):
                messages.warn(missing_call(facts))
                self._record.assign(after_applying(facts, goes_on))

    def _report(self, numbers: list[int], line: messages.Line | None) -> None:
        messages.warn(missing_call(Facts(numbers[0])), line)


# How many losses of a step are looked at if it is skipped.
_MOST_LOSSES = 16


# The following functions tell what follows from the facts after a call. `goes_on` means that the
# variables are not those of the last step, so that this may be another part of that step.

_UNSCALED, _APPLIED, _SPOILED = (bits_of(UNNAMED, fact) for fact in (UNSCALED, APPLIED, SPOILED))
# Gradients were unscaled for a wrapper, while those of other variables may still be scaled.
_EARLY = bits_of(UNNAMED, JUST_UNSCALED)


def is_scaled(facts: Facts, goes_on: bool) -> Truth:
    """Whether the gradients that are applied now are still scaled."""
    is_of_this_step = goes_on or negated(facts.has(_APPLIED))
    return both(is_of_this_step, facts.has(SCALED), negated(facts.has(_UNSCALED)))


def is_divided(facts: Facts, goes_on: bool) -> Truth:
    """Whether a call has unscaled the gradients that are applied now."""
    is_more = both(goes_on, facts.has(_APPLIED), negated(facts.has(SCALED | _SPOILED)))
    return either(facts.has(_UNSCALED), is_more)


def misses_a_call(facts: Facts, goes_on: bool) -> Truth:
    """Whether a call is missing if gradients are applied now."""
    was_scaled = both(has_begun(facts), facts.has(SCALED))
    is_complete = facts.has(TO_APPLY | _UNSCALED)
    is_part = both(goes_on, facts.has(_APPLIED | _UNSCALED))
    return negated(either(both(was_scaled, is_complete), both(negated(was_scaled), is_part)))


def after_applying(facts: Facts, goes_on: bool) -> Facts:
    """Returns the facts after gradients were applied."""
    is_spoiled = both(misses_a_call(facts, goes_on), negated(has_begun(facts)))
    after = Facts(_APPLIED).changed(add=SCALED, when=is_scaled(facts, goes_on))
    after = after.changed(add=_SPOILED, when=is_spoiled)
    return after.changed(add=_EARLY, when=facts.has(_EARLY))


def after_unscaling(facts: Facts) -> Facts:
    """Returns the facts after gradients were unscaled."""
    return facts.changed(remove=ALL_BITS, when=negated(has_begun(facts))).changed(add=_UNSCALED)


def apply_unscales(facts: Facts) -> Truth:
    """Whether `applying` has to unscale the gradients of this step."""
    return both(facts.has(TO_APPLY), negated(facts.has(_UNSCALED)))


def knows_its_scale(facts: Facts) -> Truth:
    """Whether the factor of the loss is known.

    It is if a loss was scaled in this step, or in one of which this may be a part.
    """
    return both(facts.has(SCALED | _APPLIED), negated(facts.has(_SPOILED)))


def missing_call(facts: Facts) -> str:
    """Returns the message about the missing call, given all facts."""
    if not has_begun(facts):
        return _NEITHER
    return _NOT_UNSCALED if facts.has(SCALED) else _NOT_SCALED_BEFORE


_OPTIMIZER_EXAMPLE = """
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(loss_fn())
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
    optimizer.apply_gradients(zip(gradients, variables))"""
_NOT_UNSCALED = (
    "get_scaled_loss() was called and get_unscaled_gradients() was not; apply_gradients() has "
    "divided the gradients by the loss scale instead. If they were divided by hand too, this step "
    f"is too small. Call both:{_OPTIMIZER_EXAMPLE}"
)
_NOT_SCALED_BEFORE = (
    "get_unscaled_gradients() was called and get_scaled_loss() was not, so the gradients of this "
    "step are too small by the loss scale, unless the loss was multiplied by hand. Call both:"
    f"{_OPTIMIZER_EXAMPLE}"
)
_NEITHER = (
    "Neither get_scaled_loss() nor get_unscaled_gradients() was called before apply_gradients(), "
    "so the gradients were applied as they are: this step was made without loss scaling, and small "
    "float16 gradients may have vanished. If the loss was multiplied by the loss scale by hand, "
    "say so: apply_gradients(..., scaled=True). Else call both, or `minimize`:"
    f"{_OPTIMIZER_EXAMPLE}"
)
