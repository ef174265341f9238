"""The report of a skipped step: its losses, and the gradients that were not finite."""

import dataclasses

from keras_mp.support import text_tables

# How many variables a warning names.
MAX_NAMES = 5

_NOT_FINITE = {"Inf", "NaN"}


@dataclasses.dataclass(frozen=True)
class ReplicaPlace:
    """A replica.

    Attributes:
        replica: int. Its index among all replicas.
        worker: int. The index of the worker process it belongs to; 0 where there is one process.
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
        kind: "finite", "Inf", "NaN", or "not known" where the loss was scaled in another function
            than the one that applied the gradients, or was not scaled by keras_mp.
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
        place: the replica. None if the gradient of each replica was finite, but their sum, or the
            sum with gradients that were accumulated before, was not.
        infs: int. How many values are infinite.
        nans: int. How many are NaN.
        size: int. How many values the variable has; None if that is not known.
        steps: int. In how many skipped steps so far it was not finite.
    """

    variable: str
    place: ReplicaPlace | None
    infs: int
    nans: int
    size: int | None
    steps: int

    @property
    def layer(self) -> str:
        """The name of the variable without its last part; empty if there is only one."""
        return self.variable.rpartition("/")[0]


@dataclasses.dataclass(frozen=True)
class Overflow:
    """A step that was skipped, and why. Its `str` is a table.

    Attributes:
        step: int. The number of the step, from 1, skipped steps included; None if the optimizer
            counts none. With a `GradScaler`, skipped steps count from the start of the program.
        steps_skipped: int. How many steps were skipped so far, this one included.
        loss_scale: float. The loss scale at which it overflowed.
        losses: tuple of LossOfReplica, one for each replica.
        gradients: tuple of OverflowedGradient, in the order of the variables. Empty where all
            values were finite and only the sum of all of them was not.
        totals: dict of the names of all variables, and in how many skipped steps each was not
            finite.

    Example:

    >>> optimizer, v = keras_mp.LossScaleOptimizer("sgd"), tf.Variable([1.0, 2.0, 3.0], name="v")
    >>> _ = optimizer.minimize(lambda: tf.reduce_sum(tf.sqrt(v - [0.0, 2.0, 4.0])), [v])
    >>> overflow = optimizer.last_overflow
    >>> [(row.variable, row.infs, row.nans, row.size) for row in overflow.gradients]
    [('v', 1, 1, 3)]
    >>> [loss.kind for loss in overflow.losses], overflow.totals
    (['NaN'], {'v': 1})
    """

    step: int | None
    steps_skipped: int
    loss_scale: float
    losses: tuple[LossOfReplica, ...]
    gradients: tuple[OverflowedGradient, ...]
    totals: dict[str, int]

    @property
    def loss_is_finite(self) -> bool | None:
        """Whether the loss was finite on every replica; None if that is not known."""
        kinds = {loss.kind for loss in self.losses}
        if kinds & _NOT_FINITE:
            return False
        return None if "not known" in kinds else True

    @property
    def variables(self) -> list[str]:
        """Names of the variables whose gradients were not finite."""
        return list(dict.fromkeys(gradient.variable for gradient in self.gradients))

    @property
    def summary(self) -> str:
        """The report in one line."""
        names = [repr(name) for name in self.variables]
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        whose = ", ".join(names[:MAX_NAMES]) + more if names else "no single variable"
        return (
            f"{self._which()} ({self.steps_skipped} so far). {self._of_the_loss()} Gradients that "
            f"were not finite: {whose}."
        )

    def __str__(self) -> str:
        text = f"{self._which()} ({self.steps_skipped} skipped so far).\n{self._of_the_loss()}"
        if not self.gradients:
            return f"{text}\nEach gradient was finite. What was not is the sum of all of them."
        head = ("gradient of", "replica", "Inf", "NaN", "values", "skipped steps")
        rows = [head, *map(_cells, self.gradients)]
        return "\n".join([text, "", *text_tables.aligned(rows, left=(0, 1))])

    def _which(self) -> str:
        which = "A step" if self.step is None else f"Step {self.step}"
        return f"{which} was skipped at a loss scale of {self.loss_scale:g}"

    def _of_the_loss(self) -> str:
        bad = [
            f"{loss.kind} on replica {loss.place}"
            for loss in self.losses
            if loss.kind in _NOT_FINITE
        ]
        if bad:
            return f"The loss was {', '.join(bad)}."
        return "The loss was finite." if self.loss_is_finite else "The loss is not known."


def _cells(row: OverflowedGradient) -> tuple[str, ...]:
    where = "only the sum" if row.place is None else str(row.place)
    infs, nans = (f"{n:,}" if row.infs or row.nans else "-" for n in (row.infs, row.nans))
    size = "-" if row.size is None else f"{row.size:,}"
    return row.variable, where, infs, nans, size, f"{row.steps:,}"
