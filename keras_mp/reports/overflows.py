"""Finds and records which gradients were not finite in skipped steps.

It also records on which replica. The branch that skips a step counts the values. There is a record,
a variable, for each list of variables that steps were made with. `overflow_report` has what users
see of it. This module needs TensorFlow only.
"""

import collections
import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from keras_mp.step import finiteness, gradients, replicas
from keras_mp.step.finiteness import COUNTS
from keras_mp.step.loss_scales import state_variable
from keras_mp.step.scaled_step import Names
from keras_mp.step.state_rollback import Input, Weight, name_of
from keras_mp.support import host, selection
from keras_mp.support.autograph import do_not_convert

# The header of a record describes its last step: the number of skipped steps so far, including
# those before a restored checkpoint; the number of steps that the optimizer had made by then, or
# -1; how many of its steps were skipped; the loss scale; and whether the user was told that many of
# the last steps were skipped.
_HEADER = 5
_UNKNOWN = -1
# The loss of a replica without examples, about which nothing is known.
_OF_NO_EXAMPLES = [_UNKNOWN, _UNKNOWN, 1]
# Half of the last steps were skipped if the first of the last `HALF` skips was less than twice as
# many steps ago.
HALF = 50
_KINDS = 3  # counts for each gradient: Inf, NaN, and 1 where only the sum is not finite


class SkippedStep(NamedTuple):
    """What is known about a skipped step, on all replicas.

    Attributes:
        weights: the known weights of the model, from every replica of this process.
        variables: list of the variables whose gradients were computed.
        inputs: the names of the inputs of the model that were looked at.
        counts: `COUNTS` tensor of shape [rows, 1 + variables + inputs, 3]. Each replica has a row;
            with `has_total`, a last row is for the gradients that were tested. A row begins with
            the loss: -1 if it is unknown, and a third number of 1 if the replica had no examples.
            `finiteness.count_not_finite` defines the numbers of gradients. The third number of an
            input is how many values are infinite only in the dtype of the model.
        zeros: int64 scalar tensor. How many in a thousand values of the gradients are 0; -1 if they
            were not counted.
        has_total: bool. Whether the gradients that were tested are other than those of single
            replicas.
        steps_made: int64 scalar tensor, the steps of the optimizer so far, or None.
        names: takes variables and returns the users' names for them, None for unknown ones.
        may_be_empty: bool. Whether a replica may have had no examples. Defaults to False.
    """

    weights: Sequence[Weight]
    variables: Sequence[Any]
    inputs: Sequence[str]
    counts: tf.Tensor
    zeros: tf.Tensor
    has_total: bool
    steps_made: tf.Tensor | None
    names: Names | None
    may_be_empty: bool = False

    def loss_is_finite(self) -> tf.Tensor:
        """Returns whether the losses of all replicas are known to be finite.

        It is a bool scalar.
        """
        return tf.reduce_all(tf.equal(tf.slice(self.counts, [0, 0, 0], [-1, 1, -1]), 0))

    def has_overflowed(self) -> bool | tf.Tensor:
        """Returns False if the step was skipped only because replicas had no examples.

        In that case a smaller loss scale would change nothing. The result is a bool scalar tensor
        where it is not certain.
        """
        if not self.may_be_empty:
            return True
        is_bad = tf.reduce_any(self.counts[:, 1 : 1 + len(self.variables)] != 0, [1, 2])
        replicas = slice(-1 if self.has_total else None)
        of_replicas, has_examples = is_bad[replicas], self.counts[replicas, 0, 2] <= 0
        is_only_the_sum = is_bad[-1] & tf.logical_not(tf.reduce_any(of_replicas))
        has_cause = tf.reduce_any(of_replicas & has_examples) | is_only_the_sum
        return has_cause | tf.reduce_all(has_examples)

    def names_of(self, variables: Sequence[Any]) -> list[str]:
        """Returns names for variables: those of `names`, else their paths or own names."""
        known = self.names(variables) if self.names else [None] * len(variables)
        return [name or name_of(variable) for name, variable in zip(known, variables, strict=True)]


class ReplicaValues(NamedTuple):
    """The values of a replica in a skipped step, among which Inf and NaN are counted.

    Attributes:
        losses: its losses; empty if they are not known.
        unclipped: its gradients before they were clipped; empty if they were not clipped.
        sent: its gradients as they are, or as the replica sent them to the others.
        inputs: what the model was given.
        has_examples: bool scalar tensor; None if that is certain, or not known.
    """

    losses: Sequence[tf.Tensor]
    unclipped: Sequence[gradients.Gradient]
    sent: Sequence[gradients.Gradient]
    inputs: Sequence[Input] = ()
    has_examples: tf.Tensor | None = None


