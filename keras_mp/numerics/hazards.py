"""Known hazards of 16 bits: each a function that goes through a traced step.

First what 16 bits cannot hold: epsilons, sums, labels, inputs, probabilities, losses; and a batch
that no dtype holds. Then what is wrong with the step itself: the loss, gradients and weights. Each
yields what is `Observed`: a suspicious place, the tensors that tell whether it does harm, and what
is said of it then.
"""

import math
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from keras_mp.models.model_steps import has_own_train_step
from keras_mp.numerics import origins, traced_step
from keras_mp.numerics.records import UNIT_ROUNDOFF, smallest_of
from keras_mp.numerics.results import Observed
from keras_mp.numerics.run import floating, is_floating
from keras_mp.numerics.traced_step import TracedStep, before, in_float32, not_finite_of
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION, LOW_PRECISION_NAMES
from keras_mp.support.kept_casts import as_float32
from keras_mp.wrappers.inner_optimizers import chain

_DIVIDE = op_table.ops("divisions", "reciprocals") | {"Log"}
_TO_A_DIVISION = ("Sqrt", "Identity", "Cast")
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
        bad = not_finite_of(filter(is_floating, tf.nest.flatten(part, expand_composites=True)))
        yield Observed(
            f"the batch's {name}",
            "a batch that is not finite",
            "{bad:,} of its numbers are NaN or infinite. So are results computed from them, in "
            "float32, too.",
            "Clean the data, or check with another batch.",
            matters=bad > 0,
            bad=bad,
        )


def epsilons(step: TracedStep) -> Iterator[Observed]:
    """A constant that is to keep a division from failing is 0 in 16 bits, and so is a value."""
    for operation in step.forward:
        if operation.type not in ("Add", "AddV2", "Maximum"):
            continue
        for constant, other in (operation.inputs, tuple(operation.inputs)[::-1]):
            value, output = traced_step.static_value(constant), operation.outputs[0]
            # Where keras_mp adds in float32, the constant that the program has made is cast.
            made = constant.dtype.name, before(constant, ("Cast", "Identity")).dtype.name
            dtype = next((each for each in made if each in LOW_PRECISION_NAMES), None)
            if value is None or np.any(value) or dtype is None:
                continue
            divides = step.leads_to(output, _DIVIDE, _TO_A_DIVISION, steps=3)
            if divides is None:
                continue
            # It may also be what is divided.
            divisor = divides.inputs[-1] if divides.type.endswith("Div") else output
            if before(divisor, _TO_A_DIVISION) is not output:
                continue
            zeros = tf.math.count_nonzero(tf.equal(output, 0))
            least = tf.reduce_min(as_float32(other))
            # A maximum with a true 0 is a ReLU.
            is_epsilon = least >= 0 if operation.type == "Maximum" else True
            yield Observed(
                operation,
                EPSILON,
                f"The constant of {operation.type}, before {divides.type}, is 0 in {dtype}, whose "
                f"smallest number is {smallest_of(dtype):.1g}. Of {{size:,}} values "
                "of this batch {zeros:,} are 0 then; the smallest is {least:.3g}.",
                f"Use an epsilon that {dtype} holds, such as 1e-4, or compute this in float32.",
                matters=(zeros > 0) & is_epsilon,
                size=tf.size(output),
                zeros=zeros,
                least=least,
            )


