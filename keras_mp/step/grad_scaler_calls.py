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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.step import finiteness, gradients
from keras_mp.step.gradients import Gradient
from keras_mp.step.record import Calls, GradientState
from keras_mp.support import host, new_variables

# The stages of an optimizer. READY: nothing was called. SCALED: a loss was scaled by a call.
# BY_TAPE: by a tape, which has unscaled the gradients as well. UNSCALED_BEFORE: they were unscaled,
# and another loss was scaled after that. SPOILED: a wrong call was reported.
Stage = enum.Enum("Stage", "READY SCALED BY_TAPE UNSCALED UNSCALED_BEFORE APPLIED SPOILED")
_AFTER_SCALING = {Stage.READY: Stage.SCALED, Stage.UNSCALED: Stage.UNSCALED_BEFORE}
_AFTER_TAPE = {Stage.READY: Stage.BY_TAPE}
_AT_UNSCALE = (Stage.SCALED, Stage.UNSCALED_BEFORE)
_AT_STEP = (*_AT_UNSCALE, Stage.BY_TAPE, Stage.UNSCALED)


class _Part(NamedTuple):
    """What is known of the part of a step that one optimizer makes.

    Attributes:
        stage: the `Stage` of the optimizer.
        optimizer: the optimizer, which has to live as long as its key.
        finite: the verdict on the gradients that were unscaled here; None if there is none.
        unclipped: the gradients as they were when they were unscaled.
    """

    stage: Stage = Stage.READY
    optimizer: Any = None
    finite: tf.Tensor | None = None
    unclipped: Sequence[Gradient] = ()


# In the place of an optimizer: all for which nothing was called.
_OTHERS = "others"


class _Step(NamedTuple):
    """What is known of the step of all optimizers.

    Attributes:
        parts: dict from the keys of optimizers to their parts.
        losses: the losses of the step.
        scaled_by: their factor, a float32 scalar tensor; None if it is not known here.
    """

    parts: Mapping[Any, _Part] = types.MappingProxyType({_OTHERS: _Part()})
    losses: tuple[tf.Tensor, ...] = ()
    scaled_by: tf.Tensor | None = None

    def bare(self) -> "_Step":
        """Returns the step without tensors."""
        return _Step({k: p._replace(finite=None, unclipped=()) for k, p in self.parts.items()})

    def stages(self) -> set[Stage]:
        """Returns the stages of all optimizers."""
        return {part.stage for part in self.parts.values()}

    def has_begun(self) -> bool:
        return self.stages() != {Stage.READY}

    def has_stepped(self) -> bool:
        """Whether there was a step, or a wrong call in the place of one."""
        return not self.stages().isdisjoint((Stage.APPLIED, Stage.SPOILED))

    def part(self, key: Any) -> _Part:
        """Returns the part of an optimizer."""
        return self.parts.get(key, self.parts[_OTHERS])


