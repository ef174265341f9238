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
from keras_mp.step.calls import Calls, GradientState, RecordedCalls
from keras_mp.step.optimizer_stages import Stage
from keras_mp.step.record import Record
from keras_mp.step.stages import KnownStages
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


class UnscaledOptimizerCalls(Calls):
    """The calls of a `LossScaleOptimizer` that scales nothing."""

    def begin(self, scaled_by: tf.Tensor, *, to_apply: bool) -> None:
        """Records that a loss was scaled, which begins a step.

        Args:
            scaled_by: float32 scalar tensor.
            to_apply: bool. True if `applying` unscales the gradients, False if `unscale` does.
        """

    def begin_by_hand(self, grads: Sequence[Any]) -> None:
        """Records that the user has multiplied the loss of gradients by the loss scale."""

    def unscale_early(self, grads: Sequence[Any], variables: Iterable[Any]) -> Sequence[Any]:
        """Unscales gradients that `applying` would unscale, before a wrapper sees them.

        Args:
            grads: sequence of gradients.
            variables: iterable of their variables.
        """
        return grads

    def unscale(self, grads: Sequence[Any], *, by_tape: bool = False) -> list[Any]:
        """Divides gradients by the factor of the loss.

        Args:
            grads: sequence of gradients.
            by_tape: bool. Whether a tape has divided them already. Defaults to False.
        """
        del by_tape
        return list(grads)

    @contextlib.contextmanager
    def applying(self, variables: Iterable[Any]) -> Iterator[GradientState]:
        """Context manager in which gradients are applied, which it records at the end.

        Args:
            variables: iterable of the variables that the gradients are applied to.
        """
        yield GradientState(losses=self.losses())
        self._record.notes().losses = ()

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[None]:
        """Context manager in which one call, `minimize`, makes a whole step.

        It may come between the calls of another step, and leaves that step alone.
        """
        notes = self._record.notes()
        losses = notes.losses
        yield
        notes.losses = losses

    def as_before_an_exception(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that undoes records if it ends with an exception.

        It is for calls in which the user's code may make other calls before it raises an exception.
        """
        return contextlib.nullcontext()


class OptimizerCalls(RecordedCalls, UnscaledOptimizerCalls):
    """The calls of a `LossScaleOptimizer`.

    A missing call is reported, and the step is made.
    """

    def __init__(self, loss_scale: Callable[[], tf.Tensor]) -> None:
        super().__init__(loss_scale)
        self._parts_of_step = _Parts()

    def _new_record(self) -> Record:
        return Record([(*Stage,)], is_shared=False)

    def begin(self, scaled_by: tf.Tensor, *, to_apply: bool) -> None:
        """Begins a step, whatever was called before."""
        before, parts = self._record.noted(), self._parts_of_step
        is_under_way = before.holds(Stage.has_scaled) is True
        # Overlapping steps can be told apart only if different calls unscale their gradients.
        parts.is_whole = is_under_way and before.holds(Stage.apply_unscales) is not to_apply
        parts.applied = parts.unscaled = frozenset()
        self._record.notes().unclipped.clear()
        self._record.note(KnownStages([(Stage.SCALED_TO_APPLY if to_apply else Stage.SCALED,)]))
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

    def unscale(self, grads: Sequence[Any], *, by_tape: bool = False) -> list[Any]:
        """Divides gradients by the factor of the loss, unless the tape has done so."""
        self._refuse_results(grads, "get_unscaled_gradients")
        stage, unscaled = self._record.stages(), list(grads)
        if not by_tape:
            unscaled = gradients.unscale(grads, self._scale_of_step(stage))
        self._note_unscaled(stage.after(Stage.after_unscaling), unscaled)
        self._remember_results(unscaled)
        return unscaled

    def unscale_early(self, grads: Sequence[Any], variables: Iterable[Any]) -> Sequence[Any]:
        """Unscales gradients that `applying` would unscale, before a wrapper sees them."""
        stage, parts = self._record.stages(), self._parts_of_step
        ids = frozenset(id(v) for v in variables)
        is_another_part = bool(parts.unscaled) and parts.unscaled.isdisjoint(ids)

        def is_scaled(stage: Stage) -> bool:
            return stage.is_scaled_for_wrapper(is_another_part)

        are_scaled = stage.holds(is_scaled)
        if are_scaled is False:
            return grads
        parts.unscaled |= ids
        scale = functools.partial(self._scale_of_step, stage)
        unscaled = gradients.unscale(grads, chosen(are_scaled, scale, lambda: tf.constant(1.0)))
        after = stage.after(lambda each: Stage.UNSCALED_EARLY if is_scaled(each) else each)
        self._note_unscaled(after, unscaled)
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
    def applying(self, variables: Iterable[Any]) -> Iterator[GradientState]:
        """Context manager in which the step is made.

        It records the step, and warns of missing calls.
        """
        variables = list(variables)
        notes, applied = self._record.notes(), frozenset(id(v) for v in variables)
        parts, stage = self._parts_of_step, self._record.stages()
        before = frozenset() if parts.is_whole else parts.applied
        # Gradients of other variables may be another part of the step that was applied last.
        goes_on = bool(before) and before.isdisjoint(applied)
        is_early = applied <= parts.unscaled
        applied = before | applied if goes_on else applied
        if not scaled_losses.thread.noted.are_by_tape(variables):
            if stage.known() is None:
                self._warn_at_run_time(stage, goes_on)
            elif stage.holds(lambda each: each.misses_a_call(goes_on)):
                messages.warn(missing_call(stage.known()))
                applied = frozenset()
        given = GradientState(
            stage.holds(lambda each: each.is_scaled(goes_on, is_early)),
            self._scale_of_step(stage),
            lambda: stage.holds(lambda each: each.is_divided(goes_on)),
            self.losses(),
            notes.unclipped.pop(_ONLY, []),
        )
        graph = host.current_graph()
        first = 0 if graph is None else len(graph.get_operations())
        yield given
        with tf.control_dependencies(self._decisions_since(first)):
            after = stage.after(lambda each: each.after_applying(goes_on, is_early))
            self._record.note(after, ends=True)
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

    def _note_unscaled(self, stage: KnownStages, unscaled: Sequence[Any]) -> None:
        self._record.note(stage)
        self._record.notes().unclipped[_ONLY] = list(unscaled)

    def _scale_of_step(self, stage: KnownStages) -> tf.Tensor:
        """Returns the factor by which the loss of this step was multiplied.

        The loss scale may have moved since then, by other steps or by another part of this one.
        """
        noted = self._record.scaled_by()
        if noted is not None:
            return noted
        if not self._record.has_variables:
            return self._loss_scale()
        is_noted = stage.holds(Stage.knows_its_scale)
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

    def _warn_at_run_time(self, stage: KnownStages, goes_on: bool) -> None:
        if host.is_compiled_by_xla() and self._record.notes().stages is None:
            self._warn_while_tracing(goes_on)
        # It is said once that functions make no calls at all, until one does again.
        is_news = stage.holds(
            lambda each: each.misses_a_call(goes_on) and each is not Stage.APPLIED_ONLY
        )
        self.reports.watch()
        self.reports.post(stage.numbers[tf.newaxis], when=tf.convert_to_tensor(is_news))

    def _warn_while_tracing(self, goes_on: bool) -> None:
        """Warns while tracing of a function that makes no call.

        When it runs, such a function cannot warn.
        """
        if self._record.may_be_changed_elsewhere():
            return
        with tf.init_scope():
            stage = self._record.in_variable().known()
            if stage.misses_a_call(goes_on):
                messages.warn(missing_call(stage))
                after = stage.after_applying(goes_on, is_early=False)
                self._record.assign(KnownStages([(after,)]))

    def _report(self, numbers: list[int], line: messages.Line | None) -> None:
        messages.warn(missing_call(Stage(numbers[0])), line)


# How many losses of a step are looked at if it is skipped.
_MOST_LOSSES = 16
# The number of the only optimizer.
_ONLY = 0


def missing_call(stage: Stage) -> str:
    """Returns the message about the call that is missing if gradients are applied."""
    if not stage.has_begun():
        return _NEITHER
    return _NOT_UNSCALED if stage.has_scaled() else _NOT_SCALED_BEFORE


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
