"""The stages of a `LossScaleOptimizer`, and what follows from each.

    ready --scale--> scaled --unscale--> unscaled --apply--> applied

An optimizer goes from scaled to applied directly if applying unscales the gradients. It stays
applied until the next loss is scaled: gradients of other variables may be another part of the step
that was applied last. The functions here are told so by `goes_on`.
"""

import enum


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
    # Gradients were applied: those that were unscaled, in these ways or by applying; or those that
    # nobody had scaled, which was reported.
    APPLIED = 6
    APPLIED_EARLY = 7
    APPLIED_SCALED = 8
    APPLIED_ONLY = 9

    def has_begun(self) -> bool:
        """Whether a loss was scaled, or gradients were unscaled, but not yet applied."""
        return Stage.READY < self < Stage.APPLIED

    def has_scaled(self) -> bool:
        """Whether a loss was scaled whose gradients were not yet applied."""
        return self.has_begun() and self is not Stage.UNSCALED_ONLY

    def apply_unscales(self) -> bool:
        """Whether applying has to unscale the gradients of this step."""
        return self is Stage.SCALED_TO_APPLY

    def is_scaled_for_wrapper(self, is_another_part: bool) -> bool:
        """Whether gradients that a wrapper is about to see are still scaled.

        Args:
            is_another_part: bool. Whether those of other variables were unscaled before.
        """
        other = is_another_part and self in (Stage.UNSCALED_EARLY, Stage.APPLIED_EARLY)
        return self.apply_unscales() or other

    def knows_its_scale(self) -> bool:
        """Whether a loss was scaled in this step, or in one of which this may be a part."""
        return self.has_scaled() or (self >= Stage.APPLIED and self is not Stage.APPLIED_ONLY)

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
            return Stage.APPLIED_ONLY
        is_early = self in (Stage.UNSCALED_EARLY, Stage.APPLIED_EARLY)
        return Stage.APPLIED_EARLY if is_early else Stage.APPLIED
