"""Notes which losses and gradients of a step are scaled, in a `train_step`.

What scales a loss notes the result here. An optimizer that is about to apply gradients can then
tell whether it has to warn of a missing call. Nothing is noted outside of a `train_step` that is
watched. This module needs TensorFlow only.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.support.attributes import replaced


class ScaledLosses:
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


class _Thread(threading.local):
    noted: ScaledLosses | None = None
    is_applying = False


_thread = _Thread()


def noted() -> ScaledLosses | None:
    """Returns what is noted about the step that this thread makes, or None.

    It is None if nobody watches the step.
    """
    return _thread.noted


def noted_in(losses: ScaledLosses | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which this thread's losses and gradients are noted."""
    return replaced(_thread, "noted", losses)


def note_loss(scaled: tf.Tensor) -> tf.Tensor:
    """Notes a loss that was multiplied by a loss scale, and returns it."""
    if _thread.noted is not None:
        _thread.noted.note_loss(scaled)
    return scaled


def note_scale() -> None:
    """Notes that the program has asked for a loss scale."""
    if _thread.noted is not None:
        _thread.noted.knows_scale = True


def are_by_tape(variables: Iterable[Any]) -> bool:
    """Whether a tape of this step has scaled and unscaled all gradients."""
    losses = _thread.noted
    return losses is not None and all(key_of(each) in losses.by_tape for each in variables)


@contextlib.contextmanager
def applying() -> Iterator[bool]:
    """Context manager for an optimizer that applies gradients.

    Yields:
        Whether it is the outermost one of this thread: a wrapper calls its inner optimizer.
    """
    is_first = not _thread.is_applying
    with replaced(_thread, "is_applying", True):
        yield is_first


def key_of(source: Any) -> int:
    """Returns a key for a variable.

    Keras 3 wraps the same variable in objects of its own.
    """
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
