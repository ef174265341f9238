"""Records which gradients were not finite in skipped steps, and on which replica.

There is a record, a variable, for each list of variables that steps were made with. `skipped_step`
counts the values, and `overflow_report` has what users see. This module needs TensorFlow only.
"""

import collections
import contextlib
import itertools
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.reports.overflow_report import (
    LossOfReplica,
    Overflow,
    kind_of,
    overflowed_gradients,
    overflowed_inputs,
    places_of,
)
from keras_mp.reports.skipped_step import UNKNOWN, SkippedStep
from keras_mp.reports.value_counts import COUNTS
from keras_mp.step import replicas
from keras_mp.step.loss_scales import state_variable
from keras_mp.support import host, new_variables
from keras_mp.support.references import reference

# The header of a record describes its last step: the number of skipped steps so far, including
# those before a restored checkpoint; the number of steps that the optimizer had made by then, or
# -1; how many of its steps were skipped; the loss scale; and whether the user was told that many of
# the last steps were skipped.
_HEADER = 5
# Half of the last steps were skipped if the first of the last `HALF` skips was less than twice as
# many steps ago.
HALF = 50
_KINDS = 3  # counts for each gradient: Inf, NaN, and 1 where only the sum is not finite


class _SkipRecord:
    """The record of skipped steps for the gradients of a list of variables.

    Attributes:
        names: the names of the variables.
        inputs: the names of the inputs.
        vector: variable of `COUNTS`. It has the header; the numbers of the last `HALF` skipped
            steps; for each gradient, in how many of the last skips in a row it was not finite; and
            the counts of the last step.

    Args:
        seen: the first of these steps.
    """

    def __init__(self, seen: SkippedStep) -> None:
        self.has_total = seen.has_total
        self.names, self.inputs = _names(seen), tuple(seen.inputs)
        self.sizes = [tf.TensorShape(v.shape).num_elements() for v in seen.variables]
        self._variables = [reference(variable) for variable in seen.variables]
        strategy = tf.distribute.get_strategy()
        self._is_on_each = _is_on_each()
        rows = strategy.num_replicas_in_sync + seen.has_total
        self.shape = rows, 1 + len(self.names) + len(self.inputs), _KINDS
        length = _HEADER + HALF + self.shape[1] + int(np.prod(self.shape))

        def vector() -> tf.Variable:
            # If one replica records for all, copies of the variable would only have to be sent
            # around.
            with strategy.scope() if self._is_on_each else contextlib.nullcontext():
                return state_variable(np.zeros(length), COUNTS, "overflow")

        self.vector = new_variables.outside_of_functions(vector)
        self.places = places_of(strategy, self.vector)

    def is_alive(self) -> bool:
        """Whether there may be another step with these variables."""
        return all(reference() is not None for reference in self._variables)

    def is_of(self, seen: SkippedStep) -> bool:
        """Whether a step belongs to this record."""
        return (
            self._is_on_each == _is_on_each()
            and self.has_total == seen.has_total
            and self.inputs == tuple(seen.inputs)
            and len(self.places) == tf.distribute.get_strategy().num_replicas_in_sync
            and len(self._variables) == len(seen.variables)
            and all(ref() is v for ref, v in zip(self._variables, seen.variables))
        )

    def parts(self) -> list[np.ndarray]:
        """Returns the parts of `vector`, in eager."""
        vector = tf.convert_to_tensor(self.vector)
        return [part.numpy() for part in _parts_of(vector, self.shape[1])]


def _parts_of(vector: tf.Tensor, columns: int) -> list[tf.Tensor]:
    """Returns the parts of a record's `vector`, given how many things it counts."""
    return tf.split(vector, [_HEADER, 1, 1, HALF - 2, columns, -1])


