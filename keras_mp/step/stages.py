"""The stages of a `LossScaleOptimizer` in a step, and what follows from each.

    ready --scale--> scaled --unscale--> unscaled --apply--> applied

An optimizer goes from scaled to applied directly if applying unscales the gradients. It stays
applied until the next loss is scaled: gradients of other variables may be another part of the step
that was applied last. The functions here are told so by `goes_on`.
"""

import enum
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from keras_mp.step.record import Truth


class Stage(enum.IntEnum):
    """A stage. Its number is what a graph knows of it."""

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


class KnownStage:
    """A stage, as far as Python knows it.

    In eager it is one, and in a graph that has seen all calls of the step. In other graphs several
    stages are possible, and a tensor has the number of the right one.

    Args:
        possible: iterable of the stages that are possible.
        tensor: int64 scalar tensor; None (the default) if one is possible.
    """

    def __init__(self, possible: Iterable[int], tensor: tf.Tensor | None = None) -> None:
        self._possible = frozenset(map(Stage, possible))
        self._tensor: Any = tensor

    @property
    def number(self) -> int | None:
        """The number of the stage, or None if it is only known at run time."""
        return int(*self._possible) if len(self._possible) == 1 else None

    @property
    def tensor(self) -> tf.Tensor:
        """The number of the stage, an int64 scalar tensor."""
        number = self.number
        return self._tensor if number is None else tf.constant(number, tf.int64)

    def has_begun(self) -> Truth:
        """Whether a loss was scaled, or gradients were unscaled, but not yet applied."""
        return self.holds(Stage.has_begun)

    def holds(self, rule: Callable[[Stage], bool]) -> Truth:
        """Whether a rule holds; a bool as far as Python knows."""
        answers = {stage: rule(stage) for stage in self._possible}
        if len({*answers.values()}) == 1:
            return any(answers.values())
        return tf.gather([answers.get(stage, False) for stage in Stage], self._tensor)

    def after(self, rule: Callable[[Stage], Stage]) -> "KnownStage":
        """Returns the stage that comes after a call, by a rule."""
        following = {stage: rule(stage) for stage in self._possible}
        possible = {*following.values()}
        if len(possible) == 1:
            return KnownStage(possible)
        numbers = tf.constant([following.get(stage, 0) for stage in Stage], tf.int64)
        return KnownStage(possible, tf.gather(numbers, self._tensor))


def known(number: int) -> KnownStage:
    """Returns a stage that Python knows, by its number."""
    return KnownStage([number])


def unknown(number: tf.Tensor) -> KnownStage:
    """Returns a stage that only run time knows, by its number."""
    return KnownStage(Stage, number)
