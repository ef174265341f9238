"""Records skipped steps, and warns when many are skipped.

This module needs TensorFlow only.
"""

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.reports import skip_messages
from keras_mp.reports.overflow_report import Overflow
from keras_mp.reports.overflows import HALF, Overflows
from keras_mp.reports.skipped_step import ReplicaValues, SkippedStep, count_not_finite
from keras_mp.step import outcomes, under_way
from keras_mp.step.batch import Input
from keras_mp.step.calls import GradientState
from keras_mp.step.dynamic_loss_scale import DynamicLossScale
from keras_mp.step.gradients import Gradient
from keras_mp.step.state_rollback import Weight, weights_of
from keras_mp.support import host, messages
from keras_mp.support.host_callback import HostCallback

# After so many steps at the start whose loss is not finite, a warning says so. After so many
# back-offs without growth, a warning says that a smaller scale does not help.
_FIRST_STEPS, _MANY_BACK_OFFS = 3, 8


class SkipReport(outcomes.SkipObserver):
    """The report of the skipped steps of a loss scale.

    There is a warning after `warn_after` skips in a row; when half of the last hundred steps were
    skipped; when the scale has come down to its floor; when it backs off again and again though
    most steps are good; and when the first steps have a loss that is not finite.

    Args:
        paths_of: function that returns the paths of a model's weights, by their ids.
        skipped: the `SkippedSteps`.
    """

    def __init__(
        self, paths_of: Callable[[Any], dict[int, str]], skipped: outcomes.SkippedSteps
    ) -> None:
        self._paths_of, self._skipped = paths_of, skipped
        # The weights that a warning looks at, by weak references, since models come and go.
        self._looked_at: Sequence[tuple[str, Any, tf.DType]] = ()
        # The warnings that were given already; each is given once.
        self._told: set[str] = set()
        self._overflows = Overflows()
        self._callback = HostCallback(
            self._warn,
            size=len(_Numbers._fields),
            beside=skipped.beside,
            is_urgent=self._raises,
            foresee=self._foresee,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_looked_at": ()}

    @property
    def _may_warn(self) -> bool:
        return self._skipped.warn_after is not None or self._raises()

    def _raises(self) -> bool:
        return self._skipped.raise_after is not None

    def look_next_time(self) -> None:
        self._callback.look_next_time()

    def watch(self) -> None:
        if self._may_warn:
            self._callback.watch()

    def before(
        self, state: GradientState, pairs: Sequence[tuple[Any, Any]], kept: under_way.Kept
    ) -> "_Noted | None":
        if host.in_v1_graph():
            return None
        weights = kept.weights
        if weights is None:
            weights = [*weights_of((variable, True) for _, variable in pairs).values()]
        unclipped = _changed_since(state.unclipped, [gradient for gradient, _ in pairs])
        return _Noted(weights, unclipped, under_way.thread.step.inputs())

    def seen(self, steps: Sequence[Any]) -> SkippedStep | None:
        if host.in_v1_graph():
            return None
        first = steps[0]
        totals = first.totals and first.totals.one_by_one()
        steps_made = first.step.adapter.steps_made()
        counts, zeros = count_not_finite([_values(step) for step in steps], totals)
        return SkippedStep(
            [weight for step in steps for weight in step.noted.weights],
            first.tested,
            [each.name for each in first.noted.inputs],
            counts,
            zeros,
            has_total=totals is not None,
            steps_made=steps_made,
            paths=functools.partial(self._paths, first.step.model),
            may_be_empty=first.has_examples is not None,
        )

    def record(
        self,
        seen: SkippedStep | None,
        scales: tuple[tf.Tensor, tf.Tensor],
        consecutive: tf.Tensor,
        back_offs: tf.Tensor,
        is_first: bool | tf.Tensor | None,
    ) -> list[Any]:
        if seen is None:
            return []
        warn_after, raise_after = self._skipped.warn_after, self._skipped.raise_after
        total = tf.convert_to_tensor(self._skipped.total)
        is_of_one = is_first is None
        recorded, is_share, bad_losses = self._overflows.record(seen, scales[0], total, is_of_one)
        if not self._may_warn:
            return recorded
        names = seen.names_of([weight.variable for weight in seen.weights])
        self._looked_at = [
            (name, weakref.ref(weight.handle), weight.dtype)
            for name, weight in zip(names, seen.weights, strict=True)
        ]
        is_time = tf.constant(False)
        flags = tf.constant([False] * 4)
        if warn_after is not None:
            has_fallen = scales[1] < scales[0]
            is_stuck = has_fallen & tf.equal(back_offs, _MANY_BACK_OFFS)
            is_floor = has_fallen & self._is_at_floor(scales[1])
            flags = tf.stack(
                [is_share, is_stuck, self._is_start(seen, consecutive, bad_losses), is_floor]
            )
            is_time = tf.equal(consecutive, warn_after) | tf.reduce_any(flags, 0)
        if raise_after is not None:
            is_time |= consecutive >= raise_after
        if is_first is not None:
            is_time &= is_first
        numbers = tf.concat([[consecutive, seen.zeros], tf.cast(flags, tf.int64)], 0)
        # The warning has to read what these operations write.
        with outcomes.computed_after(recorded):
            self._callback.post(numbers, is_time)
        return recorded

    def last(self) -> Overflow | None:
        return self._overflows.last() if tf.executing_eagerly() else super().last()

    def variables(self) -> dict[str, tf.Variable]:
        reports = self._callback.variables("skip_report")
        return {**reports, **self._overflows.variables()}

    def collect(self) -> None:
        self._callback.collect()

    def _foresee(self, numbers: Sequence[int]) -> int:
        """Returns after how many more skips there may be something to say.

        It is the lowest possible number.
        """
        consecutive = numbers[0]
        left = [HALF]
        if self._skipped.warn_after is not None:
            # A good step in between starts the count again.
            more = self._skipped.warn_after - consecutive
            left += [more if more > 0 else self._skipped.warn_after, self._skips_to_floor()]
            if "start" not in self._told and consecutive == self._total():
                left.append(_FIRST_STEPS - self._overflows.bad_losses())
            if isinstance(self._skipped.loss_scale, DynamicLossScale):
                back_offs = float(self._skipped.loss_scale.history().lone_back_offs)
                left.append(int(_MANY_BACK_OFFS - back_offs) % _MANY_BACK_OFFS or _MANY_BACK_OFFS)
        if self._skipped.raise_after is not None:
            left.append(self._skipped.raise_after - consecutive)
        return max(1, min(left))

    def _paths(self, model: Callable[[], Any] | None) -> dict[int, str]:
        trained = model and model()
        return {} if trained is None or not trained.built else self._paths_of(trained)

    def _is_at_floor(self, loss_scale: tf.Tensor) -> Any:
        floor = getattr(self._skipped.loss_scale, "min_loss_scale", None)
        return False if floor is None else loss_scale <= floor

    def _skips_to_floor(self) -> int:
        """Returns after how many more skips the scale may come down to its floor."""
        scale = self._skipped.loss_scale
        if not isinstance(scale, DynamicLossScale) or float(scale()) <= scale.min_loss_scale:
            return HALF
        falls = math.log(float(scale()) / scale.min_loss_scale) / -math.log(
            scale.backoff_multiplier
        )
        # One less, since a `GradScaler` moves the scale later. The 1e-3 is for a rounding error,
        # which would count as a whole skip.
        return math.ceil(falls - 1e-3) - 1

    def _total(self) -> int:
        return int(tf.convert_to_tensor(self._skipped.total))

    def _is_start(
        self, seen: SkippedStep, consecutive: tf.Tensor, bad_losses: tf.Tensor
    ) -> tf.Tensor:
        """Returns whether no step was made yet, and several losses were not finite."""
        made: Any = seen.steps_made
        if made is None:
            made = self._skipped.total - consecutive
        return tf.equal(bad_losses, _FIRST_STEPS) & (made <= 0)

    def _warn(self, received: Sequence[int], line: messages.Line | None) -> None:
        numbers = _Numbers(*received)
        last = self._overflows.last()
        loss_is_finite = None if last is None else last.loss_is_finite
        raise_after = self._skipped.raise_after
        is_over = raise_after is not None and numbers.consecutive >= raise_after
        what = self._what(numbers, loss_is_finite, is_over)
        if not what:
            return
        inputs, grads = ("", "") if last is None else (last.of_inputs, last.of_gradients)
        if loss_is_finite is False and not self._overflows.are_several():
            grads = ""  # All gradients of such a loss are NaN.
        text = what + inputs
        if last is None or not last.lacks_examples:
            text += f" {skip_messages.diagnosis(loss_is_finite)}{grads}"
        text += (
            skip_messages.bad_weights(self._looked_at)
            + " `last_overflow` tells more about the last step."
        )
        if is_over:
            raise RuntimeError(f"{text} Received: raise_after_skips={raise_after}")
        messages.warn(text, line)

    def _what(self, numbers: "_Numbers", loss_is_finite: bool | None, is_over: bool) -> str:
        """Returns the first sentences of a warning; empty if there is nothing to say."""
        consecutive, warn_after = numbers.consecutive, self._skipped.warn_after
        if is_over or consecutive == warn_after:
            return f"{consecutive} steps in a row were skipped."
        was_reported = warn_after is None or consecutive > warn_after
        if numbers.is_share and not was_reported:
            return f"Half of the last {2 * HALF} steps were skipped."
        if numbers.is_start and loss_is_finite is False and self._is_news("start"):
            return f"{consecutive} steps were skipped, and none was made yet."
        if numbers.is_stuck and self._is_news("stuck"):
            names = self._overflows.not_finite_in_a_row(_MANY_BACK_OFFS)
            loss_scale = self._skipped.loss_scale
            return skip_messages.stuck(_MANY_BACK_OFFS, loss_scale, names, numbers.zeros)
        if numbers.is_floor and loss_is_finite is not False and self._is_news("floor"):
            return "The loss scale has come down to its floor, and steps are still skipped."
        return ""

    def _is_news(self, what: str) -> bool:
        is_new = what not in self._told
        self._told.add(what)
        return is_new


def _values(step: Any) -> ReplicaValues:
    """Returns the values of a replica in which Inf and NaN are counted."""
    # If the branch that skips unpacks the gradients itself, it has fewer inputs.
    own = (step.sent or step.sums).one_by_one()
    losses = step.step.state.losses
    return ReplicaValues(losses, step.noted.unclipped, own, step.noted.inputs, step.has_examples)


def _changed_since(before: Sequence[Gradient], now: Sequence[Gradient]) -> list[Gradient]:
    """Returns gradients as they were before the user changed (e.g. clipped) them.

    `before` are the gradients that the user was given, in their order. The result is empty if none
    has changed, or if the two do not correspond.
    """
    old = [gradient for gradient in before if gradient is not None]
    new = {i: gradient for i, gradient in enumerate(now) if gradient is not None}
    pairs = list(zip(old, new.values()))
    if len(old) != len(new) or all(_dense(a) is _dense(b) for a, b in pairs):
        return []
    if not all(a.shape.is_compatible_with(b.shape) for a, b in pairs):
        return []
    aligned: list[Gradient] = [None] * len(now)
    for i, gradient in zip(new, old):
        aligned[i] = gradient
    return aligned


def _dense(gradient: Gradient) -> tf.Tensor | None:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


class _Noted(NamedTuple):
    """What is noted of a replica before its step, in case it is skipped.

    Attributes:
        weights: the known weights of the model.
        unclipped: the gradients as they were when they were unscaled; empty if they have not
            changed since then.
        inputs: what the model was given, as far as it is known.
    """

    weights: Sequence[Weight]
    unclipped: list[Gradient]
    inputs: Sequence[Input]


class _Numbers(NamedTuple):
    """What a warning is about, as numbers that a graph sends to Python.

    Attributes:
        consecutive: How many steps were skipped in a row.
        zeros: How many in a thousand gradient values are 0; -1 if they were not counted.
        is_share: Whether half of the last steps were skipped.
        is_stuck: Whether the scale backs off again and again though most steps are good.
        is_start: Whether no step was made yet, and the loss of several was not finite.
        is_floor: Whether the scale has come down to its floor.
    """

    consecutive: int
    zeros: int
    is_share: int
    is_stuck: int
    is_start: int
    is_floor: int
