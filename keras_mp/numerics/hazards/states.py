"""States that a forward pass keeps in 16 bits: counts and sums that stop, averages that stick."""

import math
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

import tensorflow as tf

from keras_mp.numerics.causes import Observed, Said
from keras_mp.numerics.distances import LIMIT, UNIT_ROUNDOFF
from keras_mp.numerics.hazards.traced_step import TracedStep, static_number, widened
from keras_mp.numerics.origins import MOVES
from keras_mp.support.dtypes import LOW_PRECISION

# By how much an operation that writes a variable multiplies its old value, and what it is given.
_WRITES = {
    "AssignVariableOp": (0.0, 1.0),
    "AssignAddVariableOp": (1.0, 1.0),
    "AssignSubVariableOp": (1.0, -1.0),
}
_HANDED_ON = frozenset({"Cast", *MOVES})
_SUMS = ("Add", "AddV2", "Sub")
_CURE = 'Make the variable in float32: self.add_weight(..., dtype="float32").'


class _Write(NamedTuple):
    """A variable is written in 16 bits.

    Attributes:
        operation: the one that writes.
        dtype: str.
        kept: float. By which number the old value is in the new one.
        added: the tensors that are added to it.
    """

    operation: tf.Operation
    dtype: str
    kept: float
    added: list[tf.Tensor]


def _writes(step: TracedStep) -> Iterator[_Write]:
    for write in step.forward:
        if write.type not in _WRITES or write.inputs[0].ref() in step.trained:
            continue
        of_old, of_value = _WRITES[write.type]
        value, terms = write.inputs[1], [write.inputs[1]]
        dtypes = {value.dtype}
        if not of_old:  # What is written was added up before.
            while value.op.type in _HANDED_ON:
                value = value.op.inputs[0]
                dtypes.add(value.dtype)
            terms = list(value.op.inputs) if value.op.type in _SUMS else []
        low = [each.name for each in dtypes.intersection(LOW_PRECISION)]
        if low:
            factors = _factors(step, write)
            kept = of_old + of_value * factors.get(value.ref(), 0.0)
            added = [each for each in terms if each.ref() not in factors]
            yield _Write(write, max(low, key=UNIT_ROUNDOFF.__getitem__), kept, added)


def sums(step: TracedStep) -> Iterator[Observed]:
    """A layer adds to a variable in 16 bits."""
    for write in _writes(step):
        if write.kept == 1 and write.added:
            added = widened(write.added[0])
            least, most = tf.reduce_min(added), tf.reduce_max(added)
            yield Observed(write.operation, dtype=write.dtype, least=least, most=most)


def judge_sum(dtype: str, least: float, most: float) -> Said | None:
    """A sum of numbers of both signs need not grow."""
    largest = max(most, -least)
    if least < 0 < most or not largest:
        return None
    return Said(
        "a sum that stops in 16 bits",
        f"Up to {largest:.3g} is added to a variable in each step, in {dtype}: from "
        f"{largest / UNIT_ROUNDOFF[dtype]:,.0f} on, that changes nothing.",
        _CURE,
    )


def averages(step: TracedStep) -> Iterator[Observed]:
    """A layer moves an average in 16 bits."""
    for write in _writes(step):
        if 1 - 1 / LIMIT < write.kept < 1:
            largest = tf.reduce_max(tf.abs(widened(write.operation.inputs[1])))
            yield Observed(write.operation, dtype=write.dtype, kept=write.kept, largest=largest)


def judge_average(dtype: str, kept: float, largest: float) -> Said | None:
    """Rounding holds it where it moves by less than that."""
    if not largest:
        return None
    off = UNIT_ROUNDOFF[dtype] / (1 - kept)
    return Said(
        "an average that sticks in 16 bits",
        f"A moving average, up to {largest:.3g} here, keeps {kept:.4g} of itself in each step, in "
        f"{dtype}: it stays up to {off:.0%} away from what it is an average of.",
        _CURE,
    )


def _factors(step: TracedStep, write: tf.Operation) -> Mapping[Hashable, float]:
    """Returns by which number each tensor has the old value of what is written in it.

    Args:
        step: TracedStep.
        write: an operation that writes a variable.

    Returns:
        dict of the tensors that depend on the old value; NaN for those that are no multiples of it
        plus something else.
    """
    factors: dict[Hashable, float] = {}
    # The maker of a tensor comes before its consumers.
    for operation in step.forward:
        if operation is write:
            break
        if operation.type == "ReadVariableOp" and operation.inputs[0] is write.inputs[0]:
            factors[operation.outputs[0].ref()] = 1.0
        elif any(each.ref() in factors for each in operation.inputs):
            factor = _factor(operation, [factors.get(t.ref(), 0.0) for t in operation.inputs])
            factors.update((each.ref(), factor) for each in operation.outputs)
    return factors


def _factor(operation: tf.Operation, factors: list[float]) -> float:
    """Returns the factor of a result, given those of the inputs."""
    if operation.type in _HANDED_ON:
        return factors[0]
    if operation.type in _SUMS:
        return factors[0] + (-1 if operation.type == "Sub" else 1) * factors[1]
    if operation.type == "Mul":
        for constant, factor in zip(operation.inputs, reversed(factors)):
            number = static_number(constant)
            if number is not None:
                return number * factor
    return math.nan
