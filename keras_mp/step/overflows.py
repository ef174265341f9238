"""Finds and records which gradients were not finite in skipped steps, and on which replica.

The branch that skips counts them. There is a record, a variable, for each list of variables that
steps were made with; `overflow_report` has what users see of it. This module needs TensorFlow only.
"""

import collections
import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import tensorflow as tf

from keras_mp.step import gradients, replicas
from keras_mp.step.gradients import COUNTS
from keras_mp.step.loss_scales import state_variable
from keras_mp.step.overflow_report import (
    MAX_NAMES,
    LossOfReplica,
    Overflow,
    OverflowedGradient,
    ReplicaPlace,
)
from keras_mp.step.state_rollback import name_of
from keras_mp.support import host
from keras_mp.support.autograph import do_not_convert

# The header of a record describes its last step: its number among those skipped in this program;
# the number of skipped steps so far, those before a restored checkpoint included; the number of
# steps that the optimizer had made by then, or -1; how many of its steps were skipped; the loss
# scale.
_HEADER = 5
_UNKNOWN = -1
# A streak describes the steps that were skipped in a row: in how many the loss was not finite, and
# in how many it was; how many steps of this program had been skipped before the first of them, and
# how many have been by now; how many variables were not finite; the numbers of the `MAX_NAMES`
# variables that most often were not, and in how many steps each.
STREAK = 5 + 2 * MAX_NAMES
_KINDS = 3  # counts for each gradient: Inf, NaN, and 1 where only the sum is not finite

_eagerly = tf.__internal__.eager_context.eager_mode


Names = Callable[[Sequence[Any]], list[str | None]]
_T = TypeVar("_T")


class NonFiniteCounts(NamedTuple):
    """The counts of values that are not finite in a skipped step, on all replicas.

    Attributes:
        variables: list of the variables whose gradients were computed.
        counts: `COUNTS` tensor of shape [rows, 1 + variables, 3]. Each replica has a row; with
            `has_total`, a last row is for the gradients that were tested. A row begins with the
            loss, -1 if it is unknown. `gradients.count_not_finite` defines the three numbers.
        has_total: bool. Whether the gradients that were tested are not those of single replicas.
        steps_made: int64 scalar tensor, the steps of the optimizer so far, or None.
        names: takes variables and returns the users' names for them, None for unknown ones.
    """

    variables: Sequence[Any]
    counts: tf.Tensor
    has_total: bool
    steps_made: tf.Tensor | None
    names: Names | None

    def names_of(self, variables: Sequence[Any]) -> list[str]:
        """Returns names for variables: those of `names`, else their paths or own names."""
        known = self.names(variables) if self.names else [None] * len(variables)
        return [name or name_of(variable) for name, variable in zip(known, variables, strict=True)]


class ReplicaValues(NamedTuple):
    """The values of a replica in a skipped step, in which Inf and NaN are counted.

    Attributes:
        losses: its losses; empty if they are not known.
        unclipped: its gradients before they were clipped; empty if they were not.
        sent: its gradients as they are, or as it sent them to the others.
    """

    losses: Sequence[tf.Tensor]
    unclipped: Sequence[gradients.Gradient]
    sent: Sequence[gradients.Gradient]


def count_not_finite(
    of_replicas: Sequence[ReplicaValues], totals: Sequence[gradients.Gradient] | None
) -> tf.Tensor:
    """Counts values that are not finite. Called in the branch that skips.

    Args:
        of_replicas: the values of all replicas of this process, or of the one that calls this.
            The counts of others are added.
        totals: the gradients that were tested, of which the first were made of `sent`; None if
            `sent` itself was tested. All replicas have the same.

    Returns:
        The `counts` of `NonFiniteCounts`, the same on every replica.
    """
    strategy = tf.distribute.get_strategy()
    count = strategy.num_replicas_in_sync
    rows = []
    for i, each in enumerate(of_replicas):
        more = 0 if totals is None else len(totals) - len(each.sent)
        sent = [*each.sent, *[None] * more]
        device = strategy.extended.worker_devices[i] if len(of_replicas) > 1 else None
        with tf.device(device):
            rows.append(_row_of_replica(list(each.losses), list(each.unclipped), sent))
    if len(rows) == count:
        return tf.stack(rows if totals is None else [*rows, _row_of_totals(totals)])

    @do_not_convert
    def gather() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group
        row = rows[replicas.local_id()] if len(rows) > 1 else rows[0]
        counts = tf.one_hot(replica, count, dtype=COUNTS)[:, tf.newaxis, tf.newaxis] * row
        if totals is not None:
            # The totals are the same on all replicas, so one counts in them.
            is_first = tf.get_static_value(replica) == 0
            total = _row_of_totals(totals) if is_first else tf.zeros_like(row)
            counts = tf.concat([counts, total[tf.newaxis]], 0)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, counts)

    if not tf.distribute.in_cross_replica_context():
        return gather()
    return strategy.experimental_local_results(strategy.extended.call_for_each_replica(gather))[0]


