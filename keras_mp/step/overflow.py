"""The report of a skipped step: its losses, and its non-finite gradients."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.step.skip_report import HEADER, NO_EXAMPLES, NO_TIME, TIMES, UNCOUNTED, UNKNOWN, Note
from keras_mp.support import columns

# How many variables a text names.
_MAX_NAMES = 5

_NOT_FINITE, _NO_EXAMPLES = {"Inf", "NaN"}, "no examples"


@dataclasses.dataclass(frozen=True)
class ReplicaPlace:
    """A replica.

    Attributes:
        replica: int. Its index among all replicas.
        worker: int. The index of the worker process that the replica belongs to; 0 if there is one
            process.
        device: str, such as "GPU:0".
    """

    replica: int
    worker: int
    device: str

    def __str__(self) -> str:
        return f"{self.replica} (worker {self.worker}, {self.device})"


@dataclasses.dataclass(frozen=True)
class LossOfReplica:
    """The loss of a replica in a step that was skipped.

    Attributes:
        place: the replica.
        kind: "finite", "Inf", "NaN"; "no examples" where `fit` gave the replica none; or "not
            known" where the loss was scaled in another function than the one that applied the
            gradients, or was not scaled by keras_mp.
    """

    place: ReplicaPlace
    kind: str


@dataclasses.dataclass(frozen=True)
class OverflowedGradient:
    """The gradient of a variable that was not finite on a replica.

    Attributes:
        variable: str. The variable's path in the model that the optimizer was compiled for, such
            as "encoder/dense/kernel". Where no model is known, as in a training loop of your own,
            it is the path that Keras 3 gives a weight, or else the variable's name.
        place: the replica. None if the gradient of each replica was finite, but not their sum, or
            not the sum with gradients that were accumulated before.
        infs: int. How many values are infinite. None in a step that XLA compiled, which counts
            them for scalars only.
        nans: int. How many values are NaN; None in the same case.
        size: int. How many values the variable has; None if that is not known.
    """

    variable: str
    place: ReplicaPlace | None
    infs: int | None
    nans: int | None
    size: int | None

    @property
    def layer(self) -> str:
        """The name of the variable without its last part; empty if it has no other."""
        return self.variable.rpartition("/")[0]


@dataclasses.dataclass(frozen=True)
class Overflow:
    """A step that was skipped, and why.

    Its `str` is a table.

    Attributes:
        step: int. The number of the step, from 1, skipped steps included; None if the optimizer
            counts none. With a `GradScaler`, skipped steps count from the start of the program.
        steps_skipped: int. How many steps were skipped so far, this one included.
        loss_scale: float. The loss scale at which it overflowed.
        losses: tuple of LossOfReplica, one for each replica.
        gradients: tuple of OverflowedGradient, in the order of the variables. Empty where all
            values were finite and only the sum of all of them was not.

    Example:

    >>> optimizer, v = keras_mp.LossScaleOptimizer("sgd"), tf.Variable([1.0, 2.0, 3.0], name="v")
    >>> _ = optimizer.minimize(lambda: tf.reduce_sum(tf.sqrt(v - [0.0, 2.0, 4.0])), [v])
    >>> overflow = optimizer.last_overflow
    >>> [(row.variable, row.infs, row.nans, row.size) for row in overflow.gradients]
    [('v', 1, 1, 3)]
    >>> [loss.kind for loss in overflow.losses]
    ['NaN']
    """

    step: int | None
    steps_skipped: int
    loss_scale: float
    losses: tuple[LossOfReplica, ...]
    gradients: tuple[OverflowedGradient, ...]

    @property
    def loss_is_finite(self) -> bool | None:
        """Whether the loss was finite on every replica; None if that is not known."""
        kinds = {loss.kind for loss in self.losses}
        if kinds & _NOT_FINITE:
            return False
        return True if kinds == {"finite"} else None

    @property
    def lacks_examples(self) -> bool:
        """Whether a replica had no examples."""
        return any(loss.kind == _NO_EXAMPLES for loss in self.losses)

    @property
    def variables(self) -> list[str]:
        """The names of the variables whose gradients were not finite."""
        return list(dict.fromkeys(gradient.variable for gradient in self.gradients))

    @property
    def summary(self) -> str:
        """The report in one line."""
        whose = listed(self.variables) or "no single variable"
        return f"{self._beginning(' ')} Gradients that were not finite: {whose}."

    @property
    def of_examples(self) -> str:
        """A sentence about examples that were missing; empty if none were."""
        text = " There were no examples: leave such batches out, as with `drop_remainder=True`."
        return text * self.lacks_examples

    def __str__(self) -> str:
        lines = [self._beginning("\n")]
        if self.loss_is_finite is False:
            check = "print(keras_mp.numerics.check(model, (x, y)))"
            lines.append(f"{check} names the cause and the cure.")
        if self.gradients:
            rows = [
                ("gradient of", "replica", "Inf", "NaN", "values"),
                *map(_cells, self.gradients),
            ]
            lines += ["", *columns.aligned(rows, left=(0, 1))]
        elif not self.lacks_examples:
            lines.append("Each gradient was finite, but their sum was not.")
        return "\n".join(lines)

    def _beginning(self, separator: str) -> str:
        which = "A step" if self.step is None else f"Step {self.step}"
        bad = [f"{x.kind} on replica {x.place}" for x in self.losses if x.kind in _NOT_FINITE]
        of_loss = ", ".join(bad) or ("finite" if self.loss_is_finite else "not known")
        return (
            f"{which} was skipped at a loss scale of {self.loss_scale:g} ({self.steps_skipped} "
            f"skipped so far).{separator}The loss was {of_loss}.{self.of_examples}"
        )


def listed(names: Sequence[str]) -> str:
    """Returns names in quotes, at most the first few; empty if there are none."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(map(repr, names[:_MAX_NAMES])) + more