def sums(step: TracedStep) -> Iterator[Observed]:
    """A sum in 16 bits is further from that of float32 than its result's rounding explains."""
    for operation in step.in_16_bits(("Sum", "Mean", "BiasAddGrad"), forward=False):
        result, dtype = operation.outputs[0], operation.outputs[0].dtype.name
        size = operation.inputs[0].shape.num_elements() or 0
        terms = size // (result.shape.num_elements() or math.inf)
        if terms < 2:
            continue
        exact = in_float32(operation)
        magnitude = in_float32(operation, lambda each: tf.abs(as_float32(each)))
        beyond = tf.maximum(tf.abs(as_float32(result) - exact) - smallest_of(dtype), 0.0)
        error = tf.math.divide_no_nan(beyond, magnitude)
        # `not_finite` reports infinities; the loss scale takes care of those in backward passes.
        worst = tf.reduce_max(tf.where(tf.math.is_finite(error), error, 0.0))
        is_loss = result.shape.rank == 0 and not origins.is_of_backward_pass(operation.name)
        yield Observed(
            operation,
            "a loss in 16 bits" if is_loss else "a long sum in 16 bits",
            f"{operation.type} adds up {terms:,} numbers in {dtype}, and is up to {{worst:.1%}} of "
            "the sum of magnitudes away from the float32 sum of them; rounding its result explains "
            f"{UNIT_ROUNDOFF[dtype]:.1%}.",
            "Cast the terms to float32. (Under a policy of keras_mp, gradients are summed in "
            "float32.)",
            # That explains a few roundings of the sum of magnitudes.
            matters=worst > 4 * UNIT_ROUNDOFF[dtype],
            worst=worst,
        )


def labels(step: TracedStep) -> Iterator[Observed]:
    """The model's outputs are in a dtype that cannot express the labels."""
    # Nobody knows what a step of the program compares with the labels, or passes to `call`.
    if has_own_train_step(step.model) or not floating(step.batch.y):
        return
    outputs = tf.nest.flatten(step.model(step.batch.x, training=False))
    for each, output in zip(tf.nest.flatten(step.batch.y), outputs):
        is_alike = is_floating(each) and each.shape.is_compatible_with(output.shape)
        if not is_alike or output.dtype not in LOW_PRECISION:
            continue
        numbers = _lost_in(each, tf.cast(as_float32(each), output.dtype))
        yield Observed(
            "the model's outputs",
            "outputs in 16 bits",
            f"The outputs are {output.dtype.name}. Of the labels of this batch, up to "
            "{largest:.6g}, {infinite:,} are infinite in it, and of the others {lost:.1%} of the "
            "variance is lost, so the outputs cannot predict them.",
            'Give the last layer dtype="float32", or scale the labels.',
            matters=(numbers["infinite"] > 0) | (numbers["lost"] > _MOST_VARIANCE),
            **numbers,
        )


def inputs(step: TracedStep) -> Iterator[Observed]:
    """Numbers of the batch are rounded to 16 bits, and what tells them apart is lost."""
    for operation in step.in_16_bits(("Cast",)):
        source, rounded = operation.inputs[0], operation.outputs[0]
        size, rank = source.shape.num_elements() or 0, source.shape.rank or 0
        given = before(source, ("Identity", "ExpandDims", "Cast"))
        is_taken = any(taker in step.forward for taker in rounded.consumers())
        # A few numbers may be close to one another by chance.
        is_many = rank > 1 and size // (source.shape[-1] or 1) >= _FEW
        if given.op.type != "Placeholder" or not is_taken or not is_many:
            continue
        numbers = _lost_in(source, rounded, list(range(rank - 1)))
        what, most = "up to {lost:.1%} of the variance of a column is lost", _MOST_VARIANCE
        whole = step.leads_to(rounded, ("Cast",), ("Identity",), steps=2)
        if whole is not None and (ids := whole.outputs[0].dtype).is_integer:
            what, most = "{lost:,} become other integers", 0
            wide, near = (tf.cast(as_float32(each), ids) for each in (source, rounded))
            numbers["lost"] = tf.math.count_nonzero(wide != near)
        yield Observed(
            operation,
            "inputs that are rounded",
            f"Of this batch, whose numbers go up to {{largest:.6g}}, {what} when they are rounded "
            f"to {rounded.dtype.name}.",
            "Standardize them before the model, start it with a layer that reads raw numbers "
            '(Normalization, Rescaling, Embedding), or give this layer dtype="float32".',
            # `not_finite` reports others.
            matters=(numbers["lost"] > most) & tf.reduce_all(tf.math.is_finite(rounded)),
            **numbers,
        )


