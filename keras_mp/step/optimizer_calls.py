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
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.step import gradients, scaled_losses
from keras_mp.step.gradients import Gradient
from keras_mp.step.record import Calls, GradientState, Page
from keras_mp.support import host

# How the gradients of a step are unscaled. UNKNOWN: no call says it. BY_PROGRAM: the program is to
# call `get_unscaled_gradients`. BY_APPLYING: applying unscales them. DONE: they are unscaled, or
# their loss was not scaled. DIVIDED: they are unscaled, and no loss was scaled; once they are
# applied they are DONE.
How = enum.Enum("How", "UNKNOWN BY_PROGRAM BY_APPLYING DONE DIVIDED")


class _Step(NamedTuple):
    """What is known of a step.

    Attributes:
        how: how its gradients are unscaled.
        is_over: whether its gradients were applied. Those of other variables may follow.
        applied: the ids of the variables whose gradients were applied: several functions may each
            make a part of one step. None if the gradients that are applied next make up the whole
            step. That is so if the step began while another one was under way: gradients that are
            applied later may belong to the other one.
        losses: the losses since the last step that was made here; a few if a program makes none.
        scaled_by: their factor, a float32 scalar tensor; None if it is not known here.
        unclipped: the gradients as they were when they were unscaled.
    """

    how: How = How.UNKNOWN
    is_over: bool = False
    applied: frozenset[int] | None = frozenset()
    losses: tuple[tf.Tensor, ...] = ()
    scaled_by: tf.Tensor | None = None
    unclipped: list[Gradient] | tuple[()] = ()

    def bare(self) -> "_Step":
        """Returns the step without tensors."""
        return self._replace(losses=(), scaled_by=None, unclipped=())

    def has_begun(self) -> bool:
        return self.how is not How.UNKNOWN and not self.is_over

    def has_scaled(self) -> bool:
        """Whether a loss was scaled whose gradients were not yet applied."""
        return self.has_begun() and self.how is not How.DIVIDED

    def goes_on_with(self, variables: frozenset[int]) -> bool:
        """Whether gradients of these may be another part of the step applied last."""
        return bool(self.applied) and self.applied.isdisjoint(variables)