@host.shared_operation
def _row_of_replica(
    losses: Sequence[tf.Tensor],
    unclipped: Sequence[gradients.Gradient],
    sent: Sequence[gradients.Gradient],
) -> tf.Tensor:
    """Counts values that are not finite among those of a replica."""
    before = [*unclipped, *[None] * (len(sent) - len(unclipped))] if unclipped else []
    counts = gradients.count_not_finite([*losses, *before, *sent])
    if not before and len(losses) == 1 and losses[0].shape.rank == 0:
        return counts
    lengths = [len(losses), len(before), len(sent)]
    of_losses, of_before, own = tf.split(counts, lengths)
    if before:
        own = tf.where(tf.reduce_any(of_before > 0), of_before, own)
    loss = tf.constant([[_UNKNOWN, _UNKNOWN, 0]], COUNTS)
    if losses:
        loss = tf.reduce_sum(of_losses, 0, keepdims=True) * [1, 1, 0]
    return tf.concat([loss, own], 0)


@host.shared_operation
def _row_of_totals(totals: Sequence[gradients.Gradient]) -> tf.Tensor:
    """Counts values that are not finite in the gradients that were tested."""
    return tf.concat([tf.zeros([1, 3], COUNTS), gradients.count_not_finite(totals)], 0)


class _Record:
    """The record of the gradients of a list of variables in skipped steps.

    Attributes:
        names: the names of the variables.
        vector: variable of `COUNTS`: the header; for each variable, in how many skipped steps its
            gradient was not finite, in all and in the present streak; the counts of the last step.

    Args:
        seen: the first of these steps.
        first: int. The number of its first variable among those of all records.
    """

    def __init__(self, seen: NonFiniteCounts, first: int) -> None:
        self.first, self.has_total = first, seen.has_total
        self.names = _names(seen)
        self.sizes = [tf.TensorShape(v.shape).num_elements() for v in seen.variables]
        self._variables = [_reference(variable) for variable in seen.variables]
        strategy = tf.distribute.get_strategy()
        self._is_on_each = _is_on_each()
        self.shape = strategy.num_replicas_in_sync + seen.has_total, 1 + len(self.names), _KINDS
        length = _HEADER + 2 * len(self.names) + int(np.prod(self.shape))
        # An `init_scope` does not hide a variable from the tf.function that is being traced, which
        # would be traced again, or refuse it. A graph of its own does. The strategy's
        # scope is made in there, since it enters the graph again in which it was made.
        with (
            tf.Graph().as_default(),
            _eagerly(),
            # If one replica records for all, copies would only have to be sent around.
            strategy.scope() if self._is_on_each else contextlib.nullcontext(),
        ):
            self.vector = state_variable(np.zeros(length), COUNTS, "overflow")
        self.places = _places(strategy, self.vector)

    def is_of(self, seen: NonFiniteCounts) -> bool:
        """Whether a step belongs to this record."""
        return (
            self._is_on_each == _is_on_each()
            and self.has_total == seen.has_total
            and len(self.places) == tf.distribute.get_strategy().num_replicas_in_sync
            and len(self._variables) == len(seen.variables)
            and all(ref() is v for ref, v in zip(self._variables, seen.variables))
        )

    def overflowed(self, counts: np.ndarray) -> Sequence[tuple[ReplicaPlace | None, np.ndarray]]:
        """Returns the places where a gradient was not finite, with their counts."""
        of_replicas = [pair for pair in zip(self.places, counts) if pair[1].any()]
        if not of_replicas and counts[-1].any():
            return [(None, counts[-1])]
        return of_replicas


def _parts_of(vector: tf.Tensor | np.ndarray, count: int) -> list[tf.Tensor]:
    """Returns the parts of a record's `vector`, given the number of its variables."""
    return tf.split(vector, [_HEADER, count, count, -1])