def _lost_in(
    given: tf.Tensor, rounded: tf.Tensor, axes: list[int] | None = None
) -> dict[str, tf.Tensor]:
    """Measures what is lost of numbers of a batch: of their variance, and those made infinite.

    Args:
        given: the numbers.
        rounded: the same, in 16 bits.
        axes: over which the variance is taken. Defaults to all.
    """
    wide, near = as_float32(given), as_float32(rounded)
    is_infinite = tf.math.is_inf(near)
    error = tf.reduce_mean(tf.square(tf.where(is_infinite, 0.0, wide - near)), axes)
    variance = tf.math.reduce_variance(wide, axes)
    # A constant tells nothing apart.
    varies = variance > 1e-10 * tf.reduce_mean(tf.square(wide), axes)
    lost = tf.where(varies, tf.math.divide_no_nan(error, variance), 0.0)
    return {
        "lost": tf.reduce_max(lost),
        "infinite": tf.math.count_nonzero(is_infinite),
        "largest": tf.reduce_max(tf.abs(wide)),
    }


def before_a_logarithm(step: TracedStep) -> Iterator[Observed]:
    """A loss takes the logarithm of probabilities that 16 bits have rounded."""
    for operation in step.in_16_bits(("Softmax", "Sigmoid")):
        probabilities, kind = operation.outputs[0], operation.type.lower()
        if step.leads_to(probabilities, ("Log", "Log1p"), _TO_A_LOGARITHM, steps=12) is None:
            continue
        wide, logits = as_float32(probabilities), as_float32(operation.inputs[0])
        is_true = _true_labels(step, wide)
        if is_true is None:
            continue
        exact = tf.nn.log_softmax(logits)
        if kind == "sigmoid":
            both = (wide, 1.0 - wide), (logits, -logits), (is_true, tf.logical_not(is_true))
            wide, logits, is_true = map(tf.stack, both)
            exact = tf.math.log_sigmoid(logits)
        errors = tf.abs(tf.math.log(tf.clip_by_value(wide, _SMALLEST, 1.0)) - exact)
        worst = tf.reduce_max(tf.where(is_true, errors, 0.0))
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
    column = shape[:-1] if shape[-1:] == [1] else shape
    for given in tf.nest.flatten(step.batch.y):
        if given is None or not (given.dtype.is_floating or given.dtype.is_integer):
            continue
        labels = tf.squeeze(given, -1) if given.shape[-1:] == [1] else given
        if labels.shape in (shape, column):
            return tf.reshape(as_float32(labels), tf.shape(probabilities)) > 0.5
        if labels.shape.rank == shape.rank - 1 and labels.shape.is_compatible_with(shape[:-1]):
            return tf.one_hot(tf.cast(labels, tf.int32), shape[-1], True, False)
    return None


def cross_entropies(step: TracedStep) -> Iterator[Observed]:
    """The mean of a cross entropy in 16 bits is further off than rounding explains."""
    for operation in step.in_16_bits(op_table.ops("cross entropies")):
        dtype = operation.outputs[0].dtype.name
        both = as_float32(operation.outputs[0]), in_float32(operation)
        loss, exact = map(tf.reduce_mean, both)
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
    # Where a kernel of float16 is slow, keras_mp computes in float32 and rounds.
    rounded = [
        each.inputs[0]
        for each in step.in_16_bits(("Cast",), forward=False)
        if origins.is_of_backward_pass(each.inputs[0].op.name) and is_floating(each.inputs[0])
        if each.outputs[0].dtype == tf.float16
    ]
    made = [each for each in step.backward_products if each.dtype == tf.float16]
    if not (sizes := [tf.abs(as_float32(each)) for each in (*rounded, *made)]):
        return
    counts = (
        tf.add_n([tf.math.count_nonzero((size > 0) & (size < limit)) for size in sizes])
        for limit in (_SMALLEST_NORMAL, np.inf)
    )
    small, others = (tf.cast(each, tf.float64) for each in counts)
    share = tf.math.divide_no_nan(small, others)
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
    waiting = [each.op for each in step.scaling.inputs] if step.scaling is not None else []
    for operation in waiting:
        inputs = list(operation.inputs)
        takes = inputs if operation.type in _ON_THE_WAY else []
        if operation.type in _BELOW_ONE:
            takes = inputs[:1]
        for constant, other in (inputs, inputs[::-1]) if operation.type == "Mul" else ():
            value = traced_step.static_value(constant)
            if value is None or value.size != 1:
                continue
            factor, takes = value.item(), [other]
            if factor < _LIKE_A_LOSS_SCALE or not np.log2(factor).is_integer():
                continue
            yield Observed(
                operation,
                "a loss multiplied by a number",
                f"The loss, {{loss:.4g}} for this batch, is multiplied by {factor:g}, and then by "
                "the loss scale, {scale:g}. Only the latter is taken out of the gradients: they "
                f"are {factor:g} times too large.",
                "Remove this factor: the loss scale has the same purpose. (For a larger step, "
                "change the learning rate.)",
                loss=tf.reduce_mean(as_float32(other)),
                scale=step.scale,
            )
        waiting += [each.op for each in takes if each.op not in waiting]