class OptimizerCalls(Calls):
    """The calls of a `LossScaleOptimizer`.

    A missing call is reported, and the step is made.
    """

    new = _Step()

    def scale(self, loss: Any, *, to_apply: bool) -> tf.Tensor:
        """Multiplies a loss, and begins a step.

        Args:
            loss: float tensor.
            to_apply: bool, as for `begin`.
        """
        page = self.page()
        if not self.scales:
            page.step = page.step._replace(losses=(loss,) if tf.is_tensor(loss) else ())
            return loss
        scaled_by = self._loss_scale()
        scaled = self.multiplied(loss, scaled_by)
        losses = (*page.step.losses, tf.convert_to_tensor(loss))[-_MOST_LOSSES:]
        page.step = page.step._replace(losses=losses)
        self._remember_results([scaled])
        self.begin(scaled_by, to_apply=to_apply)
        return scaled

    def multiplied(self, loss: Any, scaled_by: tf.Tensor) -> tf.Tensor:
        """Returns the product of a loss and the loss scale, of which nothing is noted."""
        if not self.scales:
            return loss
        self._refuse_results([loss], "get_scaled_loss")
        return gradients.scale_loss(loss, scaled_by)

    def begin(self, scaled_by: tf.Tensor, *, to_apply: bool) -> None:
        """Notes that a loss was scaled, which begins a step, whatever was called before.

        Args:
            scaled_by: float32 scalar tensor.
            to_apply: bool. True if `applying` unscales the gradients, False if `unscale` does.
        """
        if not self.scales:
            return
        own, how = self.page().step, How.BY_APPLYING if to_apply else How.BY_PROGRAM
        # Overlapping steps can be told apart only if different calls unscale their gradients.
        is_whole = own.has_scaled() and (own.how is How.BY_APPLYING) is not to_apply
        applied = None if is_whole else frozenset[int]()
        self.note(_Step(how, False, applied, own.losses, scaled_by))
        if self._scaled_by is not None and not host.in_v1_graph():
            self._scaled_by.assign(scaled_by, read_value=False)

    def unscale(self, grads: Sequence[Any]) -> list[Any]:
        """Divides gradients by the factor of the loss."""
        if not self.scales:
            return list(grads)
        self._refuse_results(grads, "get_unscaled_gradients")
        step = self.current().step
        unscaled = self._unscaled(step, grads, How.DONE if step.has_scaled() else How.DIVIDED)
        self._remember_results(unscaled)
        return unscaled

    @contextlib.contextmanager
    def unscaled_early(
        self, pairs: Sequence[tuple[Any, Any]], grads: Sequence[Any]
    ) -> Iterator[Sequence[tuple[Any, Any]]]:
        """Context manager that unscales gradients for a wrapper if `applying` would do so.

        Args:
            pairs: sequence of (gradient, variable) pairs.
            grads: sequence of their gradients.

        Yields:
            list of pairs.
        """
        variables = [v for _, v in pairs]
        applied = frozenset(map(id, variables))
        step = self._page_of(applied).step
        is_part = not step.is_over or step.goes_on_with(applied)
        if step.how is not How.BY_APPLYING or not is_part:
            yield list(zip(grads, variables))
            return
        yield list(zip(self._unscaled(step, grads, How.DONE), variables))
        if (own := self.page().step).is_over:  # Otherwise the wrapper has kept them for later.
            self.note(own._replace(how=How.BY_APPLYING))

    @contextlib.contextmanager
    def applying(self, variables: Iterable[Any]) -> Iterator[GradientState]:
        """Context manager in which gradients are applied.

        It notes the step, and warns of missing calls.

        Args:
            variables: iterable of the variables that the gradients are applied to.
        """
        variables, own = list(variables), self.page()
        if not self.scales:
            yield GradientState(losses=own.step.losses)
            own.step = own.step._replace(losses=())
            return
        applied = frozenset(map(id, variables))
        page = self._page_of(applied)
        step, is_eager = page.step, tf.executing_eagerly()
        how = step.how
        has_begun, has_scaled = step.has_begun(), step.has_scaled()
        goes_on = step.goes_on_with(applied)
        is_part = goes_on or not step.is_over
        is_scaled = is_part and how in (How.BY_PROGRAM, How.BY_APPLYING)
        if goes_on and step.applied:
            applied |= step.applied
        noted = scaled_losses.thread.noted
        is_by_tape = noted.are_by_tape(variables)
        is_missing = how is How.BY_PROGRAM if has_scaled else not goes_on or how is How.UNKNOWN
        # It is said once that a function makes no calls at all, until it makes one.
        is_told = how is How.UNKNOWN and own.time > 0 and not is_eager
        if is_missing and not is_told and not is_by_tape:
            from keras_mp.step import wrong_calls

            wrong_calls.tell_missing(has_scaled, has_begun)
            if has_scaled or is_eager:
                applied = frozenset()
        scaled_by, is_divided = self._scale_of(step), is_part and how in (How.DONE, How.DIVIDED)
        of_loss, moved = (step.losses, step.unclipped), noted.moved_scale if is_by_tape else None
        yield GradientState(is_scaled, scaled_by, is_divided, *of_loss, moved_scale=moved)
        if is_scaled:
            how = How.BY_APPLYING
        else:
            how = How.UNKNOWN if is_missing and not has_begun else How.DONE
        applied = None if step.applied is None else applied
        after = _Step(how, True, applied, scaled_by=scaled_by)
        if how is How.UNKNOWN:
            after = _Step()
        page.step = after  # The thread that began the step is done with it.
        self.note(after if page is own else after.bare())

    @contextlib.contextmanager
    def as_before_an_exception(self, by_hand: Sequence[Any] | None = None) -> Iterator[None]:
        """Context manager that undoes notes if it ends with an exception.

        It is for calls in which the user's code may make other calls before it raises an exception.

        Args:
            by_hand: sequence of gradients whose loss the user has multiplied by hand, which begins
                a step. Defaults to None.
        """
        page = self.page()
        before = vars(page).copy()
        try:
            if by_hand is not None:
                self._refuse_results(by_hand, "apply_gradients(scaled=True)")
                self.begin(self._loss_scale(), to_apply=True)
            yield
        except BaseException:
            vars(page).clear()
            vars(page).update(before)
            raise

    def _page_of(self, applied: frozenset[int]) -> Page:
        """Returns the page that gradients of some variables go by.

        A step that was begun here goes on, although another thread has begun one since. In eager
        code, gradients of a function may be of a step that it has begun, whenever it was traced,
        unless the program was to unscale them, and has done so here.
        """
        own, found = self.page(), self.current()
        goes_on = own.step.scaled_by is not None and own.step.goes_on_with(applied)
        is_unscaled = own.step.how is How.DONE and found.step.how is How.BY_PROGRAM
        return own if goes_on and (found.time or is_unscaled or not own.is_eager) else found

    def _unscaled(self, step: _Step, grads: Sequence[Any], how: How) -> list[Any]:
        """Divides gradients of a step, and notes that."""
        scaled_by = self._scale_of(step)
        unscaled = gradients.unscale(grads, scaled_by)
        self.note(_Step(how, False, step.applied, step.losses, scaled_by, list(unscaled)))
        return unscaled

    def _scale_of(self, step: _Step) -> tf.Tensor:
        """Returns the factor by which the loss of a step was multiplied, or will be."""
        if not step.has_scaled() and not step.is_over:
            return self._loss_scale()
        return super()._scale_of(step)

    def _remember_results(self, results: Iterable[Any]) -> None:
        self.page().results = tuple(weakref.ref(r) for r in results if r is not None)

    def _refuse_results(self, values: Iterable[Any], method: str) -> None:
        """Refuses results of the last call.

        They would be scaled or unscaled twice.
        """
        results = {id(ref()) for ref in self.page().results}
        if any(value is not None and id(value) in results for value in values):
            raise ValueError(
                f"{method}() was given values that are already scaled or unscaled: call it once. "
                f"Received: {values!r}"
            )


# How many losses of a step are looked at if it is skipped.
_MOST_LOSSES = 16
