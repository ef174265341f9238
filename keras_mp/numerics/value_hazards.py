"""Values that 16 bits cannot hold: epsilons, sums, labels, inputs, probabilities, losses.

And a batch that no dtype holds.
"""

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from keras_mp import kernels
from keras_mp.models.model_steps import has_own_train_step
from keras_mp.numerics import origins
from keras_mp.numerics.records import SMALLEST, UNIT_ROUNDOFF
from keras_mp.numerics.results import CURES, Observed, Said
from keras_mp.numerics.traced_step import (
    MOST_VARIANCE,
    TracedStep,
    before,
    count,
    in_float32,
    not_finite_of,
    share_of_variance,
    static_value,
    widened,
)
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION

_DIVIDE = op_table.ops("divisions", "reciprocals") | {"Log"}
_FEW = 8
EPSILON = "an epsilon that is 0 in 16 bits"
# Operations between probabilities and the logarithm of a cross entropy.
_TO_A_LOGARITHM = op_table.ops(
    *("casts", "identities", "reshapes", "maxima of two", "additions"),
    *("divisions", "divisions without NaN", "moves", "views"),
)

# In nats. A probability that is 5 % off.
_TOO_FAR = 0.05

# As Keras clips probabilities before it takes logarithms.
_SMALLEST = 1e-7


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
    if not zeros or (op == "Maximum" and least < 0):  # A maximum with a true 0 is a ReLU.
        return None
    return Said(
        EPSILON,
        f"The constant of {op}, before {divides}, is 0 in {dtype}, whose smallest number is "
        f"{SMALLEST[dtype]:.1g}. Of {size} values of this batch {zeros:,} are 0 then; the smallest "
        f"is {least:.3g}.",
        f"Use an epsilon that {dtype} holds, such as 1e-4, or compute this in float32.",
    )


def _division(step: TracedStep, tensor: tf.Tensor) -> tf.Operation | None:
    """Returns the operation that divides by a tensor or its root, or takes its logarithm."""
    between = ("Sqrt", "Identity", "Cast")
    found = step.leads_to(tensor, _DIVIDE, between, steps=3)
    if found is None or not found.type.endswith("Div"):
        return found
    return found if before(found.inputs[1], between) is tensor else None


def sums(step: TracedStep) -> Iterator[Observed]:
    """A sum in 16 bits is further from that of float32 than its result's rounding explains."""
    for operation in step.in_16_bits(("Sum", "Mean", "BiasAddGrad"), forward=False):
        source, result = operation.inputs[0], operation.outputs[0]
        sizes = source.shape.num_elements(), result.shape.num_elements()
        if None in sizes or 0 in sizes or sizes[0] < 2 * sizes[1]:
            continue
        exact = in_float32(operation)
        magnitude = in_float32(operation, lambda each: tf.abs(widened(each)))
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


def before_a_logarithm(step: TracedStep) -> Iterator[Observed]:
    """A loss takes the logarithm of probabilities that 16 bits have rounded."""
    for operation, probabilities in _probabilities(step):
        if step.leads_to(probabilities, ("Log", "Log1p"), _TO_A_LOGARITHM, steps=12) is None:
            continue
        wide, logits = widened(probabilities), widened(operation.inputs[0])
        is_true = _true_labels(step, wide)
        if is_true is None:
            continue
        if operation.type == "Softmax":
            exact, of_label = tf.nn.log_softmax(logits), wide
        else:
            exact = tf.where(is_true, tf.math.log_sigmoid(logits), tf.math.log_sigmoid(-logits))
            of_label = tf.where(is_true, wide, 1.0 - wide)
            is_true = tf.ones_like(is_true)
        errors = tf.abs(tf.math.log(tf.clip_by_value(of_label, _SMALLEST, 1.0)) - exact)
        worst = tf.reduce_max(tf.where(is_true, errors, 0.0))
        dtype = probabilities.dtype.name
        yield Observed(operation, kind=operation.type.lower(), dtype=dtype, worst=worst)


def judge_before_a_logarithm(kind: str, dtype: str, worst: float) -> Said | None:
    """The logarithm for a label of the batch is far from that of float32."""
    if worst < _TOO_FAR:
        return None
    return Said(
        f"a {kind} in 16 bits",
        f"The loss takes the logarithm of what a {kind} returns in {dtype}: for a label of this "
        f"batch it is {worst:.3g} away from that of float32.",
        "Return logits and use a loss with from_logits=True, or give the activation "
        'dtype="float32". A loss of keras_mp.losses computes it from the logits by itself.',
    )


def _probabilities(step: TracedStep) -> Iterator[tuple[tf.Operation, tf.Tensor]]:
    """Yields each softmax and sigmoid in 16 bits, and what it returns.

    Where a kernel of keras_mp computes it in float32 inside, that is the cast of the result.
    """
    for operation in step.forward:
        if operation.type not in ("Softmax", "Sigmoid"):
            continue
        output = operation.outputs[0]
        if output.dtype in LOW_PRECISION:
            yield operation, output
        elif kernels.has_decided(operation):
            casts = (each.outputs[0] for each in output.consumers() if each.type == "Cast")
            rounded = next((each for each in casts if each.dtype in LOW_PRECISION), None)
            if rounded is not None:
                yield operation, rounded


def _true_labels(step: TracedStep, probabilities: tf.Tensor) -> tf.Tensor | None:
    """Returns where a probability is that of the true class, by the labels of the batch."""
    shape = probabilities.shape
    for labels in tf.nest.flatten(step.batch.y):
        if labels is None or not (labels.dtype.is_floating or labels.dtype.is_integer):
            continue
        if _are_alike(labels.shape, shape):
            return tf.reshape(widened(labels), tf.shape(probabilities)) > 0.5
        is_column = labels.shape.rank == shape.rank and labels.shape[-1] == 1
        classes = tf.squeeze(labels, -1) if is_column else labels
        if classes.shape.rank == shape.rank - 1 and classes.shape.is_compatible_with(shape[:-1]):
            return tf.one_hot(tf.cast(classes, tf.int32), shape[-1], True, False)
    return None


def _are_alike(labels: tf.TensorShape, probabilities: tf.TensorShape) -> bool:
    """Whether there is a label for each probability, in the same order."""
    if None in (labels.rank, probabilities.rank):
        return False
    if labels.num_elements() != probabilities.num_elements():
        return False
    # Examples and steps of a sequence may be one axis, but not classes; a column may be a vector.
    columns = [shape[:-1] if shape[-1:] == [1] else shape for shape in (labels, probabilities)]
    return columns[0] == columns[1] or labels[-1:] == probabilities[-1:]


def cross_entropies(step: TracedStep) -> Iterator[Observed]:
    """A cross entropy is computed in 16 bits."""
    for operation in step.in_16_bits(op_table.ops("cross entropies")):
        output = operation.outputs[0]
        loss, exact = tf.reduce_mean(widened(output)), tf.reduce_mean(in_float32(operation))
        yield Observed(operation, dtype=output.dtype.name, loss=loss, exact=exact)


def judge_cross_entropy(dtype: str, loss: float, exact: float) -> Said | None:
    """Its mean is further from that of float32 than rounding explains."""
    if abs(loss - exact) <= 4 * UNIT_ROUNDOFF[dtype] * abs(exact):
        return None
    return Said(
        "a loss in 16 bits",
        f"The cross entropy is computed in {dtype}, where its mean is {loss:.6g}; in float32 it is "
        f"{exact:.6g}.",
        "Cast the inputs of the loss to float32, or use a loss of keras_mp.losses.",
    )
