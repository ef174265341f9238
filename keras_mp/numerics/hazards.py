"""Known hazards of 16 bits: each a function that goes through a traced step.

First what 16 bits cannot hold: epsilons, sums, labels, inputs, probabilities, losses; and a batch
that no dtype holds. Then what is wrong with the step itself: the loss, gradients and weights. Each
yields what is `Observed`: a suspicious place, the tensors that tell whether it does harm, and what
is said of it then.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from keras_mp.models.model_steps import has_own_train_step
from keras_mp.numerics import origins
from keras_mp.numerics.records import SMALLEST, UNIT_ROUNDOFF
from keras_mp.numerics.results import CURES, Observed
from keras_mp.numerics.traced_step import (
    TracedStep,
    before,
    in_float32,
    not_finite_of,
    static_value,
)
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION, LOW_PRECISION_NAMES
from keras_mp.support.kept_casts import as_float32

_DIVIDE = op_table.ops("divisions", "reciprocals") | {"Log"}
_FEW = 8
EPSILON = "an epsilon that is 0 in 16 bits"
# Operations between probabilities and the logarithm of a cross entropy.
_TO_A_LOGARITHM = op_table.ops(
    *("casts", "identities", "reshapes", "maxima of two", "additions"),
    *("divisions", "divisions without NaN", "moves", "views"),
)

# Numbers of a batch are lost if rounding them to 16 bits takes a larger share of their variance.
_MOST_VARIANCE = 0.01

# In nats. A probability that is 5 % off.
_TOO_FAR = 0.05

# As Keras clips probabilities before it takes logarithms.
_SMALLEST = 1e-7

# Operations between a product in a loss function and the loss that is scaled.
_ON_THE_WAY = op_table.ops(
    *("casts", "identities", "reshapes", "additions", "sums of tensors", "sums over axes")
)
_BELOW_ONE = op_table.ops("divisions", "divisions without NaN")
# Programs that scale a loss by hand use a power of two that is at least as large.
_LIKE_A_LOSS_SCALE = 64
# Of float16. Smaller numbers have fewer digits, which some gradients may have.
_SMALLEST_NORMAL = 2.0**-14
_MOST_SMALL = 0.1

# TensorFlow's functions that clip gradients.
_CLIPPING = ("clip_by_value", "clip_by_norm", "clip_by_average_norm", "clip_by_global_norm")


def batches(step: TracedStep) -> Iterator[Observed]:
    """The batch has NaN or infinite numbers."""
    for name, part in step.batch._asdict().items():
        flat = (each for each in tf.nest.flatten(part, expand_composites=True) if each is not None)
        floating = [each for each in flat if each.dtype.is_floating]
        if floating:
            bad = not_finite_of(floating)
            yield Observed(
                f"the batch's {name}",
                "a batch that is not finite",
                "{bad:,} of its numbers are NaN or infinite. So are results computed from them, in "
                "float32, too.",
                CURES["a batch"],
                matters=bad > 0,
                bad=bad,
            )


def epsilons(step: TracedStep) -> Iterator[Observed]:
    """A constant that is to keep a division from failing is 0 in 16 bits, and so is a value."""
    for operation in step.forward:
        if operation.type not in ("Add", "AddV2", "Maximum"):
            continue
        for constant, other in (operation.inputs, tuple(operation.inputs)[::-1]):
            value, output = static_value(constant), operation.outputs[0]
            # Where keras_mp adds in float32, the constant that the program has made is cast.
            made = constant, before(constant, ("Cast", "Identity"))
            dtype = next((each.dtype.name for each in made if each.dtype in LOW_PRECISION), None)
            if value is None or np.any(value) or dtype is None:
                continue
            if (divides := _division(step, output)) is None:
                continue
            size = output.shape.num_elements() or "the"
            zeros = tf.math.count_nonzero(tf.equal(output, 0))
            least = tf.reduce_min(as_float32(other))
            # A maximum with a true 0 is a ReLU.
            is_relu = least < 0 if operation.type == "Maximum" else False
            yield Observed(
                operation,
                EPSILON,
                f"The constant of {operation.type}, before {divides.type}, is 0 in {dtype}, whose "
                f"smallest number is {SMALLEST[dtype]:.1g}. Of {size} values of this batch "
                "{zeros:,} are 0 then; the smallest is {least:.3g}.",
                f"Use an epsilon that {dtype} holds, such as 1e-4, or compute this in float32.",
                matters=(zeros > 0) & tf.logical_not(is_relu),
                zeros=zeros,
                least=least,
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
        magnitude = in_float32(operation, lambda each: tf.abs(as_float32(each)))
        # `not_finite` reports infinities; the loss scale takes care of those in backward passes.
        smallest = 2.0**-24 if result.dtype == tf.float16 else 0.0
        beyond = tf.maximum(tf.abs(as_float32(result) - exact) - smallest, 0.0)
        errors = tf.math.divide_no_nan(beyond, magnitude)
        is_loss = result.shape.rank == 0 and not origins.is_of_backward_pass(operation.name)
        dtype, error = result.dtype.name, tf.where(tf.math.is_finite(errors), errors, 0.0)
        # It explains a few roundings of the sum of magnitudes.
        roundoff, worst = UNIT_ROUNDOFF[dtype], tf.reduce_max(error)
        yield Observed(
            operation,
            "a loss in 16 bits" if is_loss else "a long sum in 16 bits",
            f"{operation.type} adds up {sizes[0] // sizes[1]:,} numbers in {dtype}, and is up to "
            "{worst:.1%} of the sum of magnitudes away from the float32 sum of them; rounding its "
            f"result explains {roundoff:.1%}.",
            "Cast the terms to float32. (Under a policy of keras_mp, gradients are summed in "
            "float32.)",
            matters=worst > 4 * roundoff,
            worst=worst,
        )


def labels(step: TracedStep) -> Iterator[Observed]:
    """The model's outputs are in a dtype that cannot express the labels."""
    if has_own_train_step(step.model):
        return  # Nobody knows what it compares with the labels, or passes to `call`.
    wanted = [y for y in tf.nest.flatten(step.batch.y) if y is not None and y.dtype.is_floating]
    if not wanted:
        return
    outputs = step.model(step.batch.x, training=False)
    for each, output in zip(tf.nest.flatten(step.batch.y), tf.nest.flatten(outputs)):
        is_floating = getattr(each, "dtype", tf.int32).is_floating
        if output.dtype not in LOW_PRECISION or not is_floating:
            continue
        if not each.shape.is_compatible_with(output.shape):
            continue
        wide = as_float32(each)
        near = as_float32(tf.cast(wide, output.dtype))
        lost = _share_of_variance(wide, near)
        infinite = tf.math.count_nonzero(tf.math.is_inf(near))
        for matters, what in (
            (infinite > 0, "{infinite:,} are infinite"),
            ((infinite == 0) & (lost > _MOST_VARIANCE), "{lost:.1%} of the variance is lost"),
        ):
            yield Observed(
                "the model's outputs",
                "outputs in 16 bits",
                f"The outputs are {output.dtype.name}. Of the labels of this batch, up to "
                f"{{largest:.6g}}, {what} in it, so the outputs cannot predict them.",
                'Give the last layer dtype="float32", or scale the labels.',
                matters=matters,
                lost=lost,
                infinite=infinite,
                largest=tf.reduce_max(tf.abs(wide)),
            )


