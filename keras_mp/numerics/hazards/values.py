"""Values that 16 bits cannot hold: overflow, masks, epsilons, sums, labels."""

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from keras_mp.model_steps import has_own_train_step
from keras_mp.numerics.distances import SMALLEST
from keras_mp.numerics.graphs import origins
from keras_mp.numerics.hazards.traced_step import (
    MOST_VARIANCE,
    UNIT_ROUNDOFF,
    Suspect,
    TracedStep,
    count,
    static_value,
    widened,
)
from keras_mp.numerics.results import Finding
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION

_DIVIDE = op_table.ops("divisions", "reciprocals") | {"Log"}


def vanished_epsilon(traced: TracedStep) -> Iterator[Suspect]:
    """A constant that is to keep a division from failing is 0 in 16 bits."""
    for operation in traced.in_16_bits(("Add", "AddV2", "Maximum")):
        for constant, other in (operation.inputs, tuple(operation.inputs)[::-1]):
            value = static_value(constant)
            if value is None or np.any(value):
                continue
            divides = _division(traced, operation.outputs[0])
            if divides is not None:
                yield _epsilon(traced, operation, other, divides)


def _epsilon(
    traced: TracedStep, operation: tf.Operation, other: tf.Tensor, divides: tf.Operation
) -> Suspect:
    output = operation.outputs[0]
    zeros, least = yield count(tf.equal(output, 0)), tf.reduce_min(widened(other))
    traced.explained.add(divides)
    dtype = output.dtype
    return traced.finding(
        operation,
        "an epsilon that is 0 in 16 bits",
        f"The constant of {operation.type}, before {divides.type}, is 0 in {dtype.name}, whose "
        f"smallest number is {SMALLEST[dtype.name]:.1g}. Of "
        f"{output.shape.num_elements() or 'the'} values of this batch {zeros:,} are 0 then; the "
        f"smallest is {least:.3g}.",
        f"Use an epsilon that {dtype.name} holds, such as 1e-4, or compute this in float32.",
    )


def _division(traced: TracedStep, tensor: tf.Tensor) -> tf.Operation | None:
    """Returns the operation that divides by a tensor or its root, or takes its logarithm."""
    found = traced.leads_to(tensor, _DIVIDE, ("Sqrt", "Identity", "Cast"), steps=3)
    if found is None or not found.type.endswith("Div"):
        return found
    below = found.inputs[1]
    while below.op.type in ("Sqrt", "Identity", "Cast") and below is not tensor:
        below = below.op.inputs[0]
    return found if below is tensor else None


def long_sums(traced: TracedStep) -> Iterator[Suspect]:
    """A sum in 16 bits is further from that of float32 than its result's rounding explains."""
    for operation in traced.in_16_bits(("Sum", "Mean", "BiasAddGrad"), forward=False):
        yield _long_sum(traced, operation)


def _long_sum(traced: TracedStep, operation: tf.Operation) -> Suspect:
    source, result = operation.inputs[0], operation.outputs[0]
    length, rank = _length(source, result), source.shape.rank
    if length is None or length < 2:
        return None
    wide = widened(source)
    if operation.type == "BiasAddGrad":
        is_first = operation.get_attr("data_format") == b"NCHW" and rank > 2
        axes = [axis for axis in range(rank) if axis != (1 if is_first else rank - 1)]
        reduce, keep = tf.reduce_sum, False
    else:
        axes, keep = operation.inputs[1], operation.get_attr("keep_dims")
        reduce = tf.reduce_mean if operation.type == "Mean" else tf.reduce_sum
    exact, magnitude = (reduce(each, axes, keep) for each in (wide, tf.abs(wide)))
    # `not_finite` reports infinities; the loss scale takes care of those in backward passes.
    smallest = 2.0**-24 if result.dtype == tf.float16 else 0.0
    beyond = tf.maximum(tf.abs(widened(result) - exact) - smallest, 0.0)
    errors = tf.math.divide_no_nan(beyond, magnitude)
    [worst] = yield [tf.reduce_max(tf.where(tf.math.is_finite(errors), errors, 0.0))]
    roundoff = UNIT_ROUNDOFF[result.dtype]
    if worst <= 4 * roundoff:
        return None
    is_loss = result.shape.rank == 0 and not origins.is_of_backward_pass(operation.name)
    return traced.finding(
        operation,
        "a loss in 16 bits" if is_loss else "a long sum in 16 bits",
        f"{operation.type} adds up {length:,} numbers in {result.dtype.name}, and is up to "
        f"{worst:.1%} of the sum of magnitudes away from the float32 sum of them; rounding its "
        f"result explains {roundoff:.1%}.",
        "Cast the terms to float32. (Under a policy of keras_mp, gradients are summed in float32.)",
    )


def _length(source: tf.Tensor, result: tf.Tensor) -> int | None:
    """Returns how many numbers are added up for each result."""
    sizes = source.shape.num_elements(), result.shape.num_elements()
    return None if None in sizes or 0 in sizes else sizes[0] // sizes[1]


def labels_beyond_the_outputs(traced: TracedStep) -> Iterator[Suspect]:
    """The model's outputs are in a dtype that cannot express the labels."""
    if has_own_train_step(traced.model):
        return  # Nobody knows what it compares with the labels, or passes to `call`.
    wanted = [y for y in tf.nest.flatten(traced.batch.y) if y is not None and y.dtype.is_floating]
    if not wanted or not any(
        operation.outputs[0].dtype in LOW_PRECISION for operation, _ in traced.products
    ):
        return
    outputs = traced.model(traced.batch.x, training=False)
    for labels, output in zip(tf.nest.flatten(traced.batch.y), tf.nest.flatten(outputs)):
        if output.dtype not in LOW_PRECISION or not getattr(labels, "dtype", tf.int32).is_floating:
            continue
        if not labels.shape.is_compatible_with(output.shape):
            continue
        yield _labels(widened(labels), output.dtype)


def _labels(labels: tf.Tensor, dtype: tf.DType) -> Suspect:
    rounded = widened(tf.cast(labels, dtype))
    variance = tf.math.reduce_variance(labels)
    # Of a constant there is nothing to lose.
    varies = variance > 1e-10 * tf.reduce_mean(tf.square(labels))
    error = tf.reduce_mean(tf.square(labels - rounded))
    lost, infinite, largest = yield (
        tf.where(varies, tf.math.divide_no_nan(error, variance), 0.0),
        count(tf.math.is_inf(rounded)),
        tf.reduce_max(tf.abs(labels)),
    )
    if not infinite and not lost > MOST_VARIANCE:
        return None
    share = f"{infinite:,} are infinite" if infinite else f"{lost:.1%} of the variance is lost"
    return Finding(
        "outputs in 16 bits",
        "the model's outputs",
        None,
        f"The outputs are {dtype.name}. Of the labels of this batch, up to {largest:.6g}, {share} "
        "in it, so the outputs cannot predict them.",
        'Give the last layer dtype="float32", or scale the labels.',
    )
