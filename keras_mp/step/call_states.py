"""The states of a step between its calls, the transitions, and the wrong calls.

RFC 293, "LossScaleOptimizer Overview". The states of an optimizer are

    ready --scale--> scaled --unscale--> unscaled --apply--> applied --update--> ready

It goes from scaled to applied directly if applying unscales. The state of all optimizers that share
a scale is one int, in which each fact is a bit. All functions here depend on that int alone.

A `LossScaleOptimizer` has one optimizer, and no `update`: scaling a loss begins the next step. Its
wrong calls are reported, and the step is made. Those of a `GradScaler` are errors, or the step is
refused.
"""

import enum

# Facts about all optimizers: a loss was scaled; applying unscales, since `get_unscaled_gradients`
# is not called; a tape has scaled the loss, and unscaled its gradients.
SCALED, TO_APPLY, BY_TAPE = 1, 2, 4
# Facts about each optimizer: its gradients were unscaled; a step was made of them; something was
# wrong, and reported; they were unscaled after the last loss was scaled; one was not finite.
UNSCALED, APPLIED, SPOILED, JUST_UNSCALED, OVERFLOWED = 1, 2, 4, 8, 16
# The numbers of optimizers: 0 for one that was not named, or the only one; 1 to `MAX_OPTIMIZERS`;
# one number for all others. A step that was refused counts as one of optimizer 0.
UNNAMED, MAX_OPTIMIZERS, OTHERS = 0, 10, 11


def of(index: int, facts: int) -> int:
    """Returns the bits of facts about one optimizer."""
    return facts << (3 + 5 * index)


def of_any(facts: int) -> int:
    """Returns the bits of facts about every optimizer."""
    return sum(of(index, facts) for index in range(OTHERS + 1))


# The functions from here are for one optimizer. If `goes_on`, the variables are others than those
# of the last step, so this may be another part of that step.

_UNSCALED, _APPLIED, _SPOILED = (of(UNNAMED, fact) for fact in (UNSCALED, APPLIED, SPOILED))
ALL_OF_ONE = range(of(UNNAMED, SPOILED) * 2)


def has_begun(facts: int) -> bool:
    """Whether calls of the next step were made."""
    return bool(facts) and not facts & _APPLIED


def is_scaled(facts: int, goes_on: bool) -> bool:
    """Whether the gradients that are applied now are still scaled."""
    is_of_this_step = goes_on or not facts & _APPLIED
    return is_of_this_step and bool(facts & SCALED) and not facts & _UNSCALED


def is_divided(facts: int, goes_on: bool) -> bool:
    """Whether the gradients that are applied now were unscaled by a call."""
    is_more = goes_on and facts & _APPLIED and not facts & (SCALED | _SPOILED)
    return bool(facts & _UNSCALED or is_more)


def misses_a_call(facts: int, goes_on: bool) -> bool:
    """Whether a call is missing if gradients are applied now."""
    if has_begun(facts) and facts & SCALED:
        return not facts & (TO_APPLY | _UNSCALED)
    return not (goes_on and facts & (_APPLIED | _UNSCALED))


def is_news(facts: int, goes_on: bool) -> bool:
    """Whether a call is missing, and no warning was given for the last step."""
    return misses_a_call(facts, goes_on) and not facts & _SPOILED


def after_applying(facts: int, goes_on: bool) -> int:
    """Returns the state after gradients were applied."""
    after = _APPLIED
    if is_scaled(facts, goes_on):
        after |= SCALED
    if misses_a_call(facts, goes_on) and not (has_begun(facts) and facts & (SCALED | _UNSCALED)):
        after |= _SPOILED
    return after


def after_unscaling(facts: int) -> int:
    """Returns the state after gradients were unscaled."""
    return (facts if has_begun(facts) else 0) | _UNSCALED


def apply_unscales(facts: int) -> bool:
    """Whether `apply` has to unscale the gradients of this step."""
    return bool(facts & TO_APPLY) and not facts & _UNSCALED


def after_unscaling_early(facts: int) -> int:
    """Returns the state after an early unscaling in place of that of `apply`."""
    return facts | _UNSCALED if apply_unscales(facts) else facts


def knows_its_scale(facts: int) -> bool:
    """Whether the loss was scaled, in this step or in one of which this may be a part."""
    return bool(facts & (SCALED | _APPLIED)) and not facts & _SPOILED


def missing_call(facts: int) -> str:
    """Returns the message about the missing call."""
    if has_begun(facts) and facts & SCALED:
        return _NOT_UNSCALED
    return _NOT_SCALED_BEFORE if has_begun(facts) and facts & _UNSCALED else _NEITHER


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
    once = 0 if index == OTHERS else of(index, APPLIED)
    return once | of(UNNAMED, SPOILED) | of(index, SPOILED)


def what_is_wrong(call: int, index: int, facts: int) -> str | None:
    """Returns the message about a wrong call; None if the call is right.

    Args:
        call: a `Call`.
        index: int. The number of the optimizer.
        facts: int. The state before the call.
    """
    if call == Call.UPDATE:
        return None if facts & of_any(APPLIED | SPOILED) else _NO_STEP
    if call == Call.SCALE:
        return _TWO_WAYS if facts & BY_TAPE else None
    if call == Call.TAPE:
        return _TWO_WAYS if facts & SCALED else None
    if index != OTHERS and facts & of(index, APPLIED):
        return _NO_UPDATE if call == Call.STEP else _TOO_LATE
    if call == Call.STEP and facts & wrong_if(index):
        return _WRONGLY_UNSCALED
    if call == Call.UNSCALE and facts & (BY_TAPE | of(index, JUST_UNSCALED)):
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
    "GradScaler.update() was called, and no step() since the last one: there is nothing to learn "
    f"for the loss scale. Call it once after all optimizers have made their steps:{_SCALER_EXAMPLE}"
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
