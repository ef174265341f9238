"""What is known about skipped steps, and the word said when nothing else happens any more.

RFC 293, "LossScaleOptimizer Overview": steps whose gradients are not finite are skipped.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import gradients
from keras_mp.step.forward_writes import Weight
from keras_mp.support import host, messages

# Of weights that are not finite, a warning names so many.
_MOST_NAMES = 5


class SkippedSteps:
    """Counts skipped steps, and warns when many are skipped in a row.

    Attributes:
        total: int64 variable, how many steps were skipped.
        warn_after: int or None. Skips in a row after which to warn, once; None never does.

    Args:
        warn_after: int or None.
    """

    def __init__(self, warn_after: int | None) -> None:
        self.warn_after = warn_after
        with tf.init_scope():
            self.total = tf.Variable(0, dtype=tf.int64, name="steps_skipped", trainable=False)
            # Of the steps skipped in a row: with a loss that is not finite, with one that is.
            self._losses = tf.Variable([0, 0], dtype=tf.int64, name="losses", trainable=False)
        # What to look at when it comes to warning. Not held: models come and go.
        self._looked_at: Sequence[tuple[str, Any, tf.DType]] = ()
        self._reports = host.Mailbox(self._warn, size=3)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_looked_at": ()}

    def watch(self) -> None:
        """Prepares for `skip` and `in_a_row` in the function that is being traced."""
        if self.warn_after is not None:
            self._reports.watch()

    def skip(
        self, goes_on: tf.Tensor, losses: Sequence[tf.Tensor], weights: Sequence[Weight]
    ) -> list[Any]:
        """Counts a skipped step, and looks into it. Called in the branch that only it takes.

        Args:
            goes_on: bool scalar tensor. Was the step before it skipped too?
            losses: the losses of this step, from every replica at hand; empty where unknown.
            weights: the weights of the model, from every replica at hand, as far as they are known.

        Returns:
            list of the operations that count.
        """
        counted = [self.total.assign_add(1, read_value=False)]
        if self.warn_after is not None and host.runs_by_itself():
            self._looked_at = [(w.name, weakref.ref(w.handle), w.dtype) for w in weights]
            before = tf.convert_to_tensor(self._losses) * tf.cast(goes_on, tf.int64)
            self._losses.assign(before + _how_many_are_finite(losses), read_value=False)
        return counted

    def in_a_row(self, count: tf.Tensor) -> None:
        """Warns if it is time to. Called after `skip`, in the branch that only such a step takes.

        Args:
            count: int64 scalar tensor. How many steps were skipped since one was not.
        """
        if self.warn_after is not None and host.runs_by_itself():
            is_time = tf.equal(count, self.warn_after)
            self._reports.post(tf.concat([count[tf.newaxis], self._losses], 0), when=is_time)

    def variables(self) -> dict[str, tf.Variable]:
        """The variables of which a checkpoint knows nothing, by name."""
        return {"losses": self._losses, "skip_report": self._reports.letter}

    def collect_reports(self) -> None:
        """Says what functions that XLA compiled had to say."""
        self._reports.collect()

    def _warn(self, counts: Sequence[int], line: messages.Line | None) -> None:
        in_a_row, not_finite, finite = counts
        messages.warn(
            f"{in_a_row} steps in a row were skipped. {_diagnosis(not_finite, finite)}"
            f"{_names_of_bad(self._looked_at)}",
            line,
        )


def _how_many_are_finite(losses: Sequence[tf.Tensor]) -> tf.Tensor:
    """Of one step: is its loss not finite, is it finite? Neither where it is not known."""
    if not losses:
        return tf.zeros([2], tf.int64)
    is_finite = tf.cast(gradients.all_finite(losses), tf.int64)
    return tf.stack([1 - is_finite, is_finite])


def _names_of_bad(weights: Sequence[tuple[str, Any, tf.DType]]) -> str:
    """Names the weights that are not finite, of which no good step can come any more."""
    bad: dict[str, None] = {}
    for name, reference, dtype in weights:
        handle = reference()
        if handle is not None and dtype.is_floating:
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            if not bool(tf.reduce_all(tf.math.is_finite(value))):
                bad[name] = None
    if not bad:
        return ""
    names = ", ".join(map(repr, list(bad)[:_MOST_NAMES]))
    more = f" and {len(bad) - _MOST_NAMES} more" if len(bad) > _MOST_NAMES else ""
    return f" Weights that are not finite already: {names}{more}. Load them from a checkpoint."


def _diagnosis(not_finite: int, finite: int) -> str:
    forward = (
        "look at the forward pass, where a smaller loss scale changes nothing: at the inputs and "
        "labels, the learning rate, weights that are not finite already, and activations above "
        "65504, the largest float16 (run the layer that makes them in float32)"
    )
    backward = (
        "gradients overflow on their way back: find the operation whose gradient is not finite "
        "(keras_mp.numerics.FirstBadOperation names it), such as a square root or a norm at zero, "
        "run it in float32, or clip what goes into it; with several replicas, see whether "
        "aggregate_in_float16=False helps, since float16 sums end at 65504"
    )
    if not_finite and not finite:
        return f"The loss itself was Inf or NaN in all {not_finite} that were looked at: {forward}."
    if finite and not not_finite:
        return f"The loss was finite in all {finite} that were looked at, so {backward}."
    if finite and not_finite:
        return (
            f"In {not_finite} of them the loss itself was Inf or NaN: {forward}. In {finite} it "
            f"was finite: {backward}."
        )
    return (
        "The loss was scaled in another function and could not be looked at. If it is Inf or NaN, "
        f"{forward}; if it is finite, {backward}."
    )