def inputs(step: TracedStep) -> Iterator[Observed]:
    """Numbers of the batch are rounded to 16 bits, and what tells them apart is lost."""
    for operation in step.forward:
        if operation.type != "Cast" or operation.outputs[0].dtype not in LOW_PRECISION:
            continue
        source, rounded = operation.inputs[0], operation.outputs[0]
        size, rank = source.shape.num_elements(), source.shape.rank
        given = before(source, ("Identity", "ExpandDims", "Cast"))
        if given.op.type != "Placeholder" or not size or rank < 2:
            continue
        takers = [taker for taker in rounded.consumers() if taker in step.forward]
        # A few numbers may be close to one another by chance.
        if not takers or size < _FEW * (source.shape[-1] or 1):
            continue
        wide, near = as_float32(source), as_float32(rounded)
        whole = step.leads_to(rounded, ("Cast",), ("Identity",), steps=2)
        if whole is not None and (ids := whole.outputs[0].dtype).is_integer:
            what, most = "{lost:,} become other integers", 0
            lost = tf.math.count_nonzero(tf.cast(wide, ids) != tf.cast(near, ids))
        else:
            what, most = "up to {lost:.1%} of the variance of a column is lost", _MOST_VARIANCE
            lost = tf.reduce_max(_share_of_variance(wide, near, list(range(rank - 1))))
        yield Observed(
            operation,
            "inputs that are rounded",
            f"Of this batch, whose numbers go up to {{largest:.6g}}, {what} when they are rounded "
            f"to {rounded.dtype.name}.",
            "Standardize them before the model, start it with a layer that reads raw numbers "
            '(Normalization, Rescaling, Embedding), or give this layer dtype="float32".',
            # `not_finite` reports others.
            matters=(lost > most) & tf.reduce_all(tf.math.is_finite(near)),
            lost=lost,
            largest=tf.reduce_max(tf.abs(wide)),
        )


