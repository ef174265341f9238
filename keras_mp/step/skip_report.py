"""Notes which gradients were not finite in a skipped step.

All that a report needs is noted in the branch that skips, in one small variable for each list of
variables that steps were made with. `overflow` is what users read of a note, and `skip_warnings`
what they are told of many; neither is imported before.

This module needs TensorFlow only.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.step import replicas
from keras_mp.step.finiteness import COUNTS
from keras_mp.step.loss_scales import state_variable
from keras_mp.support import host, messages, new_variables, validation

# The beginning of a note: the number of skipped steps so far, including those before a restored
# checkpoint; how many of them were the optimizer's; how many were skipped in a row; and the loss
# scale.
HEADER = 4
# Half of the last hundred steps were skipped if the first of the last 50 skips was less than 100
# steps ago. A note has the numbers of these steps, the last one first, which are -1 for an
# optimizer that counts none.
HALF = 50
TIMES = HEADER + HALF
NOT_COUNTED = -1


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


class Note(NamedTuple):
    """The note of the last skipped step with the gradients of a list of variables.

    Attributes:
        vector: variable of `COUNTS`. It has the header, the numbers of the last 50 skipped steps,
            and the counts of the last one.
        variables: references to the variables.
        names: the names of the variables.
        sizes: the numbers of their values; None where that is not known.
        strategy: the strategy under which the steps are made.
    """

    vector: tf.Variable
    variables: list[weakref.ref[Any]]
    names: list[str]
    sizes: list[int | None]
    strategy: tf.distribute.Strategy

    def is_alive(self) -> bool:
        """Whether there may be another step with these variables."""
        return all(refer() is not None for refer in self.variables)


class SkipReport:
    """The report of the skipped steps of a loss scale.

    Attributes:
        warn_after: int or None. After so many skips in a row there is a warning. None never warns.
        raise_after: int or None. After so many skips in a row an error is raised; None never
            raises.
        told: the warnings that were given.
        looked_at: float. How many steps were skipped when a note was read last.
        notes: the `Note`s.
        paths: function that returns the names of variables that are known, by their ids. At first
            it knows none.

    Args:
        scaler: the `Scaler` of the loss scale.
        warn_after: as the attribute.
        raise_after: as the attribute.
    """

    def __init__(self, scaler: Any, warn_after: int | None, raise_after: int | None) -> None:
        self.scaler = scaler
        self.paths: Callable[[], dict[int, str]] = dict
        self.told, self.looked_at, self.notes = set[str](), 0.0, dict[Any, Note]()
        self.set_limits(warn_after, raise_after)

    def set_limits(self, warn_after: int | None, raise_after: int | None) -> None:
        """Checks and sets both limits, after which skips in a row may be warned of again."""
        self.warn_after = validation.integer_or_none("warn_after_skips", warn_after)
        self.raise_after = validation.integer_or_none("raise_after_skips", raise_after)
        self.told.discard("row")

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
        note, is_shared = self._note_of(skipped), self.scaler.is_shared
        before = tf.convert_to_tensor(note.vector)
        read = (self.scaler.steps_skipped, self.scaler.skips_in_a_row, loss_scale)
        total, in_a_row, scale = (tf.cast(tf.convert_to_tensor(v), COUNTS) for v in read)
        own, time = before[1] + 1 if is_shared else total, tf.constant(NOT_COUNTED, COUNTS)
        if skipped.steps_made is not None:
            time = tf.cast(skipped.steps_made, COUNTS) + own
        # Several optimizers count a step of all where that ends.
        header = tf.stack([total, own, in_a_row + int(is_shared), scale, time])
        counts = tf.reshape(skipped.counts, [-1])
        after = tf.concat([header, before[HEADER : TIMES - 1], counts], 0)
        after = host.chosen(finite, lambda: before, lambda: after)
        noted = [note.vector.assign(after, read_value=False)]
        if (self.warn_after or self.raise_after) and not host.is_compiled_by_xla():
            line = messages.users_line()
            if tf.executing_eagerly():
                self.ask(line)
            elif replicas.local_id() == 0:
                with tf.control_dependencies(noted):
                    tf.py_function(lambda: self.ask(line), [], [])
        return noted

    def last(self) -> Any:
        """Returns the `Overflow` of the last skipped step; None if no step was skipped.

        Raises:
            RuntimeError: it is called in a graph.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "`last_overflow` can be read only in eager code, such as a callback, or after the "
                "tf.function that makes a step. Graphs of TensorFlow 1 have none."
            )
        from keras_mp.step import overflow

        found = overflow.last_note(self)
        return None if found is None else overflow.report(*found)

    def ask(self, line: messages.Line | None = None) -> None:
        """Warns if it is time; where XLA compiles steps, which cannot, others ask.

        Args:
            line: the user's line that makes the steps. Defaults to the one that is being executed.
        """
        if (self.warn_after or self.raise_after) and tf.executing_eagerly():
            from keras_mp.step import skip_warnings

            skip_warnings.warn(self, line)

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {f"note_{i}": note.vector for i, note in enumerate(self.notes.values())}

    def __reduce__(self) -> tuple[Any, ...]:
        return SkipReport, (self.scaler, self.warn_after, self.raise_after)

    def _note_of(self, skipped: SkippedStep) -> Note:
        variables, size = skipped.variables, skipped.counts.shape.num_elements() or 0
        key = (size, *map(id, variables))
        note = self.notes.get(key)
        if note is None or not note.is_alive():
            zeros = np.zeros(TIMES + size)
            vector = new_variables.outside_of_functions(
                lambda: state_variable(zeros, COUNTS, "overflow")
            )
            paths, strategy = self.paths(), tf.distribute.get_strategy()
            names = [paths.get(id(v)) or name_of(v) for v in variables]
            sizes = [tf.TensorShape(v.shape).num_elements() for v in variables]
            note = Note(vector, [*map(weakref.ref, variables)], names, sizes, strategy)
            living = {k: each for k, each in self.notes.items() if each.is_alive()}
            self.notes = {**living, key: note}
        return note


def name_of(variable: Any) -> str:
    """Returns the name that the user knows.

    Keras 3 has paths, which tell layers apart.

    Args:
        variable: a variable of any kind. If a distributed one were asked for an attribute that it
            lacks, outside of replicas, it would be read in the graph.
    """
    first, *_ = tf.distribute.get_strategy().experimental_local_results(variable)
    return getattr(first, "path", None) or first.name.partition(":")[0]
