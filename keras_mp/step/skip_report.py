"""Notes which gradients were not finite, and warns of many skipped steps.

All that a report needs is noted in the branch that skips, in one small variable for each list of
variables that steps were made with. Three warnings are given once each: many steps in a row were
skipped, or half of the last hundred, or the scale has come down to its floor.

This module needs TensorFlow only.
"""

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.step import overflow, replicas
from keras_mp.step.finiteness import COUNTS
from keras_mp.step.loss_scales import DynamicLossScale, state_variable
from keras_mp.support import host, messages, new_variables, validation
from keras_mp.support.references import reference

# The beginning of a note: the number of skipped steps so far, including those before a restored
# checkpoint; how many of them were the optimizer's; how many were skipped in a row; and the loss
# scale.
_HEADER = 4
# Half of the last hundred steps were skipped if the first of the last 50 skips was less than 100
# steps ago. A note has the numbers of these steps, the last one first, which are -1 for an
# optimizer that counts none.
_HALF = 50
_TIMES = _HEADER + _HALF
_UNKNOWN = -1


class SkippedStep(NamedTuple):
    """What is known about a skipped step, on all replicas.

    Attributes:
        variables: list of the variables whose gradients were computed.
        counts: `COUNTS` tensor of shape [rows, 1 + variables, 2], the same on every replica. Each
            replica has a row, which begins with its losses; a last row may be for sums of them.
        steps_made: int64 scalar tensor, the steps of the optimizer so far, or None.
        loss_is_finite: bool scalar tensor. Whether the losses of all replicas are known to be
            finite.
        has_overflowed: bool, or bool scalar tensor. False if the step was skipped only because
            replicas had no examples: a smaller loss scale would change nothing.
    """

    variables: Sequence[Any]
    counts: tf.Tensor
    steps_made: tf.Tensor | None
    loss_is_finite: tf.Tensor
    has_overflowed: bool | tf.Tensor


