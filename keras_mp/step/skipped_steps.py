"""Counts skipped steps, records the reasons, and warns when many are skipped in a row.

RFC 293, "LossScaleOptimizer Overview": steps whose gradients are not finite are skipped.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.step.gradients import COUNTS
from keras_mp.step.loss_scales import state_variable
from keras_mp.step.overflow_report import MAX_NAMES, Overflow
from keras_mp.step.overflows import STREAK, NonFiniteCounts, Overflows
from keras_mp.step.state_rollback import Weight
from keras_mp.support import host, messages

# A warning names at most this many weights that are not finite.
_MOST_NAMES = 5


class SkippedSteps:
    """Counts skipped steps, remembers why, and warns when many are skipped in a row.

    Attributes:
        total: int64 variable, how many steps were skipped.
        warn_after: int or None. Skips in a row after which to warn, once; None never does.

    Args:
        warn_after: int or None.
        beside: another callback of the same graphs, or None (the default).
    """

    def __init__(self, warn_after: int | None, beside: host.HostCallback | None = None) -> None:
        self.warn_after = warn_after
        with tf.init_scope():
            self.total = state_variable(0, tf.int64, "steps_skipped")
        # The weights that a warning looks at, by weak references: models come and go.
        self._looked_at: Sequence[tuple[str, Any, tf.DType]] = ()
        # A graph of TensorFlow 1 only counts, and saves all variables that it has.
        self._tells = not host.in_v1_graph()
        if self._tells:
            with tf.init_scope():
                # The streak of `Overflows`.
                self._streak = state_variable(np.zeros(STREAK), COUNTS, "streak")
            self._overflows = Overflows()
            self._reports = host.HostCallback(self._warn, size=1 + STREAK, beside=beside)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_looked_at": ()}

    def watch(self) -> None:
        """Prepares the function that is being traced for `skip` and `in_a_row`."""
        if self.warn_after is not None and self._tells:
            self._reports.watch()

    def skip(
        self,
        goes_on: tf.Tensor,
        loss_scale: tf.Tensor,
        seen: NonFiniteCounts | None,
        weights: Sequence[Weight],
        is_of_one: bool,
    ) -> list[Any]:
        """Counts and records a skipped step. Called in the branch that skips.

        Args:
            goes_on: bool scalar tensor. Whether the step before it was skipped too.
            loss_scale: float32 scalar tensor.
            seen: the counts; None in a graph of TensorFlow 1, where they are not recorded.
            weights: the known weights of the model, from every replica of this process.
            is_of_one: bool. Whether all steps counted here are made by one optimizer.

        Returns:
            list of the operations that count.
        """
        counted = [self.total.assign_add(1, read_value=False)]
        if seen is None:
            return counted
        total = tf.convert_to_tensor(self.total)
        streak = tf.convert_to_tensor(self._streak)
        streak, noted = self._overflows.record(seen, streak, goes_on, loss_scale, total, is_of_one)
        kept = self._streak.assign(streak, read_value=False)
        if self.warn_after is not None:
            names = seen.names_of([weight.variable for weight in weights])
            self._looked_at = [
                (name, weakref.ref(weight.handle), weight.dtype)
                for name, weight in zip(names, weights, strict=True)
            ]
        return [*counted, noted, kept]

    def in_a_row(self, count: tf.Tensor) -> None:
        """Warns if `warn_after` is reached. Called after `skip`, in the branch that skips.

        Args:
            count: int64 scalar tensor. How many steps were skipped in a row.
        """
        if self.warn_after is not None and not host.in_v1_graph():
            is_time = tf.equal(count, self.warn_after)
            streak = tf.cast(self._streak, tf.int64)
            self._reports.post(tf.concat([[count], streak], 0), when=is_time)

    def last_overflow(self) -> Overflow | None:
        """Returns the report of the last skipped step; None if no step was skipped.

        Raises:
            RuntimeError: it is called in a graph.
        """
        if not (tf.executing_eagerly() and self._tells):
            raise RuntimeError(
                "`last_overflow` can be read in eager code only, for example after the tf.function "
                "that makes a step, or in a callback; not of what a graph of TensorFlow 1 has done."
            )
        return self._overflows.last()

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        if not self._tells:
            return {}
        own = {"streak": self._streak, "skip_report": self._reports.buffer}
        return {**own, **self._overflows.variables()}

    def collect_reports(self) -> None:
        """Gives the warnings of functions that XLA has compiled, which cannot call Python."""
        if self._tells:
            self._reports.collect()

    def _warn(self, counts: Sequence[int], line: messages.Line | None) -> None:
        in_a_row, *streak = counts
        not_finite, finite, *_ = streak
        bad = _names_of_bad(self._looked_at)
        # Where the loss is not finite, gradients that never are tell nothing more.
        _, *of_names = streak[4:]
        in_each = {steps for steps in of_names[MAX_NAMES:] if steps} == {in_a_row}
        tells_more = finite or not (bad or (not_finite and in_each))
        whose = self._overflows.describe(streak) if tells_more else ""
        messages.warn(
            f"{in_a_row} steps in a row were skipped. {_diagnosis(not_finite, finite)}{whose}{bad}",
            line,
        )


def _names_of_bad(weights: Sequence[tuple[str, Any, tf.DType]]) -> str:
    """Returns a sentence that names the weights that are not finite, or an empty text."""
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
