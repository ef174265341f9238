"""Tells a `train_step` which losses are scaled, and asks it who scaled gradients.

What scales a loss notes the result here. An optimizer that is about to apply gradients can then
tell whether it has to warn of a missing call. Outside of a `train_step` that is watched
(`models/step_tapes.py`) there are no tapes, and it is only known whether anything was scaled. This
module needs TensorFlow only.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf


class ScaledLosses:
    """What is noted of the losses of a step, and of their gradients.

    Attributes:
        has_scaled: whether the program has scaled a loss anywhere.
        knows_scale: whether the program has asked for a loss scale, by which it may multiply.
        moved_scale: the `DynamicLossScale` that the tapes of this step move, or None.
        tapes: set of the tapes that were made in it.
        unscaled: dict from the ids of handles to reasons, for variables whose last gradients nobody
            has scaled. The reason is empty if a tape has scaled and unscaled them, and the program
            has not multiplied them by a loss scale.
    """

    has_scaled = knows_scale = False

    def __init__(self, moved_scale: Any = None) -> None:
        self.moved_scale = moved_scale
        self.tapes: weakref.WeakSet[Any] = weakref.WeakSet()
        self.unscaled: dict[int, str] = {}

    def note_loss(self, scaled: tf.Tensor) -> None:
        """Notes a loss that a loss scale has multiplied, here and on tapes that record it."""
        self.has_scaled = True
        for tape in self.tapes:
            if tape._recording:
                tape._scaled_losses.append(scaled)

    def note_gradients(self, sources: Iterable[Any], why_not: str | None) -> None:
        """Notes how the gradients of variables were computed.

        Args:
            sources: iterable of variables and tensors.
            why_not: str, the reason why nobody has scaled the gradients; empty if a tape has scaled
                and unscaled them, None if the program has.
        """
        for key in map(key_of, sources):
            self.unscaled.pop(key, None)
            if why_not or (why_not == "" and not self.knows_scale):
                self.unscaled[key] = why_not

    def are_by_tape(self, variables: Iterable[Any]) -> bool:
        """Whether a tape of this step has scaled and unscaled all gradients."""
        return all(self.unscaled.get(key_of(each)) == "" for each in variables)


def key_of(source: Any) -> int:
    """Returns a key for a variable.

    Keras 3 wraps the same variable in objects of its own.
    """
    # A view of a weight in 16 bits borrows a variable where it is asked for its own handle.
    source = getattr(source, "stored", source)
    return id(getattr(source, "handle", source))


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