def _cells(row: OverflowedGradient) -> tuple[str, ...]:
    numbers = ("-" if n is None else f"{n:,}" for n in (row.infs, row.nans, row.size))
    return row.variable, str(row.place or "only the sum"), *numbers


def _kind_of(infs: float, nans: float) -> str:
    if infs in (NO_EXAMPLES, UNKNOWN):
        return _NO_EXAMPLES if infs == NO_EXAMPLES else "not known"
    return "NaN" if nans else "Inf" if infs else "finite"


def last_note(scaler: Any) -> tuple[Note, np.ndarray] | None:
    """Returns the note of the last skipped step, with its value; None without one.

    After a checkpoint was restored, a note may be of a later step.

    Args:
        scaler: the `Scaler`, which has the notes of all skipped steps.
    """
    notes = scaler.notes.values()
    total = int(tf.convert_to_tensor(scaler.steps_skipped)) if notes else 0
    read = [(note, tf.convert_to_tensor(note.vector).numpy()) for note in notes]
    read = [(note, vector) for note, vector in read if 0 < vector[0] <= total]
    return max(read, key=lambda each: each[1][0], default=None)


def report(note: Note, vector: np.ndarray) -> Overflow:
    """Returns the report of a step.

    Args:
        note: its note.
        vector: the value of that. It ends with an array of shape [replicas, 1 + variables, 2], as
            `SkippedStep` has it: of the losses, then of the gradients. It may have one more row for
            sums of gradients.
    """
    total, _, _, loss_scale, time = vector[: HEADER + 1].tolist()
    counts, places = vector[TIMES:].reshape(-1, 1 + len(note.names), 2), _places(note)
    losses = tuple(LossOfReplica(place, _kind_of(*row[0])) for place, row in zip(places, counts))
    found, alike = [], collections.Counter(note.names)
    for i, name in enumerate(note.names):
        if alike[name] > 1:
            name = f"{name} ({note.names[: i + 1].count(name)} of {alike[name]})"
        rows = [row for row in zip([*places, None], counts[:, i + 1]) if row[1].any()]
        # What is on a replica is in the sum, too.
        for place, (infs, nans) in [row for row in rows if row[0]] or rows:
            infs, nans = (None if n == UNCOUNTED else int(n) for n in (infs, nans))
            found.append(OverflowedGradient(name, place, infs, nans, note.sizes[i]))
    step = None if time == NO_TIME else int(time)
    return Overflow(step, int(total), loss_scale, losses, tuple(found))


def _places(note: Note) -> list[ReplicaPlace]:
    """Returns the places of all replicas. All workers have the same devices."""
    count, extended = note.strategy.num_replicas_in_sync, note.strategy.extended
    devices = [note.vector.device] if count == 1 else extended.worker_devices
    names = [device.rpartition("device:")[2] for device in devices]
    return [ReplicaPlace(i, i // len(names), names[i % len(names)]) for i in range(count)]
