"""The calls of a `GradScaler`.

    ready --scale--> scaled --unscale--> unscaled --step--> applied --update--> ready

PyTorch's AMP feature proposal, "Gradient scaling". `scale`, a `LossScaleGradientTape` and `update`
are calls for all optimizers; `unscale` and `step` for one. `step` unscales gradients that are still
scaled.
"""

import contextlib
import enum
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.step import finiteness, gradients
from keras_mp.step.gradients import Gradient
from keras_mp.step.record import Calls, GradientState, LossScaleValue, Notes
from keras_mp.support import host, messages, new_variables
from keras_mp.support.references import reference


class Stage(enum.Enum):
    """A stage of an optimizer of a `GradScaler`."""

    READY = "nothing was called"
    # A loss was scaled: by a call, or by a tape, which has unscaled the gradients as well.
    SCALED = "scaled"
    BY_TAPE = "scaled and unscaled by a tape"
    UNSCALED = "unscaled"
    UNSCALED_BEFORE = "unscaled, and another loss was scaled after that"
    APPLIED = "applied"
    SPOILED = "a wrong call was reported"


_AFTER_SCALING = {Stage.READY: Stage.SCALED, Stage.UNSCALED: Stage.UNSCALED_BEFORE}
_AFTER_TAPE = {Stage.READY: Stage.BY_TAPE}


class _Part(NamedTuple):
    """What is known of the part of a step that one optimizer makes.

    Attributes:
        stage: the `Stage` of the optimizer.
        optimizer: the optimizer, which has to live as long as its key.
        finite: the verdict on the gradients that were unscaled here; None if there is none.
        unclipped: the gradients as they were when they were unscaled.
    """

    stage: Stage
    optimizer: Any = None
    finite: tf.Tensor | None = None
    unclipped: Sequence[Gradient] = ()


class _Step(Notes):
    """What is known of the step of all optimizers.

    Attributes:
        of_losses: the `Stage` of each optimizer for which nothing was called.
        parts: dict from keys of the other optimizers to their parts.
    """

    of_losses = Stage.READY
    parts: Mapping[Any, _Part] = types.MappingProxyType({})

    def has_begun(self) -> bool:
        return self.of_losses is not Stage.READY or bool(self.parts)

    def part(self, key: Any) -> _Part:
        """Returns the part of an optimizer."""
        return self.parts.get(key, _Part(self.of_losses))

    def has_stepped(self) -> bool:
        """Whether there was a step, or a wrong call in the place of one."""
        return any(p.stage in (Stage.APPLIED, Stage.SPOILED) for p in self.parts.values())

    def drop_tensors(self) -> None:
        super().drop_tensors()
        self.parts = {k: p._replace(finite=None, unclipped=()) for k, p in self.parts.items()}


