"""The facts about the calls of a step, the wrong calls, and the messages about these.

RFC 293, "LossScaleOptimizer Overview". The states of an optimizer are

    ready --scale--> scaled --unscale--> unscaled --apply--> applied --update--> ready

It goes from scaled to applied directly if applying unscales. The state of all optimizers that share
a scale is one int, in which each fact is a bit.

A `LossScaleOptimizer` has one optimizer, and no `update`: scaling a loss begins the next step. Its
wrong calls are reported, and the step is made. Those of a `GradScaler` are errors, or the step is
refused.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Facts about all optimizers: a loss was scaled; applying unscales, since `get_unscaled_gradients`
# is not called; a tape has scaled the loss, and unscaled its gradients.
SCALED, TO_APPLY, BY_TAPE = 1, 2, 4
# In the place of the last one, for a single optimizer: the step began while another one was under
# way that unscales at the other call.
OVERLAPS = BY_TAPE
# Facts about each optimizer: its gradients were unscaled; a step was made of them; something was
# wrong, and reported; they were unscaled after the last loss was scaled; one was not finite.
UNSCALED, APPLIED, SPOILED, JUST_UNSCALED, OVERFLOWED = 1, 2, 4, 8, 16
EVERY_FACT = 31
# The numbers of optimizers: 0 for one that was not named, or the only one; 1 to `MAX_OPTIMIZERS`;
# one number for all others. A step that was refused counts as one of optimizer 0.
UNNAMED, MAX_OPTIMIZERS, OTHERS = 0, 10, 11

_ALL = 2**63 - 1

Truth = bool | tf.Tensor


def bits_of(index: int, facts: int) -> int:
    """Returns the bits of facts about one optimizer."""
    return facts << (3 + 5 * index)


def bits_of_any(facts: int) -> int:
    """Returns the bits of facts about every optimizer."""
    return sum(bits_of(index, facts) for index in range(OTHERS + 1))


class Facts:
    """The facts about a step: an int in eager; in a graph a tensor, of which some bits are known.

    What is known leaves out operations. The rules about facts are the same for both, since the
    answers of `has` go through `both`, `either` and `negated`.

    Args:
        ones: int. The bits that are known to be 1. Defaults to 0.
        tensor: int64 scalar tensor. Defaults to None: then all bits are known.
        known: int. The bits that are known. Defaults to all, or with a tensor to those of `ones`.
    """

    def __init__(
        self, ones: int = 0, tensor: tf.Tensor | None = None, known: int | None = None
    ) -> None:
        everything = _ALL if tensor is None else ones
        self.ones, self._known = ones, everything if known is None else known
        self._tensor = tensor if self._known != _ALL else None

    @property
    def number(self) -> int | None:
        """All facts as an int, None if only run time knows them."""
        return self.ones if self._tensor is None else None

    @property
    def tensor(self) -> tf.Tensor:
        """All facts, an int64 scalar tensor."""
        return tf.constant(self.ones, tf.int64) if self._tensor is None else self._tensor

    @property
    def value(self) -> Any:
        """All facts, as an int or as a tensor."""
        return self.ones if self._tensor is None else self._tensor

    def has(self, bits: int) -> Truth:
        """Whether any of these facts is true."""
        if self.ones & bits:
            return True
        unknown = bits & ~self._known
        return tf.not_equal(self.tensor & unknown, 0) if unknown else False

    def changed(self, *, add: int = 0, remove: int = 0, when: Truth = True) -> "Facts":
        """Returns the facts after some have become true and others false, if `when` is true."""
        if tf.is_tensor(when):
            if tf.executing_eagerly():
                when = bool(when)
            else:
                now = tf.where(when, _changed(self.tensor, add, remove), self.tensor)
                unknown = add & ~self.ones | remove & (self.ones | ~self._known)
                return Facts(self.ones & ~unknown, now, self._known & ~unknown)
        if not when:
            return self
        tensor = None if self._tensor is None else _changed(self._tensor, add, remove)
        return Facts(self.ones & ~remove | add, tensor, self._known | add | remove)


def _changed(facts: tf.Tensor, add: int, remove: int) -> tf.Tensor:
    kept = facts & ~remove if remove else facts
    return kept | add if add else kept


def both(*truths: Truth) -> Truth:
    """Whether all are true; in Python as far as it is known there."""
    if any(truth is False for truth in truths):
        return False
    unknown = [truth for truth in truths if truth is not True]
    return functools.reduce(tf.logical_and, unknown) if unknown else True


def either(*truths: Truth) -> Truth:
    """Whether one is true; in Python as far as it is known there."""
    return negated(both(*map(negated, truths)))


def negated(truth: Truth) -> Truth:
    """Whether it is false; in Python if it is known there."""
    return not truth if isinstance(truth, bool) else tf.logical_not(truth)


def chosen(
    truth: Truth, value: Callable[[], tf.Tensor], other: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """Returns one of two values; in Python if it is known there which one."""
    if isinstance(truth, bool):
        return value() if truth else other()
    return tf.where(truth, value(), other())


# The functions from here are for one optimizer. If `goes_on`, the variables are others than those
# of the last step, so this may be another part of that step.

_UNSCALED, _APPLIED, _SPOILED = (bits_of(UNNAMED, fact) for fact in (UNSCALED, APPLIED, SPOILED))


def has_begun(facts: Facts) -> Truth:
    """Whether calls of the next step were made."""
    return both(facts.has(SCALED | _UNSCALED), negated(facts.has(_APPLIED)))


def is_scaled(facts: Facts, goes_on: Truth) -> Truth:
    """Whether the gradients that are applied now are still scaled."""
    is_of_this_step = either(goes_on, negated(facts.has(_APPLIED)))
    return both(is_of_this_step, facts.has(SCALED), negated(facts.has(_UNSCALED)))


def is_divided(facts: Facts, goes_on: Truth) -> Truth:
    """Whether the gradients that are applied now were unscaled by a call."""
    is_more = both(goes_on, facts.has(_APPLIED), negated(facts.has(SCALED | _SPOILED)))
    return either(facts.has(_UNSCALED), is_more)


def misses_a_call(facts: Facts, goes_on: Truth) -> Truth:
    """Whether a call is missing if gradients are applied now."""
    was_scaled = both(has_begun(facts), facts.has(SCALED))
    is_complete = facts.has(TO_APPLY | _UNSCALED)
    is_part = both(goes_on, facts.has(_APPLIED | _UNSCALED))
    return negated(either(both(was_scaled, is_complete), both(negated(was_scaled), is_part)))


def after_applying(facts: Facts, goes_on: Truth) -> Facts:
    """Returns the facts after gradients were applied."""
    is_spoiled = both(misses_a_call(facts, goes_on), negated(has_begun(facts)))
    after = Facts(_APPLIED).changed(add=SCALED, when=is_scaled(facts, goes_on))
    after = after.changed(add=_SPOILED, when=is_spoiled)
    return after.changed(add=OVERLAPS, when=facts.has(OVERLAPS))


def after_unscaling(facts: Facts) -> Facts:
    """Returns the facts after gradients were unscaled."""
    begun = has_begun(facts)
    kept = facts.changed(remove=_ALL & ~OVERLAPS, when=negated(begun))
    return kept.changed(add=_UNSCALED)


def apply_unscales(facts: Facts) -> Truth:
    """Whether `apply` has to unscale the gradients of this step."""
    return both(facts.has(TO_APPLY), negated(facts.has(_UNSCALED)))


def knows_its_scale(facts: Facts) -> Truth:
    """Whether the loss was scaled, in this step or in one of which this may be a part."""
    return both(facts.has(SCALED | _APPLIED), negated(facts.has(_SPOILED)))


def missing_call(facts: Facts) -> str:
    """Returns the message about the missing call, given facts that are known."""
    if not has_begun(facts):
        return _NEITHER
    return _NOT_UNSCALED if facts.has(SCALED) else _NOT_SCALED_BEFORE


# The functions from here are for several optimizers.


class Call(enum.IntEnum):
    """A call of a `GradScaler`."""

    SCALE = 0
    UNSCALE = 1
    STEP = 2
    UPDATE = 3
    TAPE = 4


def wrong_if(index: int) -> int:
    """Returns the facts that must not be true when an optimizer makes a step."""
    once = 0 if index == OTHERS else bits_of(index, APPLIED)
    return once | bits_of(UNNAMED, SPOILED) | bits_of(index, SPOILED)


def what_is_wrong(call: int, index: int, facts: int) -> str | None:
    """Returns the message about a wrong call; None if the call is right.

    Args:
        call: a `Call`.
        index: int. The number of the optimizer.
        facts: int. The state before the call.
    """
    if call == Call.UPDATE:
        return None if facts & bits_of_any(APPLIED | SPOILED) else _NO_STEP
    if call == Call.SCALE:
        return _TWO_WAYS if facts & BY_TAPE else None
    if call == Call.TAPE:
        return _TWO_WAYS if facts & SCALED else None
    if index != OTHERS and facts & bits_of(index, APPLIED):
        return _NO_UPDATE if call == Call.STEP else _TOO_LATE
    if call == Call.STEP and facts & wrong_if(index):
        return _WRONGLY_UNSCALED
    if call == Call.UNSCALE and facts & (BY_TAPE | bits_of(index, JUST_UNSCALED)):
        return _TWICE
    if not facts & (SCALED | BY_TAPE):
        return _NOT_SCALED.format("unscale" if call == Call.UNSCALE else "step")
    return None


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