def count_not_finite(
    of_replicas: Sequence[ReplicaValues], totals: Sequence[gradients.Gradient] | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts values that are not finite, and zeros.

    It is called in the branch that skips.

    Args:
        of_replicas: the values of all replicas of this process, or only those of the replica that
            calls this. The counts of other replicas are added.
        totals: the gradients that were tested, the first of which were made from `sent`; None if
            `sent` itself was tested. They are the same on all replicas.

    Returns:
        The `counts` of a `SkippedStep`, the same on every replica; and its `zeros`, which are
        counted on the first replica of this process.
    """
    strategy = tf.distribute.get_strategy()
    count = strategy.num_replicas_in_sync
    row_of = _row_of_replica if selection.is_selecting() else _shared_row_of_replica
    rows, zeros = [], []
    for i, each in enumerate(of_replicas):
        more = 0 if totals is None else len(totals) - len(each.sent)
        sent = [*each.sent, *[None] * more]
        device = strategy.extended.worker_devices[i] if len(of_replicas) > 1 else None
        with tf.device(device):
            row, of_row = row_of(list(each.losses), list(each.unclipped), sent)
            zeros.append(of_row)
            of_inputs = [_row_of_input(given) for given in each.inputs]
            if each.has_examples is not None:
                loss = tf.where(each.has_examples, row[:1], tf.constant([_OF_NO_EXAMPLES], COUNTS))
                row = tf.concat([loss, row[1:]], 0)
                # XLA looks for the largest value, which is -inf if there are no values.
                of_inputs = [tf.where(each.has_examples, count, 0) for count in of_inputs]
            rows.append(tf.concat([row, *of_inputs], 0))
    of_total = None
    if totals is not None:
        of_total = functools.partial(_row_of_totals, totals, len(of_replicas[0].inputs))
    if len(rows) == count:
        return tf.stack(rows if of_total is None else [*rows, of_total()]), zeros[0]

    @do_not_convert
    def gather() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group
        row = rows[replicas.local_id()] if len(rows) > 1 else rows[0]
        counts = tf.one_hot(replica, count, dtype=COUNTS)[:, tf.newaxis, tf.newaxis] * row
        if of_total is not None:
            # The totals are the same on all replicas, so only one replica counts them.
            is_first = tf.get_static_value(replica) == 0
            total = of_total() if is_first else tf.zeros_like(row)
            counts = tf.concat([counts, total[tf.newaxis]], 0)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, counts)

    if not tf.distribute.in_cross_replica_context():
        return gather(), zeros[0]
    gathered = strategy.extended.call_for_each_replica(gather)
    return strategy.experimental_local_results(gathered)[0], zeros[0]


def _row_of_replica(
    losses: Sequence[tf.Tensor],
    unclipped: Sequence[gradients.Gradient],
    sent: Sequence[gradients.Gradient],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts a replica's values that are not finite, and zeros in what it sent."""
    is_counted = not selection.is_without_branches()
    zeros = gradients.zeros_in_a_thousand(sent) if is_counted else tf.constant(-1, tf.int64)
    before = [*unclipped, *[None] * (len(sent) - len(unclipped))] if unclipped else []
    counts = _counts([*losses, *before, *sent])
    if not before and len(losses) == 1 and losses[0].shape.rank == 0:
        return counts, zeros
    lengths = [len(losses), len(before), len(sent)]
    of_losses, of_before, own = tf.split(counts, lengths)
    if before:
        own = tf.where(tf.reduce_any(tf.not_equal(of_before, 0)), of_before, own)
    loss = tf.constant([[_UNKNOWN, _UNKNOWN, 0]], COUNTS)
    if losses:
        loss = tf.reduce_sum(of_losses, 0, keepdims=True) * [1, 1, 0]
    return tf.concat([loss, own], 0), zeros


_shared_row_of_replica = host.shared_operation(_row_of_replica)


def _row_of_totals(totals: Sequence[gradients.Gradient], inputs: int) -> tf.Tensor:
    """Counts values that are not finite in the gradients that were tested."""
    counts = _counts(totals, _counts_of)
    return tf.concat([tf.zeros([1, 3], COUNTS), counts, tf.zeros([inputs, 3], COUNTS)], 0)


_counts_of = host.shared_operation(finiteness.count_not_finite)
_compiled_flags_of = host.shared_operation(finiteness.flag_not_finite, jit_compile=True)


def _counts(
    values: Sequence[gradients.Gradient],
    count: Callable[..., tf.Tensor] = finiteness.count_not_finite,
) -> tf.Tensor:
    """Counts values that are not finite.

    Where every step does so, it only flags them.
    """
    if selection.is_selecting():
        count = _compiled_flags_of
    elif selection.is_without_branches():
        count = finiteness.flag_not_finite
    return count(values)


def _row_of_input(given: Input) -> tf.Tensor:
    """Counts values that are not finite in an input, or not as the model casts it."""
    third = tf.constant([0, 0, 1], COUNTS)
    if selection.is_without_branches():
        flags = finiteness.flag_not_finite([given.value])
        is_large = finiteness.is_any_at_least(given.value, given.limit)
        is_only_large = is_large & tf.reduce_all(tf.equal(flags, 0))
        return flags + tf.where(is_only_large, finiteness.UNCOUNTED * third, 0)
    is_large = tf.abs(given.value) >= tf.cast(given.limit, given.value.dtype)
    large = tf.reduce_sum(tf.cast(is_large & tf.math.is_finite(given.value), COUNTS))
    return finiteness.count_not_finite([given.value]) * [1, 1, 0] + large * third


class _Record:
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
        self._variables = [_reference(variable) for variable in seen.variables]
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

        self.vector = host.outside_of_functions(vector)
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
        self._records: dict[int, _Record] = {}
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
        made = tf.cast(_UNKNOWN if seen.steps_made is None else seen.steps_made, COUNTS)
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
            step=None if made == _UNKNOWN else int(made + skipped),
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

    def _of(self, seen: SkippedStep) -> tuple[int, _Record]:
        for number, record in self._records.items():
            if record.is_of(seen):
                return number, record
        number, record = next(self._numbers), _Record(seen)
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


def _reference(variable: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(variable)
    except TypeError:  # Some variables have slots, but none for references.
        return lambda: variable
