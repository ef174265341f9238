"""States that a forward pass keeps in 16 bits: counts and sums that stop, averages that stick."""

import math
from collections.abc import Hashable, Iterator, Mapping

import tensorflow as tf

from keras_mp.numerics.distances import LIMIT
from keras_mp.numerics.graphs.origins import MOVES
from keras_mp.numerics.hazards.traced_step import (
    UNIT_ROUNDOFF,
    Suspect,
    TracedStep,
    static_value,
    widened,
)
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


def states_in_16_bits(traced: TracedStep) -> Iterator[Suspect]:
    """A layer adds to a variable, or moves an average, in 16 bits."""
    for write in traced.forward:
        if write.type not in _WRITES or write.inputs[0].ref() in traced.trained:
            continue
        of_old, of_value = _WRITES[write.type]
        value, terms = write.inputs[1], [write.inputs[1]]
        dtypes = {value.dtype}
        if not of_old:  # What is written was added up before.
            while value.op.type in _HANDED_ON:
                value = value.op.inputs[0]
                dtypes.add(value.dtype)
            terms = list(value.op.inputs) if value.op.type in _SUMS else []
        low = dtypes.intersection(LOW_PRECISION)
        if not low:
            continue
        dtype = max(low, key=UNIT_ROUNDOFF.__getitem__)
        factors = _factors(traced, write)
        kept = of_old + of_value * factors.get(value.ref(), 0.0)
        added = [each for each in terms if each.ref() not in factors]
        if kept == 1 and added:
            yield _sum(traced, write, added[0], dtype)
        elif 1 - 1 / LIMIT < kept < 1:
            yield _average(traced, write, dtype, kept)


def _factors(traced: TracedStep, write: tf.Operation) -> Mapping[Hashable, float]:
    """Returns by which number each tensor has the old value of what is written in it.

    Args:
        traced: TracedStep.
        write: an operation that writes a variable.

    Returns:
        dict of the tensors that depend on the old value; NaN for those that are no multiples of it
        plus something else.
    """
    factors: dict[Hashable, float] = {}
    # The maker of a tensor comes before its consumers.
    for operation in traced.forward:
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
            number = static_value(constant)
            if number is not None and number.size == 1:
                return float(number.item()) * factor
    return math.nan


def _sum(traced: TracedStep, write: tf.Operation, added: tf.Tensor, dtype: tf.DType) -> Suspect:
    least, most = yield tf.reduce_min(widened(added)), tf.reduce_max(widened(added))
    largest = max(most, -least)
    # A sum of numbers of both signs need not grow.
    if least < 0 < most or not largest:
        return None
    return traced.finding(
        write,
        "a sum that stops in 16 bits",
        f"Up to {largest:.3g} is added to a variable in each step, in {dtype.name}: from "
        f"{largest / UNIT_ROUNDOFF[dtype]:,.0f} on, that changes nothing.",
        _CURE,
    )


def _average(traced: TracedStep, write: tf.Operation, dtype: tf.DType, kept: float) -> Suspect:
    [largest] = yield [tf.reduce_max(tf.abs(widened(write.inputs[1])))]
    if not largest:
        return None
    off = UNIT_ROUNDOFF[dtype] / (1 - kept)
    return traced.finding(
        write,
        "an average that sticks in 16 bits",
        f"A moving average, up to {largest:.3g} here, keeps {kept:.4g} of itself in each step, in "
        f"{dtype.name}: it stays up to {off:.0%} away from what it is an average of.",
        _CURE,
    )
