"""Values that 16 bits cannot hold: epsilons, sums, labels."""

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from keras_mp.models.model_steps import has_own_train_step
from keras_mp.numerics.distances import SMALLEST, UNIT_ROUNDOFF
from keras_mp.numerics.graphs import origins
from keras_mp.numerics.hazards.traced_step import (
    MOST_VARIANCE,
    Observed,
    Said,
    TracedStep,
    count,
    share_of_variance,
    static_value,
    widened,
)
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION

_DIVIDE = op_table.ops("divisions", "reciprocals") | {"Log"}


def epsilons(step: TracedStep) -> Iterator[Observed]:
    """A constant that is to keep a division from failing is 0 in 16 bits."""
    for operation in step.in_16_bits(("Add", "AddV2", "Maximum")):
        for constant, other in (operation.inputs, tuple(operation.inputs)[::-1]):
            value, output = static_value(constant), operation.outputs[0]
            if value is None or np.any(value) or (divides := _division(step, output)) is None:
                continue
            step.explained.add(divides)
            yield Observed(
                operation,
                op=operation.type,
                divides=divides.type,
                dtype=output.dtype.name,
                size=output.shape.num_elements() or "the",
                zeros=count(tf.equal(output, 0)),
                least=tf.reduce_min(widened(other)),
            )


def judge_epsilon(
    op: str, divides: str, dtype: str, size: int | str, zeros: int, least: float
) -> Said:
    """The division is in danger on any batch: what this one shows is said."""
    return Said(
        "an epsilon that is 0 in 16 bits",
        f"The constant of {op}, before {divides}, is 0 in {dtype}, whose smallest number is "
        f"{SMALLEST[dtype]:.1g}. Of {size} values of this batch {zeros:,} are 0 then; the smallest "
        f"is {least:.3g}.",
        f"Use an epsilon that {dtype} holds, such as 1e-4, or compute this in float32.",
    )


def _division(step: TracedStep, tensor: tf.Tensor) -> tf.Operation | None:
    """Returns the operation that divides by a tensor or its root, or takes its logarithm."""
    found = step.leads_to(tensor, _DIVIDE, ("Sqrt", "Identity", "Cast"), steps=3)
    if found is None or not found.type.endswith("Div"):
        return found
    below = found.inputs[1]
    while below.op.type in ("Sqrt", "Identity", "Cast") and below is not tensor:
        below = below.op.inputs[0]
    return found if below is tensor else None


def sums(step: TracedStep) -> Iterator[Observed]:
    """A sum in 16 bits is further from that of float32 than its result's rounding explains."""
    for operation in step.in_16_bits(("Sum", "Mean", "BiasAddGrad"), forward=False):
        source, result = operation.inputs[0], operation.outputs[0]
        sizes, rank = (source.shape.num_elements(), result.shape.num_elements()), source.shape.rank
        if None in sizes or 0 in sizes or sizes[0] < 2 * sizes[1]:
            continue
        if operation.type == "BiasAddGrad":
            is_first = operation.get_attr("data_format") == b"NCHW" and rank > 2
            axes = [axis for axis in range(rank) if axis != (1 if is_first else rank - 1)]
            keep = False
        else:
            axes, keep = operation.inputs[1], operation.get_attr("keep_dims")
        reduce = tf.reduce_mean if operation.type == "Mean" else tf.reduce_sum
        wide = widened(source)
        exact, magnitude = (reduce(each, axes, keep) for each in (wide, tf.abs(wide)))
        # `not_finite` reports infinities; the loss scale takes care of those in backward passes.
        smallest = 2.0**-24 if result.dtype == tf.float16 else 0.0
        beyond = tf.maximum(tf.abs(widened(result) - exact) - smallest, 0.0)
        errors = tf.math.divide_no_nan(beyond, magnitude)
        is_backward = origins.is_of_backward_pass(operation.name)
        yield Observed(
            operation,
            op=operation.type,
            dtype=result.dtype.name,
            length=sizes[0] // sizes[1],
            is_loss=result.shape.rank == 0 and not is_backward,
            error=tf.reduce_max(tf.where(tf.math.is_finite(errors), errors, 0.0)),
        )


def judge_sum(op: str, dtype: str, length: int, is_loss: bool, error: float) -> Said | None:
    """Rounding the result explains a few roundings of the sum of magnitudes."""
    roundoff = UNIT_ROUNDOFF[dtype]
    if error <= 4 * roundoff:
        return None
    return Said(
        "a loss in 16 bits" if is_loss else "a long sum in 16 bits",
        f"{op} adds up {length:,} numbers in {dtype}, and is up to {error:.1%} of the sum of "
        f"magnitudes away from the float32 sum of them; rounding its result explains "
        f"{roundoff:.1%}.",
        "Cast the terms to float32. (Under a policy of keras_mp, gradients are summed in float32.)",
    )


def labels(step: TracedStep) -> Iterator[Observed]:
    """The model's outputs are in a dtype that cannot express the labels."""
    if has_own_train_step(step.model):
        return  # Nobody knows what it compares with the labels, or passes to `call`.
    wanted = [y for y in tf.nest.flatten(step.batch.y) if y is not None and y.dtype.is_floating]
    if not wanted or not any(o.outputs[0].dtype in LOW_PRECISION for o, _ in step.products):
        return
    outputs = step.model(step.batch.x, training=False)
    for each, output in zip(tf.nest.flatten(step.batch.y), tf.nest.flatten(outputs)):
        is_floating = getattr(each, "dtype", tf.int32).is_floating
        if output.dtype not in LOW_PRECISION or not is_floating:
            continue
        if each.shape.is_compatible_with(output.shape):
            wide = widened(each)
            near = widened(tf.cast(wide, output.dtype))
            yield Observed(
                "the model's outputs",
                dtype=output.dtype.name,
                lost=share_of_variance(wide, near),
                infinite=count(tf.math.is_inf(near)),
                largest=tf.reduce_max(tf.abs(wide)),
            )


def judge_labels(dtype: str, lost: float, infinite: int, largest: float) -> Said | None:
    """What rounding loses of the labels, outputs cannot predict."""
    if not infinite and not lost > MOST_VARIANCE:
        return None
    share = f"{infinite:,} are infinite" if infinite else f"{lost:.1%} of the variance is lost"
    return Said(
        "outputs in 16 bits",
        f"The outputs are {dtype}. Of the labels of this batch, up to {largest:.6g}, {share} in "
        "it, so the outputs cannot predict them.",
        'Give the last layer dtype="float32", or scale the labels.',
    )