class SkipReport:
    """The report of the skipped steps of a loss scale.

    Attributes:
        warn_after: int or None. After so many skips in a row there is a warning. None never warns.
        raise_after: int or None. After so many skips in a row an error is raised; None never
            raises.
        paths: function that returns the names of variables that are known, by their ids. At first
            it knows none.

    Args:
        scaler: the `Scaler` of the loss scale.
        warn_after: as the attribute.
        raise_after: as the attribute.
    """

    def __init__(self, scaler: Any, warn_after: int | None, raise_after: int | None) -> None:
        self._scaler = scaler
        self.paths: Callable[[], dict[int, str]] = dict
        self._told: set[str] = set()
        self.set_limits(warn_after, raise_after)
        # How many steps were skipped when the note was read last.
        self._looked_at = 0.0
        self._notes: dict[Any, _Note] = {}

    def set_limits(self, warn_after: int | None, raise_after: int | None) -> None:
        """Checks and sets both limits, after which skips in a row may be warned of again."""
        self.warn_after = validation.integer_or_none("warn_after_skips", warn_after)
        self.raise_after = validation.integer_or_none("raise_after_skips", raise_after)
        self._told.discard("row")

    def note(
        self, skipped: SkippedStep, finite: bool | tf.Tensor, loss_scale: tf.Tensor
    ) -> list[Any]:
        """Notes a skipped step that was counted, and warns if it is time.

        Args:
            skipped: the step.
            finite: False, in the branch that skips; a bool scalar tensor where there is none.
            loss_scale: float32 scalar tensor, the scale of the step.

        Returns:
            list of the operations that note.
        """
        if host.in_v1_graph():  # A `Saver` would save all variables.
            return []
        note, is_shared = self._note_of(skipped), self._scaler.is_shared
        before = tf.convert_to_tensor(note.vector)
        read = (self._scaler.steps_skipped, self._scaler.skips_in_a_row, loss_scale)
        total, in_a_row, scale = (tf.cast(tf.convert_to_tensor(v), COUNTS) for v in read)
        own, time = before[1] + 1 if is_shared else total, tf.constant(_UNKNOWN, COUNTS)
        if skipped.steps_made is not None:
            time = tf.cast(skipped.steps_made, COUNTS) + own
        # Several optimizers count a step of all where that ends.
        header = tf.stack([total, own, in_a_row + int(is_shared), scale, time])
        counts = tf.reshape(skipped.counts, [-1])
        after = tf.concat([header, before[_HEADER : _TIMES - 1], counts], 0)
        after = host.chosen(finite, lambda: before, lambda: after)
        noted = [note.vector.assign(after, read_value=False)]
        if (self.warn_after or self.raise_after) and not host.is_compiled_by_xla():
            line = messages.users_line()
            if tf.executing_eagerly():
                self._look(line)
            elif replicas.local_id() == 0:
                with tf.control_dependencies(noted):
                    tf.py_function(lambda: self._look(line), [], [])
        return noted

    def last(self) -> overflow.Overflow | None:
        """Returns the `Overflow` of the last skipped step; None if no step was skipped.

        Raises:
            RuntimeError: it is called in a graph.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "`last_overflow` can be read only in eager code, such as a callback, or after the "
                "tf.function that makes a step. Graphs of TensorFlow 1 have none."
            )
        found = self._last_note()
        return None if found is None else found[0].overflow(found[1])

    def ask(self) -> None:
        """Gives the warnings of steps that XLA has compiled, which cannot call Python."""
        if (self.warn_after or self.raise_after) and tf.executing_eagerly():
            self._look()

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {f"note_{i}": note.vector for i, note in enumerate(self._notes.values())}

    def __reduce__(self) -> tuple[Any, ...]:
        return SkipReport, (self._scaler, self.warn_after, self.raise_after)

    def _note_of(self, skipped: SkippedStep) -> "_Note":
        key = (*skipped.counts.shape.as_list(), *map(id, skipped.variables))
        note = self._notes.get(key)
        if note is None or not note.is_alive():
            note = _Note(skipped, self.paths())
            living = {k: each for k, each in self._notes.items() if each.is_alive()}
            self._notes = {**living, key: note}
        return note

    def _last_note(self) -> "tuple[_Note, np.ndarray] | None":
        """Returns the note of the last skipped step, with its value; None without one.

        After a checkpoint was restored, a note may be of a later step.
        """
        total = int(tf.convert_to_tensor(self._scaler.steps_skipped)) if self._notes else 0
        read = [(n, tf.convert_to_tensor(n.vector).numpy()) for n in self._notes.values()]
        read = [(note, vector) for note, vector in read if 0 < vector[0] <= total]
        return max(read, key=lambda each: each[1][0], default=None)

    def _look(self, line: messages.Line | None = None) -> None:
        """Reads the last note, and warns if it is time."""
        found = self._last_note()
        if found is None or found[1][0] == self._looked_at:
            return
        note, vector = found
        (self._looked_at, _, consecutive, _), times = vector[:_HEADER], vector[_HEADER:_TIMES]
        last, in_a_row = note.overflow(vector), f"{consecutive:g} steps in a row were skipped."
        if self.raise_after is not None and consecutive >= self.raise_after:
            received = f" Received: raise_after_skips={self.raise_after}"
            raise RuntimeError(in_a_row + self._about(last) + received)
        if self.warn_after is None:
            return
        news, scale = {}, self._scaler.loss_scale
        if consecutive >= self.warn_after:
            news["row"] = in_a_row
        elif np.sum((times > 0) & (times > times[0] - 2 * _HALF)) >= _HALF:
            news["half"] = "Half of the last 100 steps were skipped."
        can_fall = isinstance(scale, DynamicLossScale) and last.loss_is_finite is not False
        if can_fall and float(scale()) <= scale.min_loss_scale < scale.initial_loss_scale:
            news["floor"] = "The loss scale has come down to its floor; steps are still skipped."
        for what, text in news.items():
            if what not in self._told:
                self._told.add(what)
                messages.warn(text + self._about(last), line)

    def _about(self, last: overflow.Overflow) -> str:
        text, named = last.of_examples, overflow.listed(last.variables[::-1])
        if not last.lacks_examples:
            text += f" {_DIAGNOSES[last.loss_is_finite]}"
            # All gradients of a loss that is not finite are NaN. Of several, they tell which. NaN
            # spreads backward, from the loss, so the last variables come first.
            if named and (last.loss_is_finite is not False or len(self._notes) > 1):
                text += f" In the last skipped step, gradients were not finite: {named}."
        return f"{text} `last_overflow` tells more about the last step."


class _Note:
    """The note of the last skipped step with the gradients of a list of variables.

    Attributes:
        vector: variable of `COUNTS`. It has the header, the numbers of the last 50 skipped steps,
            and the counts of the last one.

    Args:
        skipped: the first of these steps.
        paths: the names of variables that are known, by their ids.
    """

    def __init__(self, skipped: SkippedStep, paths: dict[int, str]) -> None:
        self._shape: Any = skipped.counts.shape.as_list()
        self._variables = [reference(variable) for variable in skipped.variables]
        names = [paths.get(id(v)) or overflow.name_of(v) for v in skipped.variables]
        sizes = [tf.TensorShape(v.shape).num_elements() for v in skipped.variables]
        self._sizes = dict(zip(_unique(names), sizes, strict=True))
        zeros = np.zeros(_TIMES + math.prod(self._shape))
        self.vector = new_variables.outside_of_functions(
            lambda: state_variable(zeros, COUNTS, "overflow")
        )
        self._places = overflow.places_of(self.vector)

    def is_alive(self) -> bool:
        """Whether there may be another step with these variables."""
        return all(refer() is not None for refer in self._variables)

    def overflow(self, vector: np.ndarray) -> overflow.Overflow:
        """Returns the report of the last step, from the value of `vector`."""
        total, _, _, loss_scale, time = vector[: _HEADER + 1].tolist()
        counts, step = vector[_TIMES:].reshape(self._shape), None if time == _UNKNOWN else int(time)
        return overflow.report(self._sizes, self._places, counts, step, int(total), loss_scale)


def _unique(names: Sequence[str]) -> list[str]:
    """Returns names in which equal ones are numbered."""
    counts = collections.Counter(names)
    return [
        f"{name} ({names[: i + 1].count(name)} of {counts[name]})" if counts[name] > 1 else name
        for i, name in enumerate(names)
    ]


_FORWARD = (
    "look at the forward pass, where a smaller loss scale changes nothing: at the inputs and "
    "labels, the learning rate, weights that are already not finite, and activations above 65504, "
    "the largest float16; print(keras_mp.numerics.check(model, (x, y))) names the cause and the "
    "cure"
)
_BACKWARD = (
    "gradients overflow on their way back: find the operation whose gradient is not finite (with "
    "keras_mp.numerics.watch(model): model.fit(x, y) names it), such as a norm at zero, run it in "
    "float32, or clip what goes into it; with several replicas, see whether "
    "aggregate_in_float16=False helps, since float16 sums end at 65504"
)
# What to do, by whether the loss was finite.
_DIAGNOSES = {
    None: "The loss was scaled in another function and could not be looked at. If it is Inf or "
    f"NaN, {_FORWARD}; if it is finite, {_BACKWARD}.",
    True: f"The loss of the last one was finite, so {_BACKWARD}.",
    False: f"The loss of the last one was Inf or NaN: {_FORWARD}.",
}
