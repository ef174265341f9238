"""Values that 16 bits cannot hold: overflow, masks, epsilons, sums, labels."""

import itertools
from collections.abc import Hashable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from keras_mp.numerics import origins
from keras_mp.numerics.hazards.traced_step import (
    UNIT_ROUNDOFF,
    Hazard,
    Suspect,
    TracedStep,
    count,
    health,
    static_value,
    widened,
)
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION

_DIVIDE = op_table.ops("divisions", "reciprocals") | {"Log"}
_MOST_VARIANCE = 0.01


def not_finite(traced: TracedStep) -> Iterator[Suspect]:
    """The loss is infinite or NaN; names the first such operation of the forward pass.

    A pooling with the maximum drops NaN, and so the loss may be finite. The gradients are not.
    """
    operations = [o for o in traced.forward if o.outputs and o.outputs[0].dtype.is_floating]
    outputs = [operation.outputs[0] for operation in operations]
    if not any(output.dtype in LOW_PRECISION for output in outputs):
        return
    results = [t for t in tf.nest.flatten(traced.result) if tf.is_tensor(t) and t.dtype.is_floating]
    results += [traced.scaling.inputs[0]] if traced.scaling is not None else []
    if not results:
        return
    gradients = [health(gradient) for gradient in traced.backward_products]
    measured = [
        tf.stack([health(result) for result in results]),
        tf.stack([health(output) for output in outputs]),
        tf.reduce_sum(gradients, 0) if gradients else tf.zeros([5], tf.float64),
    ]

    # Operations after the backward pass use gradients, which overflow as is planned.
    before = set(
        itertools.takewhile(lambda o: not origins.is_of_backward_pass(o.name), traced.operations)
    )
    is_before = np.array([operation in before for operation in operations])

    def say(bad: np.ndarray, counts: np.ndarray, of_gradients: np.ndarray) -> Hazard | None:
        is_lost = bad[:, 2:].any()
        if not is_lost and not (counts[is_before, 4].any() and of_gradients[2:].any()):
            return None
        pairs = zip(counts[:, 2] + counts[:, 3], counts[:, 4])
        by_output = {output.ref(): pair for output, pair in zip(outputs, pairs)}
        found = _first(operations, by_output)
        if found and found[0] in traced.explained:
            return None
        so = "so is the loss" if is_lost else "so are gradients, though the loss is not"
        return found and _say_not_finite(traced, *found, so)

    yield Suspect(measured, say)


def _first(
    operations: list[tf.Operation], counts: Mapping[Hashable, tuple[int, int]]
) -> tuple[tf.Operation, tf.Operation, tf.Operation, int, str] | None:
    """Finds the first operation that returns NaN, and its cause.

    Returns:
        None, or the operation where it began; the first one that computes with it; the one whose
        results are NaN, or the second again if none are; how many are; and "NaN" or "infinite".
    """

    def of(tensor: tf.Tensor) -> tuple[int, int]:
        return counts.get(tensor.ref(), (0, 0))

    # By operation, where an infinity began, and what computed with it first, if it is a constant.
    infinite: dict[tf.Operation, tuple[tf.Operation, tf.Operation]] = {}
    first = None
    for operation in operations:
        i, n = of(operation.outputs[0])
        if not i and not n:
            continue
        begun = next((infinite[t.op] for t in operation.inputs if t.op in infinite), None)
        origin, user = begun or (operation, operation)
        if static_value(user.outputs[0]) is not None:
            user = operation
        if i:
            infinite[operation] = origin, user
            if first is None and static_value(operation.outputs[0]) is None:
                first = origin, user, user, i, "infinite"
        if n and not any(of(tensor)[1] for tensor in operation.inputs):
            return origin, user, operation, n, "NaN"
    return first


def _say_not_finite(
    traced: TracedStep,
    origin: tf.Operation,
    user: tf.Operation,
    ended: tf.Operation,
    number: int,
    in_words: str,
    so: str,
) -> Hazard | None:
    dtype = origin.outputs[0].dtype
    if dtype not in LOW_PRECISION and not any(
        tensor.dtype in LOW_PRECISION for tensor in origin.inputs
    ):
        return None  # It would be so in float32, too.
    constant = static_value(origin.outputs[0])
    if constant is not None:
        place = f" in {traced.where(ended)}" if traced.where(ended) != traced.where(user) else ""
        return traced.finding(
            user,
            "a constant that is infinite in 16 bits",
            f"A constant, such as the -1e9 of a mask, is {np.ravel(constant)[0]} in {dtype.name}, "
            f"and with it {int(number):,} results of {ended.type}{place} are {in_words}; {so}.",
            f"Use a number that the dtype holds, which ends at {dtype.max:.5g}; for a mask, its "
            f"lowest one, {dtype.min:.5g}, or tf.where on the result.",
        )
    largest = f", which ends at {dtype.max:,.0f}" if dtype == tf.float16 else ""
    return traced.finding(
        origin,
        "an overflow in the forward pass",
        f"{origin.type} in {dtype.name}{largest} is the first operation whose results are not "
        f"finite though what it takes is: {int(number):,} results of {ended.type} are {in_words}; "
        f"{so}.",
        "Compute it in float32, scale its inputs down, or use mixed_bfloat16.",
    )


