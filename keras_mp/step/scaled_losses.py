"""Tells a `train_step` which losses are scaled, and asks it who scaled gradients.

What scales a loss notes the result here. An optimizer that is about to apply gradients can then
tell whether it has to warn of a missing call. `models/step_tapes.py` has what is known in a
`train_step` that is watched; elsewhere only whether anything was scaled is noted. This module needs
TensorFlow only.
"""

import threading
from collections.abc import Iterable
from typing import Any

import tensorflow as tf


class ScaledLosses:
    """What is noted of the losses of a step; outside of steps, little.

    Attributes:
        has_scaled: whether the program has scaled a loss anywhere.
        moved_scale: the `DynamicLossScale` that the tapes of this step move, or None.
    """

    has_scaled = False
    moved_scale: Any = None

    def note_loss(self, scaled: tf.Tensor) -> None:
        """Notes a loss that was multiplied by a loss scale."""
        del scaled
        self.has_scaled = True

    def note_scale(self) -> None:
        """Notes that the program has asked for a loss scale."""

    def are_by_tape(self, variables: Iterable[Any]) -> bool:
        """Whether a tape of this step has scaled and unscaled all gradients."""
        del variables
        return False


class _Thread(threading.local):
    """What this thread knows of the step that it makes.

    Attributes:
        noted: which losses it has scaled. Outside of steps, all threads share what is noted.
        is_applying: whether an optimizer applies gradients.
        is_differentiating: whether it computes gradients. What computes them may use tapes of its
            own, as `tf.recompute_grad` does.
        under_way: the `training_step` that it is in (`step/state_rollback.py`), or None.
            MirroredStrategy runs each replica in a thread of its own.
    """

    noted = ScaledLosses()
    is_applying = False
    is_differentiating = False
    under_way: Any = None


thread = _Thread()
