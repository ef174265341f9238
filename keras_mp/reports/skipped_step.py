"""Counts values that are not finite in a skipped step, in the branch that skips.

This module needs TensorFlow only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.reports import value_counts
from keras_mp.reports.value_counts import COUNTS
from keras_mp.step import gradients, replicas
from keras_mp.step.batch import Input
from keras_mp.step.state_rollback import Weight, name_of
from keras_mp.support import host, selection
from keras_mp.support.autograph import do_not_convert

# What a count is where nothing is known.
UNKNOWN = -1
# The loss of a replica without examples, about which nothing is known.
_OF_NO_EXAMPLES = [UNKNOWN, UNKNOWN, 1]


class SkippedStep(NamedTuple):
    """What is known about a skipped step, on all replicas.

    Attributes:
        weights: the known weights of the model, from every replica of this process.
        variables: list of the variables whose gradients were computed.
        inputs: the names of the inputs of the model that were looked at.
        counts: `COUNTS` tensor of shape [rows, 1 + variables + inputs, 3]. Each replica has a row;
            with `has_total`, a last row is for the gradients that were tested. A row begins with
            the loss: -1 if it is unknown, and a third number of 1 if the replica had no examples.
            `value_counts.count_not_finite` defines the numbers of gradients. The third number of an
            input is how many values are infinite only in the dtype of the model.
        zeros: int64 scalar tensor. How many in a thousand values of the gradients are 0; -1 if they
            were not counted.
        has_total: bool. Whether the gradients that were tested are other than those of single
            replicas.
        steps_made: int64 scalar tensor, the steps of the optimizer so far, or None.
        paths: function that returns the paths of the model's weights, by their ids.
        may_be_empty: bool. Whether a replica may have had no examples. Defaults to False.
    """

    weights: Sequence[Weight]
    variables: Sequence[Any]
    inputs: Sequence[str]
    counts: tf.Tensor
    zeros: tf.Tensor
    has_total: bool
    steps_made: tf.Tensor | None
    paths: Callable[[], dict[int, str]]
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
        rows = slice(-1 if self.has_total else None)
        of_replicas, has_examples = is_bad[rows], self.counts[rows, 0, 2] <= 0
        is_only_the_sum = is_bad[-1] & tf.logical_not(tf.reduce_any(of_replicas))
        has_cause = tf.reduce_any(of_replicas & has_examples) | is_only_the_sum
        return has_cause | tf.reduce_all(has_examples)

    def names_of(self, variables: Sequence[Any]) -> list[str]:
        """Returns names for variables: their paths in the model, else their own."""
        paths = self.paths()
        return [paths.get(id(variable)) or name_of(variable) for variable in variables]


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
    rows, zeros = [], []
    for i, each in enumerate(of_replicas):
        more = 0 if totals is None else len(totals) - len(each.sent)
        sent = [*each.sent, *[None] * more]
        device = strategy.extended.worker_devices[i] if len(of_replicas) > 1 else None
        with tf.device(device):
            row, of_row = _row_of_replica(list(each.losses), list(each.unclipped), sent)
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


@host.shared_operation
def _row_of_replica(
    losses: Sequence[tf.Tensor],
    unclipped: Sequence[gradients.Gradient],
    sent: Sequence[gradients.Gradient],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts a replica's values that are not finite, and zeros in what it sent."""
    is_counted = not selection.is_without_branches()
    zeros = value_counts.zeros_in_a_thousand(sent) if is_counted else tf.constant(-1, tf.int64)
    before = [*unclipped, *[None] * (len(sent) - len(unclipped))] if unclipped else []
    counts = _counts([*losses, *before, *sent])
    if not before and len(losses) == 1 and losses[0].shape.rank == 0:
        return counts, zeros
    lengths = [len(losses), len(before), len(sent)]
    of_losses, of_before, own = tf.split(counts, lengths)
    if before:
        own = tf.where(tf.reduce_any(tf.not_equal(of_before, 0)), of_before, own)
    loss = tf.constant([[UNKNOWN, UNKNOWN, 0]], COUNTS)
    if losses:
        loss = tf.reduce_sum(of_losses, 0, keepdims=True) * [1, 1, 0]
    return tf.concat([loss, own], 0), zeros


def _row_of_totals(totals: Sequence[gradients.Gradient], inputs: int) -> tf.Tensor:
    """Counts values that are not finite in the gradients that were tested."""
    counts = _counts(totals, _counts_of)
    return tf.concat([tf.zeros([1, 3], COUNTS), counts, tf.zeros([inputs, 3], COUNTS)], 0)


_counts_of = host.shared_operation(value_counts.count_not_finite)


def _counts(
    values: Sequence[gradients.Gradient],
    count: Callable[..., tf.Tensor] = value_counts.count_not_finite,
) -> tf.Tensor:
    """Counts values that are not finite.

    Where every step does so, it only flags them.
    """
    if selection.is_without_branches():
        count = value_counts.flag_not_finite
    return count(values)


def _row_of_input(given: Input) -> tf.Tensor:
    """Counts values that are not finite in an input, or not as the model casts it."""
    third = tf.constant([0, 0, 1], COUNTS)
    if selection.is_without_branches():
        flags = value_counts.flag_not_finite([given.value])
        is_large = value_counts.is_any_at_least(given.value, given.limit)
        is_only_large = is_large & tf.reduce_all(tf.equal(flags, 0))
        return flags + tf.where(is_only_large, value_counts.UNCOUNTED * third, 0)
    is_large = tf.abs(given.value) >= tf.cast(given.limit, given.value.dtype)
    large = tf.reduce_sum(tf.cast(is_large & tf.math.is_finite(given.value), COUNTS))
    return value_counts.count_not_finite([given.value]) * [1, 1, 0] + large * third
