"""The training step that is under way in this thread, as far as an optimizer asks.

A `training_step` (`state_rollback`) puts its own step here. Without one, nothing is known, and a
skipped step has nothing to restore. This module needs TensorFlow only.
"""

import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Kept:
    """What a replica restores if the step is skipped; for this base class, nothing."""

    def __bool__(self) -> bool:
        return False

    def may_have_changed(self) -> bool:
        """Whether the step has written to a weight."""
        return False

    def put_back(self, unless: tf.Tensor | None = None) -> list[tf.Operation]:
        """Restores the values, in any context and also for all replicas.

        Args:
            unless: bool scalar tensor. If it is True, the variables keep the values that they have.
                Defaults to None, for False.
        """
        del unless
        return []

    def release(self) -> None:
        """Releases the values in eager, where an update copies each value that is held."""


class StepUnderWay:
    """A step that is under way in a thread; this base class knows nothing of it."""

    def keep(self, trained: Sequence[Any], optimizer: Any, may_skip: bool) -> Kept:
        """Returns what to restore if the optimizer's step is skipped.

        Called in a replica context, before anything is applied.

        Args:
            trained: the variables that the step trains. For other trainable weights it is unknown
                whether the forward pass or another step has written to them.
            optimizer: what trains them.
            may_skip: bool. Whether the step may be skipped.
        """
        del trained, optimizer, may_skip
        return Kept()

    def has_examples(self) -> tf.Tensor | None:
        """Returns whether the batch has examples; None if that is certain, or not known."""

    def watch(self, batch: Any) -> None:
        """Notes the batch that the model is given, a structure of tensors."""

    def begin(self) -> None:
        """Begins anew after an optimizer's step was made or skipped."""


class _Thread(threading.local):
    """MirroredStrategy runs each replica in a thread of its own."""

    step = StepUnderWay()


thread = _Thread()
