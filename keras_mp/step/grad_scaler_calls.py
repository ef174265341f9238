"""The calls of a `GradScaler`.

PyTorch's AMP feature proposal, "Gradient scaling".
"""

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import finiteness, gradients
from keras_mp.step import grad_scaler_stages as rules
from keras_mp.step.calls import Calls, GradientState, LossScaleValue, RecordedCalls
from keras_mp.step.grad_scaler_stages import Stage
from keras_mp.step.record import Record
from keras_mp.step.stages import KnownStages, Truth, negated
from keras_mp.support import host, messages
from keras_mp.support.references import reference
from keras_mp.support.selection import chosen

MAX_OPTIMIZERS = 10
# The rows of the record: the losses; an optimizer that was not named; each of `MAX_OPTIMIZERS`; and
# the steps of further ones, and of those whose step was refused.
_LOSSES, _UNNAMED, _FIRST = 0, 1, 2
_OTHERS = _FIRST + MAX_OPTIMIZERS
_POSSIBLE = [rules.FOR_ALL, *[(*Stage,)] * (_OTHERS - _LOSSES)]


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

    def unscale(
        self, grads: Sequence[Any], optimizer: Any = None, *, may_skip: bool = True
    ) -> list[Any]:
        """Divides gradients by the factor of the losses.

        Args:
            grads: sequence of gradients.
            optimizer: the optimizer that the gradients are for; None for the only one.
            may_skip: bool. Whether a step can be skipped, in which case the gradients are tested.
                Defaults to True.
        """
        del optimizer, may_skip
        return list(grads)

    @contextlib.contextmanager
    def applying(self, optimizer: Any) -> Iterator[GradientState]:
        """Context manager in which an optimizer makes a step."""
        del optimizer
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


