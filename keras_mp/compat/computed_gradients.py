"""The record of `compute_gradients` of an optimizer of TensorFlow 1."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_mp.step.record import Notebook, Notes


class _Computed(Notes):
    """The gradients that were computed in one graph, or in eager code.

    Attributes:
        computed: the ids of their variables. In eager, without those that were applied.
        is_applied: whether a graph has applied its gradients itself.
    """

    computed: frozenset[int] = frozenset()
    is_applied = False

    def has_begun(self) -> bool:
        return bool(self.computed) and not self.is_applied


class ComputedGradients:
    """Records the gradients of `compute_gradients`, to warn of all others.

    The record is in Python only, so it costs a step nothing. Gradients that another thread or
    function has computed are presumed to be right.
    """

    def __init__(self) -> None:
        self._record = Notebook(_Computed)

    def note(self, variables: Iterable[Any]) -> None:
        """Records that gradients of these variables are computed."""
        computed = self._record.notes().computed.union(map(id, variables))
        self._record.note(computed=computed, is_applied=False)

    def may_include(self, variables: Iterable[Any]) -> bool:
        """Whether gradients that are applied to these variables may be recorded ones."""
        notes = self._record.current()
        if tf.executing_eagerly() and notes is self._record.notes():
            return not notes.computed.isdisjoint(map(id, variables))
        return bool(notes.computed)

    def applied(self, variables: Iterable[Any]) -> None:
        """Records that gradients of these variables were applied."""
        notes = self._record.notes()
        if tf.executing_eagerly():
            notes.computed = notes.computed.difference(map(id, variables))
        else:
            notes.is_applied = True
