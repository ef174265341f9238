"""Values that 16 bits cannot hold: epsilons, sums, labels, inputs, rates, what is written.

And a batch that no dtype holds.
"""

import math
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from keras_mp.models.model_steps import has_own_train_step
from keras_mp.numerics import origins
from keras_mp.numerics.causes import CURES, Observed, Said
from keras_mp.numerics.distances import SMALLEST, UNIT_ROUNDOFF
from keras_mp.numerics.hazards.traced_step import (
    MOST_VARIANCE,
    TracedStep,
    before,
    count,
    not_finite_of,
    share_of_variance,
    static_number,
    static_value,
    widened,
)
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION

_DIVIDE = op_table.ops("divisions", "reciprocals") | {"Log"}
_FEW = 8
# From random numbers between 0 and 1 to those that a program asks for.
_FROM_RANDOM = op_table.ops("additions", "multiplications")
# By which share what a dropout keeps may be wrong.
_MOST_OFF = 0.05
_SAME = ("Identity", "Cast", "Reshape", "ExpandDims", "Squeeze")


def batches(step: TracedStep) -> Iterator[Observed]:
    """The batch has NaN or infinite numbers."""
    for name, part in step.batch._asdict().items():
        flat = (each for each in tf.nest.flatten(part, expand_composites=True) if each is not None)
        floating = [each for each in flat if each.dtype.is_floating]
        if floating:
            yield Observed(f"the batch's {name}", bad=not_finite_of(floating))


def judge_batch(bad: int) -> Said | None:
    """What is computed from them is not finite either."""
    if not bad:
        return None
    return Said(
        "a batch that is not finite",
        f"{bad:,} of its numbers are NaN or infinite. So are results computed from them, in "
        "float32, too.",
        CURES["a batch"],
    )


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
) -> Said | None:
    """A constant that is 0 does harm where what it is added to is 0 as well."""
    if not zeros:
        return None
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


def inputs(step: TracedStep) -> Iterator[Observed]:
    """Numbers of the batch are rounded to 16 bits, and what tells them apart is lost."""
    for operation in step.forward:
        if operation.type != "Cast" or operation.outputs[0].dtype not in LOW_PRECISION:
            continue
        source, rounded = operation.inputs[0], operation.outputs[0]
        size, rank = source.shape.num_elements(), source.shape.rank
        given = before(source, ("Identity", "ExpandDims", "Cast"), until=LOW_PRECISION)
        if given.op.type != "Placeholder" or not size or rank < 2:
            continue
        takers = [taker for taker in rounded.consumers() if taker in step.forward]
        # A few numbers may be close to one another by chance.
        if not takers or size < _FEW * (source.shape[-1] or 1):
            continue
        wide, near = widened(source), widened(rounded)
        whole = step.leads_to(rounded, ("Cast",), ("Identity",), steps=2)
        is_of_ids = whole is not None and whole.outputs[0].dtype.is_integer
        ids = whole.outputs[0].dtype if whole is not None and is_of_ids else tf.int64
        are_others = (tf.cast(wide, ids) != tf.cast(near, ids)) & tf.math.is_finite(near)
        yield Observed(
            operation,
            dtype=rounded.dtype.name,
            is_of_ids=is_of_ids,
            lost=tf.reduce_max(share_of_variance(wide, near, list(range(rank - 1)))),
            infinite=count(tf.math.is_inf(near)),
            others=count(are_others),
            largest=tf.reduce_max(tf.abs(wide)),
        )


def judge_input(
    dtype: str, is_of_ids: bool, lost: float, infinite: int, others: int, largest: float
) -> Said | None:
    """Ids become others, or a column loses what tells its rows apart."""
    if infinite:
        return None  # `not_finite` reports them.
    if is_of_ids and others:
        what = f"{others:,} become other integers"
    elif not is_of_ids and lost > MOST_VARIANCE:
        what = f"up to {lost:.1%} of the variance of a column is lost"
    else:
        return None
    return Said(
        "inputs that are rounded",
        f"Of this batch, whose numbers go up to {largest:.6g}, {what} when they are rounded to "
        f"{dtype}.",
        "Standardize them before the model, start it with a layer that reads raw numbers "
        '(Normalization, Rescaling, Embedding), or give this layer dtype="float32".',
    )


def dropouts(step: TracedStep) -> Iterator[Observed]:
    """A dropout compares random numbers in 16 bits with its rate."""
    for operation in step.in_16_bits(("SelectV2",)):
        compared, scaled, _ = (each.op for each in operation.inputs)
        if compared.type != "GreaterEqual" or scaled.type != "Mul":
            continue
        numbers, dtype = compared.inputs[0], compared.inputs[0].dtype
        is_random = "RandomUniform" in before(numbers, _FROM_RANDOM).op.type
        constants = compared.inputs[1], scaled.inputs[1], operation.inputs[2]
        rounded, factor, dropped = map(static_number, constants)
        if not is_random or dtype not in LOW_PRECISION or rounded is None or not factor or dropped:
            continue
        # The factor keeps the mean. Both are rounded; a layer has the rate that was asked for.
        rates = getattr(step.layers.layer(operation.name), "rate", None), 1 - 1 / factor
        near = 2 * UNIT_ROUNDOFF[dtype.name]
        rates = [each for each in rates if isinstance(each, float) and abs(each - rounded) <= near]
        if rates:
            yield Observed(
                operation,
                dtype=dtype.name,
                rate=rates[0],
                rounded=rounded,
                kept=count(compared.outputs[0]),
                size=tf.size(numbers),
            )


def judge_dropout(dtype: str, rate: float, rounded: float, kept: int, size: int) -> Said | None:
    """There are few random numbers in 16 bits, and the rate is rounded as well."""
    spacing = 2 * UNIT_ROUNDOFF[dtype]
    share = 1 - math.ceil(rounded / spacing) * spacing
    if share and abs(share - (1 - rate)) <= _MOST_OFF * (1 - rate):
        return None
    return Said(
        "a dropout rate that 16 bits do not hold",
        f"Its rate, {rate:.6g}, is compared with random numbers in {dtype}, which are multiples "
        f"of {spacing:.2g}: {share:.2%} of all numbers are kept, and {1 - rate:.2%} should be. Of "
        f"this batch {kept:,} of {size:,} are.",
        'Give this layer dtype="float32".',
    )


def written_weights(step: TracedStep) -> Iterator[Observed]:
    """A layer assigns to a float32 weight what it computed from 16 bits."""
    for operation in step.forward:
        if operation.type != "AssignVariableOp" or operation.inputs[0].ref() not in step.trained:
            continue
        value = operation.inputs[1]
        source = before(value, _SAME, until=LOW_PRECISION)
        if value.dtype == tf.float32 and source.dtype in LOW_PRECISION:
            largest = tf.reduce_max(tf.abs(value))
            yield Observed(operation, dtype=source.dtype.name, largest=largest)


def judge_written_weight(dtype: str, largest: float) -> Said:
    """Small updates of the weight are lost in each step."""
    return Said(
        "a weight that is written in 16 bits",
        f"What is assigned to a float32 weight, numbers up to {largest:.3g}, was computed in "
        f"{dtype}: updates of less than {UNIT_ROUNDOFF[dtype]:.2%} of a number are lost in each "
        "step.",
        'Compute what is assigned in float32: give this layer dtype="float32", or read the weight '
        "in keras_mp.autocast_scope(None).",
    )
