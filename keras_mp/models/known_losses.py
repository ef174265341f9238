"""What a `train_step` knows of its losses and gradients: who has scaled which.

This module needs TensorFlow only.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step.scaled_losses import ScaledLosses


class KnownLosses(ScaledLosses):
    """What is known about the step that this thread makes.

    Attributes:
        by_tape: set of variables, by the ids of their handles. A tape has scaled and unscaled their
            last gradients, and the program has not multiplied these by a loss scale.
        unscaled: dict from the ids of handles to reasons, for variables whose last gradients nobody
            has scaled.
        knows_scale: whether the program has asked for a loss scale, by which it may multiply.
    """

    def __init__(self) -> None:
        self.by_tape: set[int] = set()
        self.unscaled: dict[int, str] = {}
        self._results: list[weakref.ref[Any]] = []
        self.knows_scale = False

    def note_loss(self, scaled: tf.Tensor) -> None:
        """Notes a loss that was multiplied by a loss scale."""
        # A loop notes many losses.
        self._results = [ref for ref in self._results if ref() is not None]
        self._results.append(weakref.ref(scaled))

    def note_scale(self) -> None:
        """Notes that the program has asked for a loss scale."""
        self.knows_scale = True

    def are_by_tape(self, variables: Iterable[Any]) -> bool:
        """Whether a tape of this step has scaled and unscaled all gradients."""
        return all(key_of(each) in self.by_tape for each in variables)

    def is_scaled(self, targets: Sequence[Any]) -> bool:
        """Whether a target is a scaled loss, or was computed from one in this graph.

        For an eager tensor, only a tape knows what it was computed from.
        """
        results = [result for ref in self._results if (result := ref()) is not None]
        if any(target is result for target in targets for result in results):
            return True
        if tf.executing_eagerly():
            return False
        return any(_depends_on(target, results) for target in targets)

    def note_gradients(self, sources: Iterable[Any], by_tape: bool, why_not: str | None) -> None:
        """Notes how the gradients of variables were computed.

        Args:
            sources: iterable of variables and tensors.
            by_tape: bool. Whether a tape has scaled and unscaled them.
            why_not: str, the reason why nobody has scaled the gradients, or None.
        """
        for key in map(key_of, sources):
            self.by_tape.discard(key)
            self.unscaled.pop(key, None)
            if by_tape and not self.knows_scale:
                self.by_tape.add(key)
            if why_not is not None:
                self.unscaled[key] = why_not


def key_of(source: Any) -> int:
    """Returns a key for a variable.

    Keras 3 wraps the same variable in objects of its own.
    """
    # A view of a weight in 16 bits borrows a variable where it is asked for its own handle.
    source = getattr(source, "stored", source)
    return id(getattr(source, "handle", source))


def _depends_on(target: Any, results: Sequence[Any]) -> bool:
    """Whether a tensor in a graph was computed from one of some others."""
    known, remaining = {id(result) for result in results}, [target]
    seen: set[int] = set()
    while remaining:
        tensor = remaining.pop()
        if id(tensor) in known:
            return True
        op = getattr(tensor, "op", None)
        if op is not None and id(op) not in seen:
            seen.add(id(op))
            remaining.extend(op.inputs)
    return False