def _share_of_variance(
    values: tf.Tensor, rounded: tf.Tensor, axes: Sequence[int] | None = None
) -> tf.Tensor:
    """Returns which share of the variance of values rounding takes; 0 for constants.

    Args:
        values: float32 tensor.
        rounded: the same, rounded.
        axes: over which it is computed. Defaults to all.
    """
    error = tf.reduce_mean(tf.square(values - rounded), axes)
    variance = tf.math.reduce_variance(values, axes)
    # A constant tells nothing apart.
    varies = variance > 1e-10 * tf.reduce_mean(tf.square(values), axes)
    return tf.where(varies, tf.math.divide_no_nan(error, variance), 0.0)


def before_a_logarithm(step: TracedStep) -> Iterator[Observed]:
    """A loss takes the logarithm of probabilities that 16 bits have rounded."""
    for operation in step.in_16_bits(("Softmax", "Sigmoid")):
        probabilities = operation.outputs[0]
        if step.leads_to(probabilities, ("Log", "Log1p"), _TO_A_LOGARITHM, steps=12) is None:
            continue
        wide, logits = as_float32(probabilities), as_float32(operation.inputs[0])
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
        kind = operation.type.lower()
        yield Observed(
            operation,
            f"a {kind} in 16 bits",
            f"The loss takes the logarithm of what a {kind} returns in {probabilities.dtype.name}: "
            "for a label of this batch it is {worst:.3g} away from that of float32.",
            "Return logits and use a loss with from_logits=True, or give the activation "
            'dtype="float32". A loss of keras_mp.losses computes it from the logits by itself.',
            matters=worst >= _TOO_FAR,
            worst=worst,
        )


def _true_labels(step: TracedStep, probabilities: tf.Tensor) -> tf.Tensor | None:
    """Returns where a probability is that of the true class, by the labels of the batch."""
    shape = probabilities.shape
    for labels in tf.nest.flatten(step.batch.y):
        if labels is None or not (labels.dtype.is_floating or labels.dtype.is_integer):
            continue
        # A column may be a vector.
        columns = [each[:-1] if each[-1:] == [1] else each for each in (labels.shape, shape)]
        if columns[0] == columns[1]:
            return tf.reshape(as_float32(labels), tf.shape(probabilities)) > 0.5
        is_column = labels.shape.rank == shape.rank and labels.shape[-1] == 1
        classes = tf.squeeze(labels, -1) if is_column else labels
        if classes.shape.rank == shape.rank - 1 and classes.shape.is_compatible_with(shape[:-1]):
            return tf.one_hot(tf.cast(classes, tf.int32), shape[-1], True, False)
    return None


