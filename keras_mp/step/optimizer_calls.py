"""The calls of a `LossScaleOptimizer`.

RFC 293, "LossScaleOptimizer Overview", lists the four steps that the user and the optimizer take.
There is only one optimizer here, and no `update`: scaling a loss begins the next step.

    ready --scale--> scaled --unscale--> unscaled --apply--> applied

An optimizer goes from scaled to applied directly if applying unscales the gradients. It stays
applied until the next loss is scaled: gradients of other variables may be another part of the step
that was applied last. The rules are told so by `goes_on`.
"""

import contextlib
import enum
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import gradients, scaled_losses
from keras_mp.step.calls import Calls, GradientState, LossScaleValue
from keras_mp.step.gradients import Gradient
from keras_mp.step.record import Notebook, Notes
from keras_mp.support import host, messages


class Stage(enum.IntEnum):
    """A stage of a `LossScaleOptimizer`."""

    READY = 0
    # A loss was scaled, and `get_unscaled_gradients` is to be called; or applying unscales.
    SCALED = 1
    SCALED_TO_APPLY = 2
    # The gradients of that loss were unscaled: by the program, or for a wrapper. (Those of other
    # variables may then still be scaled.) Or gradients were unscaled though no loss was scaled.
    UNSCALED = 3
    UNSCALED_EARLY = 4
    UNSCALED_ONLY = 5
    # Gradients were applied: those that were unscaled, in these ways or by applying.
    APPLIED = 6
    APPLIED_EARLY = 7
    APPLIED_SCALED = 8

    def has_begun(self) -> bool:
        """Whether a loss was scaled, or gradients were unscaled, but not yet applied."""
        return Stage.READY < self < Stage.APPLIED

    def has_scaled(self) -> bool:
        """Whether a loss was scaled whose gradients were not yet applied."""
        return self.has_begun() and self is not Stage.UNSCALED_ONLY

    def is_scaled(self, goes_on: bool, is_early: bool) -> bool:
        """Whether the gradients that are applied now are still scaled.

        Args:
            goes_on: bool. Whether they may be another part of the step that was applied last.
            is_early: bool. Whether these gradients were unscaled for a wrapper.
        """
        if self is Stage.APPLIED_EARLY:
            return goes_on and not is_early
        is_part = goes_on and self is Stage.APPLIED_SCALED
        return self in (Stage.SCALED, Stage.SCALED_TO_APPLY) or is_part

    def is_divided(self, goes_on: bool) -> bool:
        """Whether a call has unscaled the gradients that are applied now."""
        is_part = goes_on and self in (Stage.APPLIED, Stage.APPLIED_EARLY)
        return Stage.UNSCALED <= self <= Stage.UNSCALED_ONLY or is_part

    def misses_a_call(self, goes_on: bool) -> bool:
        """Whether a call is missing if gradients are applied now."""
        if self.has_scaled():
            return self is Stage.SCALED
        return not goes_on or self is Stage.READY

    def after_unscaling(self) -> "Stage":
        """Returns the stage after gradients were unscaled."""
        if not self.has_scaled():
            return Stage.UNSCALED_ONLY
        return self if self is Stage.UNSCALED_EARLY else Stage.UNSCALED

    def after_applying(self, goes_on: bool, is_early: bool) -> "Stage":
        """Returns the stage after gradients were applied."""
        if self.is_scaled(goes_on, is_early):
            return Stage.APPLIED_SCALED
        if self.misses_a_call(goes_on) and not self.has_begun():
            return Stage.READY
        is_early = self in (Stage.UNSCALED_EARLY, Stage.APPLIED_EARLY)
        return Stage.APPLIED_EARLY if is_early else Stage.APPLIED