@host.shared_operation
def _after(
    vector: tf.Tensor,
    counts: Any,
    loss_scale: tf.Tensor,
    total: tf.Tensor,
    made: tf.Tensor,
    skipped: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the next `vector` of a record, and two numbers of `Overflows.record`.

    `skipped` is how many steps of the optimizer were skipped; if it is None, they are counted here.
    The other arguments are those of `Overflows.record`, with numbers in `COUNTS`.
    """
    header, _, first, later, in_a_row, _ = _parts_of(vector, counts.shape[1])
    is_bad = tf.reduce_any(tf.not_equal(counts, 0), [0, 2])
    in_a_row = tf.where(is_bad, in_a_row + 1, 0)
    _, _, skipped_before, _, is_reported = tf.unstack(header)
    zero = tf.constant(0, COUNTS)
    skipped = skipped_before + 1 if skipped is None else skipped
    when = tf.where(made < zero, zero, made + skipped)
    steps = tf.squeeze(when - first)
    is_due = (tf.squeeze(first) > zero) & (steps < 2 * HALF) & tf.equal(is_reported, zero)
    is_reported = tf.cast((steps < 4 * HALF) & ((is_reported > zero) | is_due), COUNTS)
    header = tf.stack([total, made, skipped, loss_scale, is_reported])
    after = [header, first, later, [when], in_a_row, tf.reshape(counts, [-1])]
    return tf.concat(after, 0), is_due, in_a_row[0]


class Overflows:
    """The records of all skipped steps."""

    def __init__(self) -> None:
        self._records: dict[int, _SkipRecord] = {}
        self._numbers = itertools.count(1)
        with tf.init_scope():
            # The number of the record of the last skipped step; 0 if there was none.
            self._last = state_variable(0, tf.int64, "last_record")

    def record(
        self,
        seen: SkippedStep,
        loss_scale: tf.Tensor,
        total: tf.Tensor,
        is_of_one: bool,
    ) -> tuple[list[Any], tf.Tensor, tf.Tensor]:
        """Records a skipped step; called in the branch that skips.

        Args:
            seen: the step.
            loss_scale: float32 scalar tensor.
            total: int64 scalar tensor. How many steps were skipped so far, including this one.
            is_of_one: bool. Whether all of these are steps of one optimizer.

        Returns:
            tuple of the list of operations; of a bool scalar tensor, whether to tell the user that
            half of the last steps were skipped; and of how many steps in a row had a loss that was
            not finite, or not known.
        """
        number, record = self._of(seen)
        made = tf.cast(UNKNOWN if seen.steps_made is None else seen.steps_made, COUNTS)
        total = tf.cast(total, COUNTS)
        vector, is_due, bad_losses = _after(
            tf.convert_to_tensor(record.vector),
            seen.counts,
            tf.cast(loss_scale, COUNTS),
            total,
            made,
            total if is_of_one else None,
        )
        noted = [
            record.vector.assign(vector, read_value=False),
            self._last.assign(number, read_value=False),
        ]
        return noted, is_due, bad_losses

    def last(self) -> Overflow | None:
        """Returns the step that was skipped last, or None; works in eager only."""
        record = self._records.get(int(tf.convert_to_tensor(self._last)))
        if record is None:
            return None
        (total, made, skipped, loss_scale, _), *_, counts = record.parts()
        counts = counts.reshape(record.shape)
        own = 1 + len(record.names)
        return Overflow(
            step=None if made == UNKNOWN else int(made + skipped),
            steps_skipped=int(total),
            loss_scale=float(loss_scale),
            losses=tuple(
                LossOfReplica(place, kind_of(*loss))
                for place, loss in zip(record.places, counts[:, 0])
            ),
            gradients=overflowed_gradients(
                dict(zip(record.names, record.sizes, strict=True)),
                record.places,
                counts[:, 1:own],
            ),
            inputs=overflowed_inputs(record.inputs, record.places, counts[:, own:]),
        )

    def bad_losses(self) -> int:
        """Returns how many losses in a row were not finite, or not known.

        Only skipped steps count.
        """
        record = self._records.get(int(tf.convert_to_tensor(self._last)))
        return 0 if record is None else int(record.parts()[-2][0])

    def not_finite_in_a_row(self, times: int) -> list[str]:
        """Returns the variables whose gradients were not finite in the last skipped steps.

        Args:
            times: int. In at least how many of them.
        """
        record = self._records.get(int(tf.convert_to_tensor(self._last)))
        if record is None:
            return []
        *_, in_a_row, _ = record.parts()
        return [name for name, n in zip(record.names, in_a_row[1:]) if n >= times]

    def are_several(self) -> bool:
        """Whether steps with several lists of variables were skipped.

        Several optimizers make such steps.
        """
        return len(self._records) > 1

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        records = self._records.values()
        of_records = {f"overflow_{i}": record.vector for i, record in enumerate(records)}
        return {"last_record": self._last, **of_records}

    def _of(self, seen: SkippedStep) -> tuple[int, _SkipRecord]:
        for number, record in self._records.items():
            if record.is_of(seen):
                return number, record
        number, record = next(self._numbers), _SkipRecord(seen)
        alive = {n: each for n, each in self._records.items() if each.is_alive()}
        self._records = {**alive, number: record}
        return number, record

    def __reduce__(self) -> tuple[Any, ...]:
        return Overflows, ()


def _names(seen: SkippedStep) -> list[str]:
    """Returns unique names for the variables of a step."""
    names = seen.names_of(seen.variables)
    counts = collections.Counter(names)
    nth: collections.Counter[str] = collections.Counter()
    for i, name in enumerate(names):
        nth[name] += 1
        if counts[name] > 1:
            names[i] = f"{name} ({nth[name]} of {counts[name]})"
    return names


def _is_on_each() -> bool:
    """Whether each replica keeps records.

    Under other strategies, one replica keeps them for all.
    """
    is_alone = tf.distribute.get_strategy().num_replicas_in_sync == 1
    return is_alone or replicas.need_not_meet()