def clipping(step: TracedStep) -> Iterator[Observed]:
    """Gradients are clipped while they are still multiplied by the loss scale."""
    clips = [o for o in step.scaled if origins.is_made_in(o, _CLIPPING) and origins.is_users(o)]
    for operation in clips[:1]:
        gradient = next(tensor for tensor in operation.inputs if tensor.op in step.scaled)
        largest = tf.reduce_max(tf.abs(as_float32(gradient)))
        yield Observed(
            operation,
            "clipping before unscaling",
            "Gradients are clipped while they are multiplied by the loss scale, {scale:g}: the "
            "largest number of the first one is {largest:.3g} there, and {unscaled:.3g} without "
            "it. So the threshold depends on the scale.",
            "Unscale first: optimizer.get_unscaled_gradients(gradients), then clip, then apply; or "
            "pass clipnorm, clipvalue or global_clipnorm to the optimizer.",
            scale=step.scale,
            largest=largest,
            unscaled=largest / step.scale,
        )


def weights(step: TracedStep) -> Iterator[Observed]:
    """One step makes weights infinite or NaN.

    The optimizer does so if it divides by a root plus an epsilon that is 0 in the dtype of its
    variables, and a weight has no gradient. Where gradients are not finite, the step should have
    been skipped.
    """
    variables = [v for v in step.model.trainable_variables if tf.as_dtype(v.dtype).is_floating]
    if step.optimizer is None or not variables:
        return
    *_, optimizer = chain(step.optimizer)
    epsilon = getattr(optimizer, "epsilon", None)
    epsilon = epsilon if isinstance(epsilon, (int, float)) else 1.0
    dtypes = {tf.as_dtype(each.dtype) for each in variables}
    dtypes = {each.name for each in dtypes if np.array(epsilon, each.as_numpy_dtype) == 0}
    if divided := [each for each in variables if tf.as_dtype(each.dtype).name in dtypes]:
        size = sum(math.prod(length or 0 for length in each.shape) for each in divided)
        is_narrow, bad = not dtypes.isdisjoint(LOW_PRECISION_NAMES), not_finite_of(divided)
        yield Observed(
            _name_of(optimizer),
            EPSILON if is_narrow else EPSILON.removesuffix(" in 16 bits"),
            f"Its epsilon, {epsilon:g}, is 0 in {' and '.join(sorted(dtypes))}, the dtype of "
            f"{len(divided)} variables: after one step with this batch {{bad:,}} of their {size:,} "
            "numbers are not finite.",
            "Pass a larger epsilon, such as 1e-4. Variables in float32, as under the policy "
            '"mixed_float16", take 1e-7, too.',
            matters=bad > 0,
            bad=bad,
        )
    if step.scaling is not None:
        bad, gradients = not_finite_of(variables), not_finite_of(step.backward_products)
        loss_is_finite = tf.reduce_all(tf.math.is_finite(as_float32(step.scaling.inputs[0])))
        yield Observed(
            _name_of(step.optimizer),
            "a step that cannot be skipped",
            "Gradients overflow at the loss scale {scale:g}, and the step is not skipped: it makes "
            "{bad:,} numbers of the weights infinite or NaN.",
            "Use a dynamic loss scale, which skips such a step and halves the scale, or a smaller "
            "fixed one.",
            matters=(bad > 0) & loss_is_finite & (gradients > 0),
            bad=bad,
            scale=step.scale,
        )


def _name_of(optimizer: object) -> str:
    return f"the optimizer ({type(optimizer).__name__})"