def cross_entropies(step: TracedStep) -> Iterator[Observed]:
    """The mean of a cross entropy in 16 bits is further off than rounding explains."""
    for operation in step.in_16_bits(op_table.ops("cross entropies")):
        dtype = operation.outputs[0].dtype.name
        loss = tf.reduce_mean(as_float32(operation.outputs[0]))
        exact = tf.reduce_mean(in_float32(operation))
        yield Observed(
            operation,
            "a loss in 16 bits",
            f"The cross entropy is computed in {dtype}, where its mean is {{loss:.6g}}; in float32 "
            "it is {exact:.6g}.",
            "Cast the inputs of the loss to float32, or use a loss of keras_mp.losses.",
            matters=tf.abs(loss - exact) > 4 * UNIT_ROUNDOFF[dtype] * tf.abs(exact),
            loss=loss,
            exact=exact,
        )


def small_gradients(step: TracedStep) -> Iterator[Observed]:
    """Gradients in float16 are too small for it, and nothing scales the loss."""
    if step.scaling is not None or step.optimizer is None:
        return
    products = step.backward_products
    # Where a kernel of float16 is slow, keras_mp computes in float32 and rounds.
    rounded = [
        user.outputs[0] for each in products for user in each.consumers() if user.type == "Cast"
    ]
    gradients = [each for each in (*products, *rounded) if each.dtype == tf.float16]
    if not gradients:
        return
    sizes = [tf.abs(as_float32(gradient)) for gradient in gradients]
    # What vanishes in a cast of the backward pass is 0 in all gradients behind it.
    gone = [
        tf.math.count_nonzero((each.outputs[0] == 0) & (each.inputs[0] != 0))
        for each in step.operations
        if each.type == "Cast" and origins.is_of_backward_pass(each.name)
        if each.outputs[0].dtype == tf.float16 and each.inputs[0].dtype == tf.float32
    ]
    small = [tf.math.count_nonzero((size > 0) & (size < _SMALLEST_NORMAL)) for size in sizes]
    others = [tf.math.count_nonzero(size > 0) for size in sizes]
    some, of_all = (tf.cast(tf.add_n(each + gone), tf.float64) for each in (small, others))
    share = tf.math.divide_no_nan(some, of_all)
    yield Observed(
        "the training step",
        "float16 without loss scaling",
        "{share:.0%} of the numbers in gradients, apart from those that are 0 in float32, too, are "
        "below 6e-5: there float16 loses digits, and below 6e-8 it is zero.",
        'Make the model under keras_mp.set_global_policy("mixed_float16"), whose loss scale keeps '
        "them large, or compile it with keras_mp.LossScaleOptimizer(optimizer).",
        matters=share >= _MOST_SMALL,
        share=share,
    )


def factors(step: TracedStep) -> Iterator[Observed]:
    """The loss is multiplied by a number before it is multiplied by the loss scale."""
    waiting, visited = list(step.scaling.inputs) if step.scaling is not None else [], set()
    while waiting:
        operation = waiting.pop().op
        if operation in visited:
            continue
        visited.add(operation)
        if operation.type in _ON_THE_WAY:
            waiting += list(operation.inputs)
        elif operation.type in _BELOW_ONE:
            waiting.append(operation.inputs[0])
        elif operation.type == "Mul":
            for constant, other in (operation.inputs, tuple(operation.inputs)[::-1]):
                value = static_value(constant)
                if value is None or value.size != 1:
                    continue
                factor = value.item()
                waiting.append(other)
                if factor < _LIKE_A_LOSS_SCALE or not np.log2(factor).is_integer():
                    continue
                yield Observed(
                    operation,
                    "a loss multiplied by a number",
                    f"The loss, {{loss:.4g}} for this batch, is multiplied by {factor:g}, and then "
                    "by the loss scale, {scale:g}. Only the latter is taken out of the gradients: "
                    f"they are {factor:g} times too large.",
                    "Remove this factor: the loss scale has the same purpose. (For a larger step, "
                    "change the learning rate.)",
                    loss=tf.reduce_mean(as_float32(other)),
                    scale=step.scale,
                )