class GradScalerCalls(RecordedCalls, UnscaledGradScalerCalls):
    """The calls of a `GradScaler`, which all threads share.

    A wrong call is an error where Python can tell, which is in eager and while a function is
    traced. Where it only shows at run time, there is a warning, and the step is not made.
    """

    _report_size = 3

    def __init__(self, loss_scale: LossScaleValue) -> None:
        super().__init__(loss_scale)
        self._lock = threading.RLock()
        self._rows = _Rows()

    def _new_record(self) -> Record:
        return Record(_POSSIBLE, is_shared=True)

    def scale(self, losses: Any, scaled_by: Any = None) -> Any:
        """Multiplies losses, by the same number between two updates."""
        flat = [_checked_loss(loss) for loss in tf.nest.flatten(losses)]
        with self._lock:
            stages, notes = self._record.stages(), self._record.notes()
            _refuse(rules.WRONG_SCALE, stages, [_LOSSES])
            goes_on = stages.holds(Stage.has_scaled, [_LOSSES])
            if scaled_by is None:
                scaled_by = chosen(goes_on, self._scale_of_step, self._loss_scale)
            scaled = [gradients.scale_loss(loss, scaled_by) for loss in flat]
            after = stages.after(Stage.after_scaling)
            if after is not stages:
                self._record.note(after)
            self._record.note_scale(scaled_by)
            notes.losses = (*notes.losses, *flat) if goes_on is True else tuple(flat)
        return tf.nest.pack_sequence_as(losses, scaled)

    def unscale(
        self, grads: Sequence[Any], optimizer: Any = None, *, may_skip: bool = True
    ) -> list[Any]:
        """Divides gradients by the factor of the losses."""
        unscaled = gradients.unscale(grads, self._scale_of_step())
        finite = finiteness.all_finite(unscaled) if may_skip else True
        with self._lock:
            stages = self._record.stages()
            row = self._rows.row(optimizer, stages)
            if row == _OTHERS:
                raise ValueError(
                    f"A GradScaler keeps track of {MAX_OPTIMIZERS} optimizers. Leave the gradients "
                    "of further ones scaled: step() unscales them. "
                    f"Received: optimizer={optimizer!r}"
                )
            _refuse(rules.WRONG_UNSCALE, stages, [row])
            if stages.holds(Stage.has_scaled, [_LOSSES]) is not True:
                # Otherwise the loss is scaled here, and `applying` checks its gradients.
                is_right = stages.holds(lambda stage: stage not in rules.WRONG_UNSCALE, [row])
                self.reports.watch()
                self._post(_UNSCALE, stages, [row, row], when=tf.logical_not(is_right))
            if tf.executing_eagerly():
                finite = bool(finite)
            after = stages.after(Stage.after_unscaling, row, finite, Stage.after_overflow)
            self._record.note(after, before=stages)
            self._record.notes().unclipped[row] = list(unscaled)
        return unscaled

    def refuse_tape_beside_scale(self) -> None:
        """Raises an error if a loss was scaled since the last update."""
        _refuse(rules.WRONG_TAPE, self._record.stages(), [_LOSSES])

    def by_tape(self, losses: Sequence[tf.Tensor]) -> None:
        """Records that a tape has scaled losses, and unscaled the gradients."""
        with self._lock:
            stages, notes = self._record.stages(), self._record.notes()
            known = notes.losses if stages.known() is Stage.BY_TAPE else ()
            self._record.note(stages.after(Stage.after_tape))
            self._record.note_scale(self._loss_scale())
            notes.losses = (*known, *losses)

    @contextlib.contextmanager
    def applying(self, optimizer: Any) -> Iterator[GradientState]:
        """Context manager in which an optimizer makes a step.

        It records the step. A step that raises an exception, or that is refused, does not count.
        """
        with self._lock:
            scaled_by = self._scale_of_step()
            stages, notes = self._record.stages(), self._record.notes()
            row = self._rows.row(optimizer, stages)
            rows = [_LOSSES if row == _OTHERS else row]
            if row == _OTHERS or self._rows.has_unnamed:
                rows.append(_UNNAMED)
            _refuse(rules.WRONG_STEP, stages, rows)
            scaled, was_finite = stages.holds(Stage.is_scaled, rows), None
            if not isinstance(scaled, bool) and stages.holds(Stage.has_scaled, [_LOSSES]) is True:
                # The loss was scaled here. Gradients that another function has unscaled are
                # refused.
                scaled, is_allowed = True, scaled
            else:
                is_allowed = stages.holds(lambda stage: stage not in rules.WRONG_STEP, rows)
            if scaled is not True:
                was_finite = tf.convert_to_tensor(stages.holds(Stage.is_finite, rows))
            if is_allowed is not True:
                self.reports.watch()
            unclipped = [g for each in rows for g in notes.unclipped.pop(each, [])]
            after = stages.after(lambda _: Stage.APPLIED, row)
            if _UNNAMED in rows and scaled is not True:
                # If gradients were unscaled without an optimizer, they belong to the first one to
                # make a step.
                after = after.after(Stage.after_other_step, _UNNAMED)
            # Other threads have to know of the step while it is made.
            self._record.note(after, before=stages)
        given = GradientState(
            scaled,
            scaled_by,
            lambda: negated(scaled),
            self.losses(),
            unclipped,
            was_finite,
            None if is_allowed is True else tf.convert_to_tensor(is_allowed),
            functools.partial(self._was_refused, rows, stages),
        )
        try:
            yield given
        except BaseException:
            with self._lock:
                self._record.note(stages, before=after)
                # Other threads may have made calls since, of which the variable knows.
                notes.stages = None
            raise
        if given.is_allowed is not None:
            # The branch that refuses the step also takes the variable of the stages.
            self._record.note_uses()

    def update(self, *, begins_anew: bool = False) -> tuple[Truth, Callable[[], None]]:
        """Records that all steps were made.

        After that, a graph knows nothing.
        """
        with self._lock:
            stages, notes = self._record.stages(), self._record.notes()
            has_stepped = negated(stages.holds(Stage.has_no_step))
            if has_stepped is False and not begins_anew:
                _refuse(rules.WRONG_UPDATE, stages, [_LOSSES])
            self._record.note(self._record.start)
            notes.losses, notes.scaled_by, notes.unclipped = (), None, {}
            if not tf.executing_eagerly():
                notes.stages = None
        if isinstance(has_stepped, bool) or begins_anew:
            return has_stepped, lambda: None
        self.reports.watch()
        post = functools.partial(self._post, _UPDATE, stages, [_LOSSES, _LOSSES], tf.constant(True))
        return has_stepped, post

    def _scale_of_step(self) -> tf.Tensor:
        """Returns the factor of the losses, a float32 scalar tensor."""
        known = self._record.scaled_by()
        return self._record.scaled_by_in_variable() if known is None else known

    def _was_refused(self, rows: Sequence[int], stages: KnownStages) -> None:
        self._post(_STEP, stages, [rows[0], rows[-1]], tf.constant(True))
        # For `update` it is a step. The optimizer is free to make another one.
        self._record.assign(stages.after(lambda _: Stage.APPLIED, _OTHERS))

    def _post(self, call: int, stages: KnownStages, rows: Sequence[int], when: tf.Tensor) -> None:
        numbers = tf.concat([[call], tf.gather(stages.numbers, rows)], 0)
        self.reports.post(numbers, when=when)

    def _report(self, numbers: list[int], line: messages.Line | None) -> None:
        call, *stages = numbers
        wrong = filter(None, map(_REPORTED[call].get, map(Stage, stages)))
        # If the call was right, it was refused because another function had unscaled the gradients.
        what = next(wrong, rules.UNSCALED_ELSEWHERE)
        messages.warn(f"The step was not made: {what}" if call == _STEP else what, line)