def vanished_epsilon(traced: TracedStep) -> Iterator[Suspect]:
    """A constant that is to keep a division from failing is 0 in 16 bits."""
    for operation in traced.in_16_bits(("Add", "AddV2", "Maximum")):
        for constant, other in (operation.inputs, tuple(operation.inputs)[::-1]):
            value = static_value(constant)
            if value is None or np.any(value):
                continue
            divides = _division(traced, operation.outputs[0])
            if divides is None:
                continue
            measured = [count(tf.equal(operation.outputs[0], 0)), tf.reduce_min(widened(other))]

            def say(
                zeros: np.ndarray,
                least: np.ndarray,
                operation: tf.Operation = operation,
                divides: tf.Operation = divides,
            ) -> Hazard:
                traced.explained.add(divides)
                dtype, n = operation.outputs[0].dtype, operation.outputs[0].shape.num_elements()
                smallest = "6e-8" if dtype == tf.float16 else "9e-41"
                return traced.finding(
                    operation,
                    "an epsilon that is 0 in 16 bits",
                    f"The constant of {operation.type}, before {divides.type}, is 0 in "
                    f"{dtype.name}, whose smallest number is {smallest}. Of "
                    f"{n or 'the'} values of this batch {zeros:,} are 0 then; the smallest is "
                    f"{least:.3g}.",
                    f"Use an epsilon that {dtype.name} holds, such as 1e-4, or compute this in "
                    "float32.",
                )

            yield Suspect(measured, say)


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
        source, result = operation.inputs[0], operation.outputs[0]
        length = _length(source, result)
        if length is None or length < 2:
            continue
        wide = widened(source)
        if operation.type == "BiasAddGrad":
            is_first = operation.get_attr("data_format") == b"NCHW" and source.shape.rank > 2
            kept = 1 if is_first else source.shape.rank - 1
            axes = [axis for axis in range(source.shape.rank) if axis != kept]
            reduce, keep = tf.reduce_sum, False
        else:
            axes, keep = operation.inputs[1], operation.get_attr("keep_dims")
            reduce = tf.reduce_mean if operation.type == "Mean" else tf.reduce_sum
        exact, magnitude = (reduce(each, axes, keep) for each in (wide, tf.abs(wide)))
        # `not_finite` reports infinities; the loss scale takes care of those in backward passes.
        smallest = 2.0**-24 if result.dtype == tf.float16 else 0.0
        beyond = tf.maximum(tf.abs(widened(result) - exact) - smallest, 0.0)
        errors = tf.math.divide_no_nan(beyond, magnitude)
        worst = tf.reduce_max(tf.where(tf.math.is_finite(errors), errors, 0.0))

        def say(
            worst: np.ndarray, operation: tf.Operation = operation, length: int = length
        ) -> Hazard | None:
            output = operation.outputs[0]
            roundoff = UNIT_ROUNDOFF[output.dtype]
            if worst <= 4 * roundoff:
                return None
            is_loss = output.shape.rank == 0 and not origins.is_of_backward_pass(operation.name)
            return traced.finding(
                operation,
                "a loss in 16 bits" if is_loss else "a long sum in 16 bits",
                f"{operation.type} adds up {length:,} numbers in {output.dtype.name}, and is up to "
                f"{worst:.1%} of the sum of magnitudes away from the float32 sum of them; rounding "
                f"its result explains {roundoff:.1%}.",
                "Cast what is added up to float32. (Under a policy of keras_mp, gradients are "
                "summed in float32; keras_mp.enable_float32_sums() does so for all code.)",
            )

        yield Suspect([worst], say)


def _length(source: tf.Tensor, result: tf.Tensor) -> int | None:
    """Returns how many numbers are added up for each result."""
    sizes = source.shape.num_elements(), result.shape.num_elements()
    return None if None in sizes or 0 in sizes else sizes[0] // sizes[1]


def labels_beyond_the_outputs(traced: TracedStep) -> Iterator[Suspect]:
    """The model's outputs are in a dtype that cannot express the labels."""
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
        labels = widened(labels)
        rounded = widened(tf.cast(labels, output.dtype))
        lost = tf.reduce_mean(tf.square(labels - rounded)) / tf.math.reduce_variance(labels)
        measured = [lost, count(tf.math.is_inf(rounded)), tf.reduce_max(tf.abs(labels))]

        def say(
            lost: np.ndarray,
            infinite: np.ndarray,
            largest: np.ndarray,
            dtype: tf.DType = output.dtype,
        ) -> Hazard | None:
            if not infinite and not lost > _MOST_VARIANCE:
                return None
            is_lost = f"{lost:.1%} of the variance is lost"
            share = f"{infinite:,} are infinite" if infinite else is_lost
            return Hazard(
                "outputs in 16 bits",
                "the model's outputs",
                None,
                f"The outputs are {dtype.name}. Of the labels of this batch, up to {largest:.6g}, "
                f"{share} in it: what is to be predicted cannot be expressed.",
                'Give the last layer dtype="float32", or scale the labels.',
            )

        yield Suspect(measured, say)