class _Step(Notes):
    """What is known of a step.

    Attributes:
        stage: the `Stage` after the last call.
        applied: the ids of the variables whose gradients were applied: several functions may each
            make a part of one step.
        unscaled: the ids of the variables whose gradients were unscaled for a wrapper.
        is_whole: whether the gradients that are applied next make up the whole step. That is so if
            the step began while another one was under way: gradients that are applied later may
            belong to the other one.
        unclipped: the gradients as they were when they were unscaled.
        results: weak references to the results of the last call.
    """

    stage = Stage.READY
    applied: frozenset[int] = frozenset()
    unscaled: frozenset[int] = frozenset()
    is_whole = False
    unclipped: Sequence[Gradient] = ()
    results: tuple["weakref.ref[Any]", ...] = ()
    tensors = (*Notes.tensors, "unclipped")

    def has_begun(self) -> bool:
        return self.stage.has_begun()


class OptimizerCalls(Calls):
    """The calls of a `LossScaleOptimizer`.

    A missing call is reported, and the step is made.
    """

    def __init__(self, loss_scale: LossScaleValue, scales: bool = True) -> None:
        super().__init__(loss_scale, scales, Notebook(_Step))

    def scale(self, loss: Any, scaled_by: tf.Tensor) -> tf.Tensor:
        """Multiplies a loss, which `begin` notes."""
        own = self._record.notes()
        if not self.scales:
            own.losses = (loss,) if tf.is_tensor(loss) else ()
            return loss
        self._refuse_results([loss], "get_scaled_loss")
        scaled = gradients.scale_loss(loss, scaled_by)
        # The losses since the last step that was made here. If a program makes none, a few are
        # kept.
        own.losses = (*own.losses, tf.convert_to_tensor(loss))[-_MOST_LOSSES:]
        self._remember_results([scaled])
        return scaled

    def begin(self, scaled_by: tf.Tensor, *, to_apply: bool) -> None:
        """Notes that a loss was scaled, which begins a step, whatever was called before.

        Args:
            scaled_by: float32 scalar tensor.
            to_apply: bool. True if `applying` unscales the gradients, False if `unscale` does.
        """
        if not self.scales:
            return
        own = self._record.notes()
        # Overlapping steps can be told apart only if different calls unscale their gradients.
        is_whole = own.stage.has_scaled() and (own.stage is Stage.SCALED_TO_APPLY) is not to_apply
        self._record.note(
            stage=Stage.SCALED_TO_APPLY if to_apply else Stage.SCALED,
            **{"applied": frozenset(), "unscaled": frozenset(), "is_whole": is_whole},
            **{"scaled_by": scaled_by, "unclipped": ()},
        )
        if self._scaled_by is not None and not host.in_v1_graph():
            self._scaled_by.assign(scaled_by, read_value=False)

    def begin_by_hand(self, grads: Sequence[Any]) -> None:
        """Notes that the user has multiplied the loss of gradients, which `applying` unscales."""
        self._refuse_results(grads, "apply_gradients(scaled=True)")
        self.begin(self._loss_scale(), to_apply=True)

    def unscale(self, grads: Sequence[Any], *, by_tape: bool = False) -> list[Any]:
        """Divides gradients by the factor of the loss.

        Args:
            grads: sequence of gradients.
            by_tape: bool. Whether a tape has divided them already. Defaults to False.
        """
        if not self.scales:
            return list(grads)
        self._refuse_results(grads, "get_unscaled_gradients")
        scaled_by = self._scale_of_step()
        unscaled = gradients.unscale(grads, None if by_tape else scaled_by)
        stage = self._record.current().stage.after_unscaling()
        self._note_unscaled(stage, unscaled, scaled_by=scaled_by)
        self._remember_results(unscaled)
        return unscaled

    def unscale_early(self, grads: Sequence[Any], variables: Iterable[Any]) -> Sequence[Any]:
        """Unscales gradients that `applying` would unscale, before a wrapper sees them.

        Args:
            grads: sequence of gradients.
            variables: iterable of their variables.
        """
        step, ids = self._record.current(), frozenset(id(v) for v in variables)
        is_another_part = bool(step.unscaled) and step.unscaled.isdisjoint(ids)
        is_early = step.stage in (Stage.UNSCALED_EARLY, Stage.APPLIED_EARLY)
        if step.stage is not Stage.SCALED_TO_APPLY and not (is_another_part and is_early):
            return grads
        scaled_by, ids = self._scale_of_step(), step.unscaled | ids
        unscaled = gradients.unscale(grads, scaled_by)
        self._note_unscaled(Stage.UNSCALED_EARLY, unscaled, scaled_by=scaled_by, unscaled=ids)
        return unscaled

    @contextlib.contextmanager
    def applying(self, variables: Iterable[Any]) -> Iterator[GradientState]:
        """Context manager in which gradients are applied.

        It notes the step, and warns of missing calls.

        Args:
            variables: iterable of the variables that the gradients are applied to.
        """
        if not self.scales:
            yield GradientState(losses=self.losses())
            self._record.notes().losses = ()
            return
        variables = list(variables)
        step, own = self._record.current(), self._record.notes()
        stage, applied = step.stage, frozenset(id(v) for v in variables)
        before = frozenset() if step.is_whole else step.applied
        # Gradients of other variables may be another part of the step that was applied last.
        goes_on = bool(before) and before.isdisjoint(applied)
        is_early = applied <= step.unscaled
        applied = before | applied if goes_on else applied
        # It is said once that a function makes no calls at all, until it makes one.
        is_told = stage is Stage.READY and own.time > 0 and not tf.executing_eagerly()
        is_by_tape = scaled_losses.thread.noted.are_by_tape(variables)
        if stage.misses_a_call(goes_on) and not is_told and not is_by_tape:
            messages.warn(missing_call(stage))
            if stage.has_scaled() or tf.executing_eagerly():
                applied = frozenset()
        scaled_by, unclipped = self._scale_of_step(), list(step.unclipped)
        step.unclipped = ()
        yield GradientState(
            stage.is_scaled(goes_on, is_early),
            scaled_by,
            stage.is_divided(goes_on),
            self.losses(),
            unclipped,
        )
        stage = stage.after_applying(goes_on, is_early)
        known = {"stage": stage, "applied": applied, "unscaled": step.unscaled, "losses": ()}
        self._record.note(**known, is_whole=step.is_whole, scaled_by=scaled_by)
        if step is not own and tf.executing_eagerly():
            vars(step).update(known)  # The thread that began the step is done with it.

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[None]:
        """Context manager in which one call, `minimize`, makes a whole step.

        It may come between the calls of another step, and leaves that step alone, also if an
        exception leaves it.
        """
        with self.as_before_an_exception():
            notes = self._record.notes()
            before = dict(vars(notes))
            yield
            _restore(notes, before)

    @contextlib.contextmanager
    def as_before_an_exception(self) -> Iterator[None]:
        """Context manager that undoes notes if it ends with an exception.

        It is for calls in which the user's code may make other calls before it raises an exception.
        """
        notes = self._record.notes()
        before = dict(vars(notes))
        try:
            yield
        except BaseException:
            _restore(notes, before)
            raise

    def _note_unscaled(self, stage: Stage, grads: Sequence[Any], **known: Any) -> None:
        step = self._record.current()
        names = ("applied", "unscaled", "is_whole", "losses")
        before = {name: getattr(step, name) for name in names}
        self._record.note(**{**before, "stage": stage, "unclipped": list(grads), **known})

    def _scale_of_step(self) -> tf.Tensor:
        """Returns the factor by which the loss of this step was multiplied, or will be."""
        step = self._record.current()
        if not step.stage.has_scaled() and step.stage < Stage.APPLIED:
            return self._loss_scale()
        return self._scale_of(step)

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


# How many losses of a step are looked at if it is skipped.
_MOST_LOSSES = 16


def _restore(notes: Notes, before: dict[str, Any]) -> None:
    vars(notes).clear()
    vars(notes).update(before)


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
