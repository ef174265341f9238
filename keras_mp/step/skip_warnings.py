"""Warns of many skipped steps.

Three warnings are given once each: many steps in a row were skipped, or half of the last hundred,
or the scale has come down to its floor.
"""

from typing import Any

import numpy as np

from keras_mp.step.loss_scales import DynamicLossScale
from keras_mp.step.overflow import Overflow, last_note, listed, report
from keras_mp.step.skip_report import HALF, HEADER, TIMES
from keras_mp.support import messages


def warn(scaler: Any, line: messages.Line | None) -> None:
    """Reads the last note, and warns if it is time.

    Args:
        scaler: the `Scaler`, which has the notes of all skipped steps.
        line: the user's line that makes the steps; None for the one that is being executed.

    Raises:
        RuntimeError: as many steps in a row were skipped as the user allows.
    """
    found = last_note(scaler)
    if found is None or found[1][0] == scaler.looked_at:
        return
    vector, last = found[1], report(*found)
    (scaler.looked_at, _, consecutive, _), times = vector[:HEADER], vector[HEADER:TIMES]
    in_a_row = f"{consecutive:g} steps in a row were skipped."
    if scaler.raise_after is not None and consecutive >= scaler.raise_after:
        received = f" Received: raise_after_skips={scaler.raise_after}"
        raise RuntimeError(in_a_row + _about(last, scaler) + received)
    if scaler.warn_after is None:
        return
    news, scale = {}, scaler.loss_scale
    if consecutive >= scaler.warn_after:
        news["row"] = in_a_row
    elif np.sum((times > 0) & (times > times[0] - 2 * HALF)) >= HALF:
        news["half"] = "Half of the last 100 steps were skipped."
    can_fall = isinstance(scale, DynamicLossScale) and last.loss_is_finite is not False
    if can_fall and float(scale()) <= scale.min_loss_scale < scale.initial_loss_scale:
        news["floor"] = "The loss scale has come down to its floor; steps are still skipped."
    for what in [each for each in news if each not in scaler.told]:
        scaler.told.add(what)
        messages.warn(news[what] + _about(last, scaler), line)


def _about(last: Overflow, scaler: Any) -> str:
    text, named = last.of_examples, listed(last.variables[::-1])
    if not last.lacks_examples:
        text += f" {_DIAGNOSES[last.loss_is_finite]}"
        # All gradients of a loss that is not finite are NaN. Of several, they tell which. NaN
        # spreads backward, from the loss, so the last variables come first.
        if named and (last.loss_is_finite is not False or len(scaler.notes) > 1):
            text += f" In the last skipped step, gradients were not finite: {named}."
    return f"{text} `last_overflow` tells more about the last step."


_FORWARD = (
    "look at the forward pass, where a smaller loss scale changes nothing: at the inputs and "
    "labels, the learning rate, weights that are already not finite, and activations above 65504, "
    "the largest float16; print(keras_mp.numerics.check(model, (x, y))) names the cause and the "
    "cure"
)
_BACKWARD = (
    "gradients overflow on their way back: find the operation whose gradient is not finite (with "
    "keras_mp.numerics.watch(model): model.fit(x, y) names it), such as a norm at zero, run it in "
    "float32, or clip what goes into it; with several replicas, see whether "
    "aggregate_in_float16=False helps, since float16 sums end at 65504"
)
# What to do, by whether the loss was finite.
_DIAGNOSES = {
    None: "The loss was scaled in another function and could not be looked at. If it is Inf or "
    f"NaN, {_FORWARD}; if it is finite, {_BACKWARD}.",
    True: f"The loss of the last one was finite, so {_BACKWARD}.",
    False: f"The loss of the last one was Inf or NaN: {_FORWARD}.",
}