def clipping(step: TracedStep) -> Iterator[Observed]:
    """Gradients are clipped while they are still multiplied by the loss scale."""
    for operation in step.scaled:
        is_clipping = origins.is_made_in(operation, _CLIPPING)
        if is_clipping and origins.is_users(operation):
            gradient = next(tensor for tensor in operation.inputs if tensor.op in step.scaled)
            largest = tf.reduce_max(tf.abs(as_float32(gradient)))
            yield Observed(
                operation,
                "clipping before unscaling",
                "Gradients are clipped while they are multiplied by the loss scale, {scale:g}: the "
                "largest number of the first one is {largest:.3g} there, and {unscaled:.3g} "
                "without it. So the threshold depends on the scale.",
                "Unscale first: optimizer.get_unscaled_gradients(gradients), then clip, then "
                "apply; or pass clipnorm, clipvalue or global_clipnorm to the optimizer.",
                scale=step.scale,
                largest=largest,
                unscaled=largest / step.scale,
            )
            return


def weights(step: TracedStep) -> Iterator[Observed]:
    """One step makes weights infinite or NaN.

    The optimizer does so if it divides by a root plus an epsilon that is 0 in the dtype of its
    variables, and a weight has no gradient. Where gradients are not finite, the step should have
    been skipped.
    """
    variables = [v for v in step.model.trainable_variables if tf.as_dtype(v.dtype).is_floating]
    if step.optimizer is None or not variables:
        return
    optimizer = getattr(step.optimizer, "inner_optimizer", step.optimizer)
    epsilon = getattr(optimizer, "epsilon", None)
    divided = [
        variable
        for variable in variables
        if isinstance(epsilon, (int, float))
        and np.array(epsilon, tf.as_dtype(variable.dtype).as_numpy_dtype) == 0
    ]
    if divided:
        dtypes = sorted({tf.as_dtype(each.dtype).name for each in divided})
        size = sum(math.prod(length or 0 for length in each.shape) for each in divided)
        in_16_bits, bad = not set(dtypes).isdisjoint(LOW_PRECISION_NAMES), not_finite_of(divided)
        yield Observed(
            _the_optimizer(optimizer),
            EPSILON if in_16_bits else "an epsilon that is 0",
            f"Its epsilon, {epsilon:g}, is 0 in {' and '.join(dtypes)}, the dtype of "
            f"{len(divided)} variables: after one step with this batch {{bad:,}} of their {size:,} "
            "numbers are not finite.",
            'Keep variables in float32 (the policy "mixed_float16"), or pass epsilon=1e-4.'
            if in_16_bits
            else "Pass an epsilon above 0, such as 1e-7.",
            matters=bad > 0,
            bad=bad,
        )
    if step.scaling is not None:
        bad, gradients = not_finite_of(variables), not_finite_of(step.backward_products)
        loss_is_finite = tf.reduce_all(tf.math.is_finite(as_float32(step.scaling.inputs[0])))
        yield Observed(
            _the_optimizer(step.optimizer),
            "a step that cannot be skipped",
            "Gradients overflow at the loss scale {scale:g}, and the step is not skipped: it makes "
            "{bad:,} numbers of the weights infinite or NaN.",
            "Use a dynamic loss scale, which skips such a step and halves the scale, or a smaller "
            "fixed one.",
            matters=(bad > 0) & loss_is_finite & (gradients > 0),
            bad=bad,
            scale=step.scale,
        )


def _the_optimizer(optimizer: object) -> str:
    return f"the optimizer ({type(optimizer).__name__})"