# What run time reports, by number.
_UNSCALE, _STEP, _UPDATE = range(3)
_REPORTED = [rules.WRONG_UNSCALE, rules.WRONG_STEP, rules.WRONG_UPDATE]
# The collection of the optimizers that a graph uses.
_USED = "keras_mp_optimizers"


class _Rows:
    """Gives each optimizer of a scaler a row of the record for as long as it lives.

    Attributes:
        has_unnamed: whether gradients were unscaled before any optimizer was named.
    """

    def __init__(self) -> None:
        self._owners: dict[int, Callable[[], Any]] = {}
        self._was_left_out = self.has_unnamed = False

    def row(self, optimizer: Any, stages: KnownStages) -> int:
        """Returns the row of an optimizer; None stands for the only one.

        A graph keeps the optimizers that it uses alive, since their rows are part of the graph.

        Args:
            optimizer: the optimizer, or None.
            stages: `KnownStages`. The row of an optimizer that is gone is used again once nothing
                is known that was called for it.

        Raises:
            ValueError: `optimizer` is None, and there are several.
        """
        graph = host.current_graph()
        if graph is not None and optimizer is not None:
            graph.add_to_collection(_USED, optimizer)
        living = {i: each for i, owner in self._owners.items() if (each := owner()) is not None}
        if optimizer is None:
            if len(living) > 1:
                raise ValueError(_WHOSE.format([*living.values()]))
            self._was_left_out = True
            self.has_unnamed = self.has_unnamed or not living
            return next(iter(living), _UNNAMED)
        for row, each in living.items():
            if each == optimizer if isinstance(optimizer, types.MethodType) else each is optimizer:
                return row
        if living and self._was_left_out and not isinstance(optimizer, types.FunctionType):
            raise ValueError(_WHOSE.format([*living.values(), optimizer]))
        never_given = [row for row in range(_FIRST, _OTHERS) if row not in self._owners]
        gone = [row for row in self._owners if row not in living]
        free = [row for row in gone if not {*stages.possible[row]}.isdisjoint(rules.FOR_ALL)]
        row = next(iter([*never_given, *free]), _OTHERS)
        if row != _OTHERS:
            self._owners[row] = reference(optimizer)
        return row


def _checked_loss(loss: Any) -> tf.Tensor:
    if loss is None:
        raise TypeError("A loss must be a floating-point tensor. Received: None")
    return tf.convert_to_tensor(loss)


def _refuse(wrong: Mapping[Any, str], stages: KnownStages, rows: Sequence[int]) -> None:
    """Raises an error about a call that is wrong in each stage that is possible."""
    for row in rows:
        found = [wrong.get(stage) for stage in stages.possible[row]]
        if found[0] and all(found):
            raise ValueError(found[0])


_WHOSE = (
    "GradScaler.unscale() was called without an optimizer, and there are several, of which each "
    "has a verdict of its own. Say whose gradients they are: scaler.unscale(gradients, optimizer). "
    "Received: optimizer=None with {}"
)