@host.shared_operation
def _after(
    vector: tf.Tensor,
    streak: tf.Tensor,
    counts: tf.Tensor,
    goes_on: tf.Tensor,
    loss_scale: tf.Tensor,
    total: tf.Tensor,
    made: tf.Tensor,
    skipped: tf.Tensor | None,
    first: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the next `vector` of a record and the next streak, given the counts of a step.

    `skipped` is how many steps of the optimizer were skipped; None to count these here. `first` is
    that of the record, and the rest is as in `Overflows.record`, the numbers in `COUNTS`.
    """
    count = cast(int, counts.shape[1]) - 1
    header, in_all, in_a_row, _ = _parts_of(vector, count)
    last, _, _, skipped_before, _ = tf.unstack(header)
    losses, before, now, *most_often = tf.split(streak, [2, 1, 1, 1, MAX_NAMES, MAX_NAMES])
    of_losses, of_gradients = tf.split(counts, [1, -1], 1)
    zero = tf.constant(0, COUNTS)
    losses = tf.where(goes_on, losses, zero) + _how_many_are_finite(of_losses)
    began = tf.where(goes_on, before, now)
    now += 1
    overflowed = tf.cast(tf.reduce_any(of_gradients > zero, axis=[0, 2]), COUNTS)
    in_a_row = overflowed + tf.where(last > began, in_a_row, zero)
    skipped = skipped_before + 1 if skipped is None else skipped
    rest = tf.stack([total, made, skipped, loss_scale])
    vector = tf.concat([now, rest, in_all + overflowed, in_a_row, tf.reshape(counts, [-1])], 0)
    _, numbers, steps = most_often
    own = range(first, first + count)
    most_often = _most_often(numbers, steps, goes_on, own, in_a_row)
    return vector, tf.concat([losses, began, now, *most_often], 0)


def _how_many_are_finite(losses: tf.Tensor) -> tf.Tensor:
    """Returns [1, 0] if the loss of a step is not finite, [0, 1] if it is, zeros if unknown."""
    zero = tf.constant(0, COUNTS)
    is_known = tf.reduce_all(losses >= zero)
    is_finite = tf.reduce_all(losses <= zero)
    return tf.cast(is_known & tf.stack([tf.logical_not(is_finite), is_finite]), COUNTS)


def _most_often(
    numbers: tf.Tensor, steps: tf.Tensor, goes_on: tf.Tensor, own: range, in_a_row: tf.Tensor
) -> list[tf.Tensor]:
    """Updates the variables that most often were not finite with a record's own.

    Returns how many there are, the numbers of the first of them, and in how many steps these were
    not finite.
    """
    is_other = goes_on & ((numbers < own.start) | (numbers >= own.stop))
    # Among equals the last one comes first: NaN spreads backward, from the loss.
    numbers = tf.concat([np.array(own[::-1], float), numbers], 0)
    steps = tf.where(is_other, steps, tf.zeros_like(steps))
    steps = tf.concat([tf.reverse(in_a_row, [0]), steps], 0)
    most, places = tf.math.top_k(steps, MAX_NAMES)
    affected = tf.reduce_sum(tf.cast(steps > 0, COUNTS), keepdims=True)
    return [affected, tf.gather(numbers, places), most]


class Overflows:
    """The records of all skipped steps."""

    def __init__(self) -> None:
        self._records: list[_Record] = []

    def record(
        self,
        seen: NonFiniteCounts,
        streak: tf.Tensor,
        goes_on: tf.Tensor,
        loss_scale: tf.Tensor,
        total: tf.Tensor,
        is_of_one: bool,
    ) -> tuple[tf.Tensor, Any]:
        """Records a skipped step. Called in the branch that skips.

        Args:
            seen: the counts of the step.
            streak: `COUNTS` tensor of shape [STREAK], the result of the last call, at first zeros.
            goes_on: bool scalar tensor. Whether the step before it was skipped too.
            loss_scale: float32 scalar tensor.
            total: int64 scalar tensor. How many steps were skipped so far, this one among them.
            is_of_one: bool. Whether all of them are steps of one optimizer.

        Returns:
            tuple of the new `streak` and of the operation that records the rest.
        """
        record = self._of(seen)
        made = tf.constant(_UNKNOWN, COUNTS)
        if seen.steps_made is not None:
            made = tf.cast(seen.steps_made, COUNTS)
        total = tf.cast(total, COUNTS)
        vector, streak = _after(
            tf.convert_to_tensor(record.vector),
            streak,
            seen.counts,
            goes_on,
            tf.cast(loss_scale, COUNTS),
            total,
            made,
            total if is_of_one else None,
            record.first,
        )
        return streak, record.vector.assign(vector, read_value=False)

    def last(self) -> Overflow | None:
        """Returns the step that was skipped last, or None. In eager."""
        values = [(each, tf.convert_to_tensor(each.vector).numpy()) for each in self._records]
        if not any(vector[0] for _, vector in values):
            return None
        record, vector = max(values, key=lambda value: value[1][0])
        parts = (part.numpy() for part in _parts_of(vector, len(record.names)))
        (_, total, made, skipped, loss_scale), in_all, _, counts = parts
        counts = counts.reshape(record.shape)
        return Overflow(
            step=None if made == _UNKNOWN else int(made + skipped),
            steps_skipped=int(total),
            loss_scale=float(loss_scale),
            losses=tuple(
                LossOfReplica(place, _kind(*loss[:2]))
                for place, loss in zip(record.places, counts[:, 0])
            ),
            gradients=tuple(
                OverflowedGradient(
                    variable=name,
                    place=place,
                    infs=int(infs),
                    nans=int(nans),
                    size=record.sizes[i],
                    steps=int(in_all[i]),
                )
                for i, name in enumerate(record.names)
                for place, (infs, nans, _) in record.overflowed(counts[:, 1 + i])
            ),
            totals={name: int(steps) for name, steps in zip(record.names, in_all, strict=True)},
        )

    def describe(self, streak: Sequence[int]) -> str:
        """Returns a sentence about the gradients that most often were not finite, or "".

        Args:
            streak: the result of `record`.
        """
        affected, *pairs = streak[4:]
        texts = []
        for number, steps in zip(pairs[:MAX_NAMES], pairs[MAX_NAMES:], strict=True):
            if steps:
                name = self._name(number)
                layer = name.rpartition("/")[0]
                texts.append(f"{name!r}{f' of layer {layer!r}' if layer else ''} (in {steps})")
        if not texts:
            return ""
        more = f" and {affected - MAX_NAMES} more" if affected > MAX_NAMES else ""
        return (
            f" Most often it was the gradient of {', '.join(texts)}{more} that was not finite; "
            "`last_overflow` tells more of the last step."
        )

    def _name(self, number: int) -> str:
        record = next(r for r in reversed(self._records) if r.first <= number)
        return record.names[number - record.first]

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {f"overflow_{i}": record.vector for i, record in enumerate(self._records)}

    def _of(self, seen: NonFiniteCounts) -> _Record:
        record = next((r for r in self._records if r.is_of(seen)), None)
        if record is None:
            first = sum(len(r.names) for r in self._records)
            record = _Record(seen, first)
            self._records.append(record)
        return record

    def __reduce__(self) -> tuple[Any, ...]:
        return Overflows, ()


def _kind(infs: int, nans: int) -> str:
    if infs == _UNKNOWN:
        return "not known"
    return "NaN" if nans else "Inf" if infs else "finite"


def _names(seen: NonFiniteCounts) -> list[str]:
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
    """Whether each replica keeps records; under other strategies one replica does for all."""
    is_alone = tf.distribute.get_strategy().num_replicas_in_sync == 1
    return is_alone or tf.__internal__.distribute.strategy_supports_no_merge_call()


def _reference(variable: _T) -> Callable[[], _T | None]:
    try:
        return weakref.ref(variable)
    except TypeError:  # Some variables have slots, and none for references.
        return lambda: variable


def _places(strategy: tf.distribute.Strategy, variable: tf.Variable) -> list[ReplicaPlace]:
    """Returns the places of all replicas. All workers have the same devices.

    Args:
        strategy: `tf.distribute.Strategy`.
        variable: on the device of the replica, if there is only one replica.
    """
    count = strategy.num_replicas_in_sync
    devices = [variable.device] if count == 1 else strategy.extended.worker_devices
    specs = map(tf.DeviceSpec.from_string, devices)
    names = [f"{spec.device_type}:{spec.device_index}" for spec in specs]
    return [ReplicaPlace(i, i // len(names), names[i % len(names)]) for i in range(count)]
