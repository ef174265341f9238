"""The calls of a `GradScaler`.

PyTorch's AMP feature proposal, "Gradient scaling".
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import call_states as states
from keras_mp.step import gradients, unclipped
from keras_mp.step.call_states import OTHERS, UNNAMED, Call, of, of_any
from keras_mp.step.calls import Calls, LossScaleValue
from keras_mp.step.gradient_state import GradientState
from keras_mp.step.numbered_optimizers import NumberedOptimizers
from keras_mp.support import host, messages


class ScalerCalls(Calls):
    """The calls of a `GradScaler`, which all threads share.

    A wrong call is an error if Python can tell, which is in eager and while a function is traced.
    If only run time can tell, it is a warning, and the step is not made.
    """

    _report_size = 3
    _is_shared = True

    def __init__(self, loss_scale: LossScaleValue) -> None:
        super().__init__(loss_scale)
        self._optimizers = NumberedOptimizers()

    def scale(self, losses: Any) -> Any:
        """Multiplies a structure of losses, by the same number between two updates."""
        flat = [_checked_loss(loss) for loss in tf.nest.flatten(losses)]
        certain, facts = self._so_far()
        known = facts if isinstance(facts, int) else certain
        _raise(Call.SCALE, UNNAMED, known)
        goes_on = bool(known & states.SCALED)
        if goes_on:
            scaled_by = self._scale_of_step()
        elif isinstance(facts, int):
            scaled_by = self._loss_scale()
        else:
            is_first = tf.equal(facts & states.SCALED, 0)
            scaled_by = tf.where(is_first, self._loss_scale(), self._scaled_by)
        if not certain & states.SCALED or certain & of_any(states.JUST_UNSCALED):
            before = ~of_any(states.JUST_UNSCALED)
            self._note(facts & before | states.SCALED, certain & before | states.SCALED)
        self._note_scale(scaled_by)
        self._mine.losses = (*self._mine.losses, *flat) if goes_on else tuple(flat)
        scaled = [gradients.scale_loss(loss, scaled_by) for loss in flat]
        return tf.nest.pack_sequence_as(losses, scaled)

    def unscale(self, grads: Sequence[Any], optimizer: Any, can_skip: bool) -> list[Any]:
        """Divides gradients by the factor of the losses.

        Args:
            grads: sequence of gradients.
            optimizer: the optimizer of the gradients; None for the only one.
            can_skip: bool. Whether a step can be skipped, so that they are tested.
        """
        unscaled = gradients.unscale(grads, self._scale_of_step())
        index = self._optimizers.index(optimizer)
        if index == OTHERS:
            raise ValueError(
                f"A GradScaler keeps track of {states.MAX_OPTIMIZERS} optimizers. Leave the "
                "gradients of further ones scaled: step() unscales them. "
                f"Received: optimizer={optimizer!r}"
            )
        certain, facts = self._so_far()
        news = of(index, states.UNSCALED | states.JUST_UNSCALED)
        overflowed = news | of(index, states.OVERFLOWED)
        _raise(Call.UNSCALE, index, facts if isinstance(facts, int) else certain | states.SCALED)
        after: int | tf.Tensor = news
        if can_skip:
            finite = gradients.all_finite(unscaled)
            if isinstance(facts, int):
                after = news if finite else overflowed
            else:
                after = tf.where(finite, _int64(news), _int64(overflowed))
        if not isinstance(facts, int) and not certain & states.SCALED:
            # `apply` checks gradients of a loss that is scaled here.
            wrong = states.BY_TAPE | of(index, states.JUST_UNSCALED | states.APPLIED)
            is_wrong = tf.not_equal(facts & (states.SCALED | wrong), states.SCALED)
            self._reports.watch()
            self._post(Call.UNSCALE, index, facts, when=is_wrong)
            after = tf.where(is_wrong, _int64(news | of(index, states.SPOILED)), after)
        self._note(facts | after, certain | news)
        self._mine.unscaled[index] = unclipped.remember(unscaled)
        return unscaled

    def by_tape(self) -> None:
        """Records that a tape has scaled a loss, and unscaled the gradients."""
        certain, facts = self._so_far()
        _raise(Call.TAPE, UNNAMED, facts if isinstance(facts, int) else certain)
        self._note(facts | states.BY_TAPE, certain | states.BY_TAPE)
        self._note_scale(self._loss_scale())

    @contextlib.contextmanager
    def apply(self, optimizer: Any, variables: Iterable[Any]) -> Iterator[GradientState]:
        """Context manager in which an optimizer makes a step. Records the step.

        A step that raises an exception, or that is refused, does not count.

        Args:
            optimizer: the optimizer.
            variables: not used.
        """
        del variables
        scaled_by, index = self._scale_of_step(), self._optimizers.index(optimizer)
        certain, facts = self._so_far()
        # Gradients that were unscaled without an optimizer are those of the first one to step.
        unnamed = of(UNNAMED, states.UNSCALED | states.JUST_UNSCALED | states.OVERFLOWED)
        unscaled = states.BY_TAPE | of(UNNAMED, states.UNSCALED) | of(index, states.UNSCALED)
        overflowed = of(UNNAMED, states.OVERFLOWED) | of(index, states.OVERFLOWED)
        is_allowed, refuse = None, lambda: None
        if isinstance(facts, int):
            _raise(Call.STEP, index, facts)
            scaled = not facts & unscaled
            was_finite = None if scaled else tf.constant(not facts & overflowed)
        else:
            _raise(Call.STEP, index, certain | states.SCALED)
            self._reports.watch()
            wrong = states.wrong_if(index)
            if certain & states.SCALED and not certain & unscaled:
                # Gradients that another function has unscaled are refused.
                scaled, was_finite = True, None
                is_allowed = tf.equal(facts & (states.SCALED | unscaled | wrong), states.SCALED)
            else:
                scaled = False if certain & unscaled else tf.equal(facts & unscaled, 0)
                was_finite = tf.equal(facts & overflowed, 0)
                is_allowed = tf.not_equal(facts & (states.SCALED | states.BY_TAPE), 0)
                is_allowed &= tf.equal(facts & wrong, 0)
            refuse = functools.partial(self._refuse, index, facts)
        before = [self._mine.unscaled.pop(i, list)() for i in (UNNAMED, index)]
        applied = of(index, states.APPLIED)
        after = facts if scaled is True else facts & ~unnamed
        self._note(after | applied, certain & ~unnamed | applied)
        given = GradientState(
            scaled,
            scaled_by,
            lambda: tf.logical_not(scaled) if tf.is_tensor(scaled) else not scaled,
            self.losses(),
            [*before[0], *before[1]],
            was_finite,
            is_allowed,
            refuse,
        )
        try:
            yield given
        except BaseException:
            if isinstance(facts, int):
                # Other threads may have noted steps of theirs meanwhile.
                self._note(self._read() & ~(applied & ~facts) | facts & unnamed)
            raise
        if is_allowed is not None:
            # The branch in which it is refused takes the variable of the facts.
            self._mine.uses = self._uses(host.current_graph())

    def update(self) -> tuple[bool | tf.Tensor, Callable[[], None]]:
        """Records that all steps were made.

        Returns:
            tuple of whether a step was made, a bool or bool scalar tensor, and of a function that
            reports that none was.
        """
        certain, facts = self._so_far()
        steps = of_any(states.APPLIED | states.SPOILED)
        self._note(0)
        mine = self._mine
        mine.losses, mine.scaled_by, mine.facts = (), None, None
        mine.unscaled.clear()
        if isinstance(facts, int):
            return bool(facts & steps), lambda: _raise(Call.UPDATE, UNNAMED, facts)
        if certain & steps:
            return True, lambda: None
        self._reports.watch()
        has_stepped = tf.not_equal(facts & steps, 0)
        return has_stepped, lambda: self._post(Call.UPDATE, UNNAMED, facts, tf.constant(True))

    def _scale_of_step(self) -> tf.Tensor:
        """Returns the factor of the losses, a float32 scalar tensor."""
        if self._mine.scaled_by is not None and self._is_mine(host.current_graph()):
            return self._mine.scaled_by
        return tf.convert_to_tensor(self._scaled_by)

    def _refuse(self, index: int, facts: tf.Tensor) -> None:
        self._post(Call.STEP, index, facts, tf.constant(True))
        self._facts.assign(facts | of(UNNAMED, states.APPLIED), read_value=False)

    def _post(self, call: Call, index: int, facts: tf.Tensor, when: tf.Tensor) -> None:
        self._reports.post(tf.stack([_int64(call), _int64(index), facts]), when=when)

    def _report(self, numbers: list[int], line: messages.Line | None) -> None:
        # A right call was refused if another function had unscaled the gradients.
        what = states.what_is_wrong(*numbers) or states.UNSCALED_ELSEWHERE
        messages.warn(f"The step was not made: {what}" if numbers[0] == Call.STEP else what, line)


def _checked_loss(loss: Any) -> tf.Tensor:
    if loss is None:
        raise TypeError("A loss must be a floating-point tensor. Received: None")
    return tf.convert_to_tensor(loss)


def _int64(value: int) -> tf.Tensor:
    return tf.constant(int(value), tf.int64)


def _raise(call: Call, index: int, facts: int) -> None:
    what = states.what_is_wrong(call, index, facts)
    if what is not None:
        raise ValueError(what)
