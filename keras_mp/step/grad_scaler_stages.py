"""The stages of an optimizer of a `GradScaler`, and which calls are wrong in each.

    ready --scale--> scaled --unscale--> unscaled --step--> applied --update--> ready

`scale`, a `LossScaleGradientTape` and `update` are calls for all optimizers; `unscale` and `step`
for one. `step` unscales gradients that are still scaled.
"""

import enum


class Stage(enum.IntEnum):
    """A stage of an optimizer of a `GradScaler`."""

    READY = 0
    # A loss was scaled: by a call, by a tape, which has unscaled the gradients as well, or by both.
    SCALED = 1
    BY_TAPE = 2
    IN_TWO_WAYS = 3
    # The gradients were unscaled, and were finite or not.
    UNSCALED = 4
    OVERFLOWED = 5
    # After that another loss was scaled.
    UNSCALED_BEFORE = 6
    OVERFLOWED_BEFORE = 7
    APPLIED = 8
    # A wrong call was made, and reported.
    SPOILED = 9

    def has_scaled(self) -> bool:
        """Whether a call has scaled a loss."""
        return self in (Stage.SCALED, Stage.IN_TWO_WAYS)

    def is_scaled(self) -> bool:
        """Whether gradients may be applied, and are still scaled."""
        return self is Stage.SCALED

    def is_finite(self) -> bool:
        """Whether no gradient was found that is not finite."""
        return self not in (Stage.OVERFLOWED, Stage.OVERFLOWED_BEFORE)

    def has_no_step(self) -> bool:
        """Whether there was no step, and no wrong call in the place of one."""
        return self < Stage.APPLIED

    def after_scaling(self) -> "Stage":
        """Returns the stage after a loss was scaled."""
        return _AFTER_SCALING.get(self, self)

    def after_tape(self) -> "Stage":
        """Returns the stage after a tape has scaled a loss, and unscaled the gradients."""
        if self is Stage.READY:
            return Stage.BY_TAPE
        is_scaled = self is Stage.SCALED or Stage.UNSCALED <= self <= Stage.OVERFLOWED_BEFORE
        return Stage.IN_TWO_WAYS if is_scaled else self

    def after_unscaling(self) -> "Stage":
        """Returns the stage after gradients were unscaled that are finite then."""
        if self in (Stage.APPLIED, Stage.IN_TWO_WAYS):
            return self
        return _AFTER_UNSCALING.get(self, Stage.SPOILED)

    def after_overflow(self) -> "Stage":
        """Returns the stage after gradients were unscaled that are not finite."""
        after = self.after_unscaling()
        return Stage.OVERFLOWED if after is Stage.UNSCALED else after

    def after_other_step(self) -> "Stage":
        """Returns the stage after what was unscaled was used for another optimizer."""
        return Stage.SCALED if Stage.UNSCALED <= self <= Stage.OVERFLOWED_BEFORE else self


# The stages of an optimizer for which nothing was called.
FOR_ALL = (Stage.READY, Stage.SCALED, Stage.BY_TAPE, Stage.IN_TWO_WAYS)

_AFTER_SCALING = {
    Stage.READY: Stage.SCALED,
    Stage.BY_TAPE: Stage.IN_TWO_WAYS,
    Stage.UNSCALED: Stage.UNSCALED_BEFORE,
    Stage.OVERFLOWED: Stage.OVERFLOWED_BEFORE,
}
_AFTER_UNSCALING = {
    Stage.SCALED: Stage.UNSCALED,
    Stage.UNSCALED_BEFORE: Stage.UNSCALED,
    Stage.OVERFLOWED_BEFORE: Stage.OVERFLOWED,
}

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

# The messages about each call, by the stages in which it is wrong.
WRONG_SCALE = dict.fromkeys((Stage.BY_TAPE, Stage.IN_TWO_WAYS), _TWO_WAYS)
WRONG_TAPE = dict.fromkeys((Stage.SCALED, Stage.IN_TWO_WAYS), _TWO_WAYS)
WRONG_UNSCALE = {
    Stage.READY: _NOT_SCALED.format("unscale"),
    Stage.BY_TAPE: _TWICE,
    Stage.IN_TWO_WAYS: _TWICE,
    Stage.UNSCALED: _TWICE,
    Stage.OVERFLOWED: _TWICE,
    Stage.APPLIED: _TOO_LATE,
    Stage.SPOILED: _TWICE,
}
WRONG_STEP = {
    Stage.READY: _NOT_SCALED.format("step"),
    Stage.IN_TWO_WAYS: _TWO_WAYS,
    Stage.APPLIED: _NO_UPDATE,
    Stage.SPOILED: _WRONGLY_UNSCALED,
}
# It is wrong if there was no step, in whatever stage.
WRONG_UPDATE = dict.fromkeys(Stage, _NO_STEP)
