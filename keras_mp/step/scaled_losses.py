"""Which losses and gradients of a step somebody has scaled, while a `train_step` runs.

What scales a loss notes the result here, and an optimizer that is about to apply gradients finds
out whether it has to say that a call is missing. Outside of a `train_step` that is watched nothing
is noted. This module needs TensorFlow only.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.support.attributes import replaced


class ScaledLosses:
    """What is known of the step that this thread makes.

    Attributes:
        by_tape: set of the ids of the handles of variables whose last gradients a tape has scaled
            and unscaled, and the program has not multiplied by a loss scale.
        unscaled: dict of those whose last gradients nobody has scaled, and the reasons.
        knows_scale: whether the program has asked for a loss scale, and may multiply by it.
    """

    def __init__(self) -> None:
        self.by_tape: set[int] = set()
        self.unscaled: dict[int, str] = {}
        self._results: list[weakref.ref[Any]] = []
        self.knows_scale = False

    def note_loss(self, scaled: tf.Tensor) -> None:
        """Notes a loss that was multiplied by a loss scale."""
        # A loop notes many.
        self._results = [ref for ref in self._results if ref() is not None]
        self._results.append(weakref.ref(scaled))

    def is_scaled(self, targets: Sequence[Any]) -> bool:
        """Whether a target is a scaled loss, or was computed from one in this graph.

        What an eager tensor was computed from, only a tape knows.
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
            why_not: str, the reason why nobody has scaled them, or None.
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
    """Returns what is noted of the step that this thread makes; None if nobody watches."""
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
    """Whether a tape of this step has scaled and unscaled the gradients of all variables."""
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
    """Returns what tells variables apart: Keras 3 has objects of its own around them."""
    return id(getattr(source, "handle", source))


def _depends_on(target: Any, results: Sequence[Any]) -> bool:
    """Whether a tensor in a graph was computed from others."""
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