class GradScalerCalls(Calls[_Step]):
    """The calls of a `GradScaler`, which all threads share.

    A wrong call is an error. In a function in which nothing was called before, and of which no
    other calls are known, it is a warning, and the step is not made.
    """

    new = _Step
    is_shared = True

    def __init__(self, loss_scale: LossScaleValue, scales: bool = True) -> None:
        super().__init__(loss_scale, scales)
        self._lock = threading.RLock()
        # Whether gradients that were unscaled are finite, for functions that go on with a step that
        # was begun elsewhere.
        self._finite: dict[Any, tf.Variable] = {}
        # The optimizers that were named, as weak references where that is possible.
        self._named: list[Callable[[], Any]] = []
        self._was_left_out = False
        # Whether a function calls `update` for steps that are made elsewhere.
        self._is_updated_elsewhere = False

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        verdicts = {f"finite_{i}": v for i, v in enumerate(self._finite.values())}
        return {**super().variables(), **verdicts}

    def scale(self, losses: Any) -> Any:
        """Multiplies a structure of losses, by the same number between two updates."""
        if not self.scales:
            notes = self.notes()
            flat = (loss for loss in tf.nest.flatten(losses) if tf.is_tensor(loss))
            notes.losses = (*notes.losses, *flat)
            return losses
        flat = tf.nest.flatten(losses)
        with self._lock:
            step = self._of_this_step()
            if self._is_updated_elsewhere and step.has_stepped():
                step = _Step()
            if step.of_losses is Stage.BY_TAPE:
                raise ValueError(_TWO_WAYS)
            goes_on = step.of_losses is Stage.SCALED
            scaled_by = self._scale_of(step) if goes_on else self._loss_scale()
            scaled = [gradients.scale_loss(loss, scaled_by) for loss in flat]
            self._note_losses(step, _AFTER_SCALING, scaled_by, flat)
        return tf.nest.pack_sequence_as(losses, scaled)

    def refuse_tape_beside_scale(self) -> None:
        """Raises an error if a loss was scaled since the last update."""
        if self._of_this_step().of_losses is Stage.SCALED:
            raise ValueError(_TWO_WAYS)

    def by_tape(self, losses: Sequence[tf.Tensor]) -> None:
        """Notes that a tape has scaled losses, and unscaled the gradients.

        Args:
            losses: sequence of tensors, not scaled.
        """
        if not self.scales:
            return
        with self._lock:
            self.refuse_tape_beside_scale()
            self._note_losses(self._of_this_step(), _AFTER_TAPE, self._loss_scale(), losses)

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
        if not self.scales:
            return list(grads)
        with self._lock:
            key = self._key(optimizer)
            step = self._current(key)
            scaled_by = self._scale_of(step)
            unscaled = gradients.unscale(grads, scaled_by)
            finite = finiteness.all_finite(unscaled) if may_skip else tf.constant(True)
            is_wrong = self._is_wrong(_WRONG_UNSCALE, step.part(key).stage)
            earlier = self._verdict_on(step, key)
            finite = finite if earlier is None else tf.logical_and(finite, earlier)
            stage = Stage.SPOILED if is_wrong else Stage.UNSCALED
            part = _Part(stage, optimizer, finite, unscaled)
            self._note(step, scaled_by, parts={**step.parts, key: part})
            self._verdict(key).assign(finite, read_value=False)
        return unscaled

    @contextlib.contextmanager
    def applying(self, optimizer: Any) -> Iterator[GradientState | None]:
        """Context manager in which an optimizer makes a step.

        It notes the step. A step that raises an exception does not count.

        Yields:
            The state of its gradients; None if the step must not be made, as a warning said.
        """
        if not self.scales:
            yield GradientState(losses=self.notes().losses)
            return
        with self._lock:
            key = self._key(optimizer)
            step = self._current(key)
            scaled_by = self._scale_of(step)
            # Gradients that were unscaled without an optimizer belong to the first to make a step.
            keys = [key, *([None] if None in step.parts else [])]
            stages = [step.part(each).stage for each in keys]
            is_wrong = any(self._is_wrong(_WRONG_STEP, s, _NOT_MADE) for s in stages)
            scaled = all(stage is Stage.SCALED for stage in stages)
            verdicts = [self._verdict_on(step, each) for each in keys]
            verdicts = [each for each in verdicts if each is not None]
            given = GradientState(
                scaled,
                scaled_by,
                not scaled,
                step.losses,
                [gradient for each in keys for gradient in step.part(each).unclipped],
                tf.reduce_all(verdicts) if verdicts else None,
            )
            before = {k: p._replace(unclipped=()) for k, p in step.parts.items() if k in keys}
            others = {k: p for k, p in step.parts.items() if k not in keys}
            applied = _Part(Stage.APPLIED, optimizer)
            self._note(step, scaled_by, parts={**others, key: applied})
        try:
            yield None if is_wrong else given
        except BaseException:
            with self._lock:
                others = {k: p for k, p in self.notes().parts.items() if k not in keys}
                self.note(parts={**others, **before})
            raise

    def update(self, *, begins_anew: bool = False) -> bool:
        """Notes that all optimizers have made their steps.

        Args:
            begins_anew: bool. Whether the call is right even if no step was made. Defaults to
                False.

        Returns:
            Whether a step was made; True in a function that knows nothing of the step.
        """
        if not self.scales:
            self.notes().losses = ()
            return True
        with self._lock:
            step = self.current(_Step.has_stepped)
            has_begun, has_stepped = step.has_begun(), step.has_stepped()
            is_own = step is self.notes()
            self._is_updated_elsewhere |= not is_own and not tf.executing_eagerly()
            if not has_stepped and not begins_anew:
                self._is_wrong(_WRONG_UPDATE, Stage.READY)
            self._note(_Step(), None)
            if tf.distribute.in_cross_replica_context():
                self.forget()
        return has_stepped or not has_begun

    def _current(self, key: Any) -> _Step:
        """Returns the notes for a call for one optimizer, as `Notebook.current` does."""
        return self.current(lambda step: step.part(key).stage is not Stage.APPLIED)

    def _of_this_step(self) -> _Step:
        """Returns the notes for a call that scales a loss.

        A function in which nothing was called begins anew, unless the graph around it has begun.
        """
        step = self.current()
        return self.notes() if step.is_elsewhere else step

    def _note_losses(
        self,
        step: _Step,
        after: Mapping[Stage, Stage],
        scaled_by: tf.Tensor,
        losses: Sequence[Any],
    ) -> None:
        earlier = () if step.of_losses is Stage.READY else step.losses
        losses = (*earlier, *map(tf.convert_to_tensor, losses))
        parts = {k: p._replace(stage=after.get(p.stage, p.stage)) for k, p in step.parts.items()}
        of_losses = after.get(step.of_losses, step.of_losses)
        self._note(step, scaled_by, of_losses=of_losses, parts=parts, losses=losses)
        self._scaled_by.assign(scaled_by, read_value=False)

    def _note(self, step: _Step, scaled_by: tf.Tensor | None, **known: Any) -> None:
        """Notes a step with what is known anew of it."""
        before = {"of_losses": step.of_losses, "parts": step.parts, "losses": step.losses}
        self.note(**{**before, "scaled_by": scaled_by, **known})

    def _verdict_on(self, step: _Step, key: Any) -> tf.Tensor | None:
        """Returns the verdict on gradients that were unscaled, or None if none were."""
        part = step.part(key)
        if part.stage not in (Stage.UNSCALED, Stage.UNSCALED_BEFORE):
            return None
        return tf.convert_to_tensor(self._verdict(key)) if part.finite is None else part.finite

    def _verdict(self, key: Any) -> tf.Variable:
        if key not in self._finite:
            living = {None, *(_key_of(each) for refer in self._named if (each := refer()))}
            self._finite = {each: v for each, v in self._finite.items() if each in living}
            self._finite[key] = new_variables.outside_of_functions(
                lambda: host.local_variable("finite", True, tf.bool)
            )
        return self._finite[key]

    def _key(self, optimizer: Any) -> Any:
        """Returns the key of an optimizer; None for one that is not named yet.

        Raises:
            ValueError: `optimizer` is None, or was, and there are several.
        """
        living = [each for refer in self._named if (each := refer()) is not None]
        if optimizer is None:
            if len(living) > 1:
                raise ValueError(_WHOSE.format(living))
            self._was_left_out = True
            return _key_of(living[0]) if living else None
        if _key_of(optimizer) not in map(_key_of, living):
            if living and self._was_left_out and not isinstance(optimizer, types.FunctionType):
                raise ValueError(_WHOSE.format([*living, optimizer]))
            self._named = [*(r for r in self._named if r() is not None), reference(optimizer)]
        return _key_of(optimizer)

    def _is_wrong(self, wrong: Mapping[Stage, str], stage: Stage, prefix: str = "") -> bool:
        """Whether a call is wrong; raises, or warns where nothing is known."""
        if stage not in wrong:
            return False
        is_unknown = stage is Stage.READY or (stage is Stage.SPOILED and wrong is _WRONG_STEP)
        if tf.executing_eagerly() or not is_unknown:
            raise ValueError(wrong[stage])
        messages.warn(f"{prefix}{wrong[stage]}")
        return True


def _key_of(optimizer: Any) -> Any:
    if isinstance(optimizer, types.MethodType):
        return id(optimizer.__self__), optimizer.__func__
    return id(optimizer)


_NOT_MADE = "The step was not made: "
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
_WHOSE = (
    "GradScaler.unscale() was called without an optimizer, and there are several, of which each "
    "has a verdict of its own. Say whose gradients they are: scaler.unscale(gradients, optimizer). "
    "Received: optimizer=None with {}"
)

# The messages about each call, by the stages in which it is wrong.
_WRONG_UNSCALE = {
    Stage.READY: _NOT_SCALED.format("unscale"),
    Stage.BY_TAPE: _TWICE,
    Stage.UNSCALED: _TWICE,
    Stage.APPLIED: _TOO_LATE,
    Stage.SPOILED: _TWICE,
}
_WRONG_STEP = {
    Stage.READY: _NOT_SCALED.format("step"),
    Stage.APPLIED: _NO_UPDATE,
    Stage.SPOILED: _WRONGLY_UNSCALED,
}
# It is wrong if there was no step, in whatever stage.
_WRONG_UPDATE = dict.fromkeys(Stage, _NO_STEP)