class GradScalerCalls(Calls):
    """The calls of a `GradScaler`, which all threads share.

    A wrong call is an error. In a function in which nothing was called before, and of which no
    other calls are known, it is a warning, and the step is not made.
    """

    new = _Step()
    is_shared = True

    def __init__(self, loss_scale: Callable[[], tf.Tensor], scales: bool = True) -> None:
        super().__init__(loss_scale, scales)
        self._lock = threading.RLock()
        # Whether gradients that were unscaled are finite, for functions that go on with a step that
        # was begun elsewhere.
        self._finite: dict[Any, tf.Variable] = {}
        # The optimizers that were named, as weak references where that is possible.
        self._named: dict[Any, Callable[[], Any]] = {}
        self._was_left_out = False
        # Whether a function calls `update` for steps that are made elsewhere.
        self._is_updated_elsewhere = False

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        verdicts = {f"finite_{i}": v for i, v in enumerate(self._finite.values())}
        return {**super().variables(), **verdicts}

    def scale(self, losses: Any) -> Any:
        """Multiplies a structure of losses, by the same number between two updates."""
        flat = tf.nest.flatten(losses)
        if not self.scales:
            page, tensors = self.page(), filter(tf.is_tensor, flat)
            page.step = page.step._replace(losses=(*page.step.losses, *tensors))
            return losses
        with self._lock:
            step = self._of_this_step(Stage.BY_TAPE)
            is_scaled = step.parts[_OTHERS].stage is Stage.SCALED
            scaled_by = self._scale_of(step) if is_scaled else self._loss_scale()
            scaled = [gradients.scale_loss(loss, scaled_by) for loss in flat]
            self._note_losses(step, _AFTER_SCALING, scaled_by, flat)
        return tf.nest.pack_sequence_as(losses, scaled)

    def refuse_tape_beside_scale(self) -> None:
        """Raises an error if a loss was scaled since the last update."""
        self._of_this_step(Stage.SCALED)

    def by_tape(self, losses: Sequence[tf.Tensor]) -> None:
        """Notes that a tape has scaled losses, and unscaled the gradients.

        Args:
            losses: sequence of tensors, not scaled.
        """
        if not self.scales:
            return
        with self._lock:
            step = self._of_this_step(Stage.SCALED)
            self._note_losses(step, _AFTER_TAPE, self._loss_scale(), losses)

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
            earlier = self._verdict_on(step, key)
            stage = step.part(key).stage
            is_wrong = stage not in _AT_UNSCALE and _tell("unscale", stage)
            finite = finite if earlier is None else tf.logical_and(finite, earlier)
            part = _Part(Stage.SPOILED if is_wrong else Stage.UNSCALED, optimizer, finite, unscaled)
            self.note(step._replace(scaled_by=scaled_by, parts={**step.parts, key: part}))
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
            yield GradientState(losses=self.page().step.losses)
            return
        with self._lock:
            key = self._key(optimizer)
            step = self._current(key)
            scaled_by = self._scale_of(step)
            # Gradients that were unscaled without an optimizer belong to the first to make a step.
            keys = [key, *([None] if None in step.parts else [])]
            before = {each: step.part(each) for each in keys}
            stages = {part.stage for part in before.values()}
            is_wrong = any(_tell("step", stage) for stage in stages.difference(_AT_STEP))
            scaled = stages == {Stage.SCALED}
            verdicts = [self._verdict_on(step, each) for each in keys]
            verdicts = [each for each in verdicts if each is not None]
            finite = tf.reduce_all(verdicts) if verdicts else None
            unclipped = [gradient for part in before.values() for gradient in part.unclipped]
            before = {k: step.parts[k]._replace(unclipped=()) for k in keys if k in step.parts}
            given = GradientState(scaled, scaled_by, not scaled, step.losses, unclipped, finite)
            parts = {k: part for k, part in step.parts.items() if k not in keys}
            parts[key] = _Part(Stage.APPLIED, optimizer)
            self.note(step._replace(scaled_by=scaled_by, parts=parts))
            del step  # It has gradients, which should not be in memory while the step is made.
        try:
            yield None if is_wrong else given
        except BaseException:
            with self._lock:
                step = self.page().step
                parts = {k: part for k, part in step.parts.items() if k != key}
                self.note(step._replace(parts={**parts, **before}))
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
            self.page().step = _Step()
            return True
        with self._lock:
            page = self.current(_Step.has_stepped)
            has_begun, has_stepped = page.step.has_begun(), page.step.has_stepped()
            is_own = page is self.page()
            self._is_updated_elsewhere |= not is_own and not tf.executing_eagerly()
            if not has_stepped and not begins_anew:
                _tell("update", Stage.READY)
            self.note(_Step())
            if tf.distribute.in_cross_replica_context():
                self.forget()
        return has_stepped or not has_begun

    def _current(self, key: Any) -> _Step:
        """Returns the step for a call for one optimizer, as `Notebook.current` does."""
        return self.current(lambda step: step.part(key).stage is not Stage.APPLIED).step

    def _of_this_step(self, other: Stage) -> _Step:
        """Returns the step for a call that scales a loss.

        A function in which nothing was called begins anew, unless the graph around it has begun.

        Args:
            other: the stage after the other way of scaling a loss, which is refused.
        """
        page = self.current()
        step = (page if page.time else self.page()).step
        if self._is_updated_elsewhere and step.has_stepped():
            step = _Step()
        if step.parts[_OTHERS].stage is other:
            raise ValueError(
                "A LossScaleGradientTape scales the loss by itself, and unscales the gradients: a "
                "GradScaler.scale() beside it, before the next update(), makes it unclear what is "
                "scaled."
            )
        return step

    def _note_losses(self, step: _Step, after: Any, scaled_by: tf.Tensor, losses: Any) -> None:
        earlier = () if step.parts[_OTHERS].stage is Stage.READY else step.losses
        losses = (*earlier, *map(tf.convert_to_tensor, losses))
        parts = {k: p._replace(stage=after.get(p.stage, p.stage)) for k, p in step.parts.items()}
        self.note(_Step(parts, losses, scaled_by))
        self._scaled_by.assign(scaled_by, read_value=False)

    def _verdict_on(self, step: _Step, key: Any) -> tf.Tensor | None:
        """Returns the verdict on gradients that were unscaled, or None if none were."""
        part = step.part(key)
        if part.stage not in (Stage.UNSCALED, Stage.UNSCALED_BEFORE):
            return None
        return tf.convert_to_tensor(self._verdict(key)) if part.finite is None else part.finite

    def _verdict(self, key: Any) -> tf.Variable:
        if key not in self._finite:
            self._finite = {k: v for k, v in self._finite.items() if k in (None, *self._named)}
            self._finite[key] = new_variables.outside_of_functions(
                lambda: host.local_variable("finite", True, tf.bool)
            )
        return self._finite[key]

    def _key(self, optimizer: Any) -> Any:
        """Returns the key of an optimizer; None for one that is not named yet.

        Raises:
            ValueError: `optimizer` is None, or was, and there are several.
        """
        living = {k: each for k, refer in self._named.items() if (each := refer()) is not None}
        key = None if optimizer is None else _key_of(optimizer)
        if key in living:
            return key
        is_function = isinstance(optimizer, types.FunctionType)
        is_unclear = living and self._was_left_out and not is_function
        if optimizer is None:
            is_unclear = len(living) > 1
        if is_unclear:
            raise ValueError(
                "GradScaler.unscale() was called without an optimizer, and there are several, of "
                "which each has a verdict of its own. Say whose gradients they are: "
                "scaler.unscale(gradients, optimizer). Received: optimizer=None with "
                f"{[each for each in (*living.values(), optimizer) if each is not None]}"
            )
        if optimizer is None:
            self._was_left_out = True
            return next(iter(living), None)
        self._named = {**{k: self._named[k] for k in living}, key: _reference(optimizer)}
        return key


def _reference(value: Any) -> Callable[[], Any]:
    """Returns a function that returns an object, or None once nobody else has it.

    Args:
        value: the object. A bound method lives as long as the object that it is bound to. An object
            that allows no weak references is kept alive.
    """
    try:
        if isinstance(value, types.MethodType):
            return weakref.WeakMethod(value)
        return weakref.ref(value)
    except TypeError:  # Some objects have slots, but none for weak references.
        return lambda: value


def _tell(call: str, stage: Stage) -> bool:
    """Raises an error about a wrong call, or warns and returns True."""
    from keras_mp.step import wrong_calls

    return wrong_calls.tell(call, stage.name)


def _key_of(optimizer: Any) -> Any:
    if isinstance(optimizer, types.MethodType):
        return id(optimizer.__self__), optimizer.__func__
    return id(optimizer)
