"""Known hazards of 16 bits: each a function that goes through a traced step.

First what 16 bits cannot hold: inputs, results, sums, labels, probabilities; and a batch that no
dtype holds. Then what is wrong with the step itself: the loss, gradients and weights. Each yields
what is `Observed`: a suspicious place, the tensors that tell whether it does harm, and what is said
of it then.

To add a hazard, write such a function, put it into `HAZARDS`, and plant the defect in a model.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.models.layer_paths import native_variable
from keras_mp.models.model_steps import has_own_train_step
from keras_mp.numerics import graph, origins, traced_step
from keras_mp.numerics.records import UNIT_ROUNDOFF, smallest_of
from keras_mp.numerics.results import CURES, LARGE, Finding, Observed, begun, observed
from keras_mp.numerics.run import floating, is_floating
from keras_mp.numerics.traced_step import TracedStep, before, is_narrow, not_finite_of, static_value
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION, LOW_PRECISION_NAMES
from keras_mp.support.kept_casts import as_float32
from keras_mp.wrappers.inner_optimizers import chain

EPSILON = "an epsilon that is 0 in 16 bits"
OVERFLOW, UNDERFLOW, IN_ANY_DTYPE = NOT_FINITE = (
    "an overflow in the forward pass",
    "an underflow in the forward pass",
    "a result that is not finite in any dtype",
)

# Operations that may return zero, or infinity, of numbers that are neither; cheap to compute again.
_AGAIN = op_table.ops(
    *("sums over axes", "products over axes", "multiplications", "squares", "powers", "divisions"),
    *("squared differences", "reciprocals", "exponentials", "logarithms", "softmax", "casts"),
)
_PRODUCTS = op_table.ops("matrix products", "matrix products into another dtype", "convolutions")
_DIVISIONS = op_table.ops("divisions")
_QUOTIENTS = _DIVISIONS | op_table.ops("divisions without NaN")
_DIVIDING = _DIVISIONS | op_table.ops("reciprocals", "logarithms")
_CASTS = op_table.ops("casts", "identities", "reshapes")
# From where a number is lost to where that matters.
_HANDING_ON = _CASTS | op_table.ops("moves", "views", "roots")
# In what `health` returns: how many values are not finite, how many of the others are negative, and
# zero; and how many values there are.
BAD, NEGATIVE, ZEROS, SIZE = traced_step.BAD, 8, traced_step.ZEROS, 4

_ENTROPIES = op_table.ops("cross entropies")
# Operations between probabilities and the logarithm of a cross entropy.
_TO_A_LOGARITHM = _HANDING_ON | _QUOTIENTS | op_table.ops("maxima of two", "additions")
# A few numbers may be close to one another by chance.
_FEW = 8
# Numbers of a batch are lost if rounding them to 16 bits takes a larger share of their variance.
_MOST_VARIANCE = 0.01
# In nats. A probability that is 5 % off.
_TOO_FAR = 0.05
# As Keras clips probabilities before it takes logarithms.
_SMALLEST = 1e-7

# Operations between a product in a loss function and the loss that is scaled.
_TO_THE_LOSS = _CASTS | op_table.ops("additions", "sums of tensors", "sums over axes")
# Programs that scale a loss by hand use a power of two that is at least as large.
_LIKE_A_LOSS_SCALE = 64
# Of float16. Smaller numbers have fewer digits, which some gradients may have.
_SMALLEST_NORMAL, _MOST_SMALL = 2.0**-14, 0.1
# TensorFlow's functions that clip gradients.
_CLIPPING = ("clip_by_value", "clip_by_norm", "clip_by_average_norm", "clip_by_global_norm")


def batches(step: TracedStep) -> Iterator[Observed]:
    """The batch has NaN or infinite numbers."""
    for name, part in step.batch._asdict().items():
        bad = not_finite_of(filter(is_floating, tf.nest.flatten(part, expand_composites=True)))
        yield observed(
            f"the batch's {name}",
            "a batch that is not finite",
            "{bad:,} of its numbers are NaN or infinite, and so are results, in float32, too.",
            "Clean the data, or check with another batch.",
            matters=bad > 0,
            bad=bad,
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
        yield observed(
            operation,
            "inputs that are rounded",
            f"Of this batch, whose numbers go up to {{largest:.6g}}, {what} when they are rounded "
            f"to {rounded.dtype.name}.",
            "Standardize them before the model, start it with a layer that reads raw numbers "
            '(Normalization, Rescaling, Embedding), or give this layer dtype="float32".',
            # `results` reports others.
            matters=(numbers["lost"] > most) & tf.reduce_all(tf.math.is_finite(rounded)),
            **numbers,
        )


def _lost_in(given: Any, rounded: Any, axes: list[int] | None = None) -> dict[str, tf.Tensor]:
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


def results(step: TracedStep) -> Iterator[Observed]:
    """The loss is infinite or NaN: where did that begin?

    A pooling with the maximum drops NaN, and so the loss may be finite. The gradients are not.
    """
    operations = [o for o in step.forward if o.outputs and o.outputs[0].dtype.is_floating]
    # A metric of Keras 3 may return its variable, which is not of this graph.
    ends = [*tf.nest.flatten(step.result), *(step.scaling.inputs[:1] if step.scaling else ())]
    ends = [each for each in ends if is_floating(each)]
    if not ends or not any(is_narrow(each.outputs[0].dtype) for each in operations):
        return
    # Operations after the backward pass use gradients, which overflow as is planned.
    begins = step.operations.index(step.backward[0]) if step.backward else None
    early = {*step.operations[:begins]}
    x, inputs = step.batch.x, {}
    parts = {"": x} if tf.is_tensor(x) else dict(enumerate(tf.nest.flatten(x)))
    for key, each in (x if isinstance(x, Mapping) else parts).items():
        if tf.is_tensor(each) and each.dtype.is_floating:
            inputs[f"the model's input {key!r}".removesuffix(" ''")] = _largest(each)
    # Nothing is known of what is not computed again: that it is infinite, or was lost.
    unknown = tf.constant(np.where(np.arange(traced_step.COUNTS) == ZEROS, np.inf, 0.0))
    numbers = {
        "loss": not_finite_of(ends),
        "gradients": not_finite_of(step.backward_products),
        "counts": tf.stack([traced_step.health(each.outputs[0]) for each in operations]),
        "wide": tf.stack([_again(step, each, unknown) for each in operations]),
        "sizes": [*inputs.values()],
        "weights": [_largest(native_variable(each)) for each in step.model.trainable_weights],
    }
    made = {each: each in early for each in operations}
    yield Observed(numbers, functools.partial(first_not_finite, step.where, made, [*inputs]))


def _largest(values: Any) -> tf.Tensor:
    return tf.reduce_max(tf.abs(as_float32(values)))


def _has_16_bits(operation: tf.Operation) -> bool:
    """Whether its result, or what it is made of, has 16 bits or fewer."""
    return any(is_narrow(each.dtype) for each in (*operation.inputs, operation.outputs[0]))


def _again(step: TracedStep, operation: tf.Operation, unknown: tf.Tensor) -> tf.Tensor:
    """Returns the health of an operation in float32. Products count where something divides."""
    output = operation.outputs[0]
    is_tried = operation.type in _AGAIN and output.shape.num_elements() != 1
    if operation.type in _PRODUCTS:
        is_tried = step.leads_to(output, _DIVIDING, _HANDING_ON, steps=4) is not None
    exact = traced_step.in_float32(operation) if is_tried and _has_16_bits(operation) else None
    return unknown if exact is None else traced_step.health(exact)


def first_not_finite(
    where: Callable[[Any], str], operations: Mapping[Any, bool], inputs: Sequence[str], **of: Any
) -> Finding | None:
    """Names the first operation of the forward pass that is not finite, and its cause.

    Args:
        where: function that returns the layer of an operation.
        operations: those of the forward pass with floating-point results, and whether each was made
            before the backward pass.
        inputs: words for the inputs of the batch.
        **of: loss, how many numbers that the step returns are not finite; gradients, how many of
            gradients are not; counts, the `health` of each result; wide, the same of
            what was computed again in float32; sizes and weights, the largest magnitudes of each
            input and weight.
    """
    made: list[Any] = [*operations]
    loss, gradients, bad = of["loss"], of["gradients"], of["counts"][:, BAD]
    nan, is_bad = bad[:, 2] > 0, bad.any(axis=1)
    if not loss and not gradients:
        return None
    seen = dict(zip(made, of["counts"]))
    epsilons = (_epsilon(made[i], seen) for i in np.flatnonzero(is_bad))
    if (epsilon := next(filter(None, epsilons), None)) is not None:
        return epsilon
    if not loss and not (nan & [*operations.values()]).any():
        return None
    places = {each: i for i, each in enumerate(made)}
    takes = [[places[x.op] for x in each.inputs if x.op in places] for each in made]
    given = np.array([b and static_value(x.outputs[0]) is not None for b, x in zip(is_bad, made)])
    computed = np.flatnonzero(is_bad & ~given)
    ended = next(iter(begun(takes, nan, nan) or computed.tolist()), None)
    if ended is None:
        return None
    origin, *_ = begun(takes, is_bad, np.arange(len(made)) == ended)
    number, kind = bad[ended, 2 * nan[ended] :].sum(), "NaN" if nan[ended] else "infinite"
    so = "so is the loss" if loss else "so are gradients, though the loss is not"
    counted = f"{number:,.0f} results of {made[ended].type} are {kind}; {so}."
    at, dtype = made[origin], made[origin].outputs[0].dtype
    if given[origin] and is_narrow(dtype):
        user = next((i for i in computed if given[takes[i]].any()), ended)
        value: Any = static_value(at.outputs[0])
        why = (
            f"A constant, such as the -1e9 of a mask, is {value.flat[0]} in {dtype.name}, and "
            f"with it, in {where(made[ended])}, {counted}"
        )
        cure = CURES["a constant"].format(largest=dtype.max, lowest=dtype.min)
        return Finding("a constant that is infinite in 16 bits", made[user], None, why, cure)
    if given[origin] or at.type == "Placeholder":
        return None
    size, name = max(zip(of["sizes"].tolist(), inputs), default=(0.0, ""))
    is_cast = at.type == "Cast" and dtype in LOW_PRECISION and size > float(dtype.max)
    if is_cast and before(at.outputs[0], _CASTS).op.type == "Placeholder":
        why = (
            f"It reaches {size:.3g}, and {dtype.name}, to which it is cast, has no larger "
            f"number than {dtype.max:.5g}: {counted}"
        )
        return Finding("an input that 16 bits do not hold", name, None, why, CURES["an input"])
    in_float32, is_low = int(of["wide"][origin, BAD].sum()), _has_16_bits(at)
    lost = of["counts"][:, ZEROS] - of["wide"][:, ZEROS]
    # A quotient is not finite because of its divisor.
    behind = {places.get(x.op) for x in [*at.inputs][-1 if at.type in _DIVISIONS else 0 :]}
    # The nearest come first.
    for i in reversed(range(origin if in_float32 or not is_low else 0)):
        if i in behind and lost[i] > 0:
            dtype = made[i].outputs[0].dtype.name
            why = (
                f"{lost[i]:,.0f} results of {made[i].type} are 0 in {dtype}, whose smallest "
                f"number is {smallest_of(dtype):.1g}, but not in float32. {at.type} of them is "
                f"the first result that is not finite: {counted}"
            )
            cure = CURES["too small"].format(dtype=dtype)
            return Finding(UNDERFLOW, made[i], None, why, cure)
        # What is computed in float32 can only have been lost where it was made.
        if i in behind and (is_low or made[i].type in _HANDING_ON):
            behind.update(takes[i])
    first = "is the first operation with finite inputs whose results are not finite"
    if not is_low or 2 * in_float32 >= bad[origin].sum():
        why = f"{at.type} {first}, in float32, too: {counted}"
        return Finding(IN_ANY_DTYPE, at, None, why, CURES["not finite"])
    beyond = f"(the largest {dtype.name} is {dtype.max:.5g})"
    why = f"{at.type} in {dtype.name} {first} {beyond}: {counted}"
    cure = CURES["too large"]
    if in_float32:
        why += f" {in_float32:,} of its results are not finite in float32, either."
        cure = CURES["too large for float32"]
    weight = of["weights"].max(initial=0.0)
    for cause, reached in (("Weights", weight), ("The inputs of the batch", size)):
        if not reached < LARGE[cause]:
            why += f" {cause} reach {reached:.3g}."
            cure = CURES[cause] + cure
    return Finding(OVERFLOW, at, None, why, cure)


def _epsilon(divides: Any, seen: Mapping[tf.Operation, np.ndarray]) -> Finding | None:
    """A constant that is to keep a division from failing is 0 in 16 bits, and so is a value.

    Args:
        divides: an operation whose results are not finite.
        seen: dict, the `health` of the results of operations.
    """
    if divides.type not in _DIVIDING - {"Log1p"}:
        return None
    added: Any = before(divides.inputs[-1], ("Sqrt", "Identity", "Cast")).op
    is_one = added.type in ("Add", "AddV2", "Maximum") and added in seen and seen[added][ZEROS]
    for constant, other in zip(added.inputs, [*added.inputs][::-1]) if is_one else ():
        # Where keras_mp adds in float32, the constant that the program has made is cast.
        made = constant.dtype.name, before(constant, ("Cast", "Identity")).dtype.name
        dtype = next((each for each in made if each in LOW_PRECISION_NAMES), None)
        value = static_value(constant)
        # A maximum with a true 0 is a ReLU.
        is_relu = added.type == "Maximum" and seen.get(other.op, seen[added])[NEGATIVE]
        if dtype and value is not None and not np.any(value) and not is_relu:
            why = (
                f"The constant of {added.type}, before {divides.type}, is 0 in {dtype}, whose "
                f"smallest number is {smallest_of(dtype):.1g}. Of {seen[added][SIZE]:,.0f} values "
                f"of this batch {seen[added][ZEROS]:,.0f} are 0 then."
            )
            cure = f"Use an epsilon that {dtype} holds, such as 1e-4, or compute this in float32."
            return Finding(EPSILON, added, None, why, cure)
    return None


def sums(step: TracedStep) -> Iterator[Observed]:
    """A sum, or a cross entropy, is further from float32 than rounding its result explains."""
    for operation in step.in_16_bits({"Sum", "Mean", "BiasAddGrad", *_ENTROPIES}, forward=False):
        result, dtype = operation.outputs[0], operation.outputs[0].dtype.name
        size = operation.inputs[0].shape.num_elements() or 0
        terms = int(size // (result.shape.num_elements() or np.inf))
        found, exact = as_float32(result), traced_step.in_float32(operation)
        is_loss = result.shape.rank == 0 and not origins.is_of_backward_pass(operation.name)
        if operation.type in _ENTROPIES:
            is_loss, found, magnitude = True, tf.reduce_mean(found), tf.reduce_mean(exact)
            exact = magnitude
        elif terms > 1:
            magnitude = traced_step.in_float32(operation, lambda each: tf.abs(as_float32(each)))
        else:
            continue
        beyond = tf.maximum(tf.abs(found - exact) - smallest_of(dtype), 0.0)
        error = tf.math.divide_no_nan(beyond, magnitude)
        # `results` reports infinities; the loss scale takes care of those in backward passes.
        worst = tf.reduce_max(tf.where(tf.math.is_finite(error), error, 0.0))
        yield observed(
            operation,
            "a loss in 16 bits" if is_loss else "a long sum in 16 bits",
            f"{operation.type} adds up {terms:,} numbers in {dtype}. Its mean is {{found:.6g}}; "
            "in float32 it is {exact:.6g}. Up to {worst:.1%} of the sum of magnitudes is lost, of "
            f"which rounding its result explains {UNIT_ROUNDOFF[dtype]:.1%}.",
            "Cast the terms to float32, or use a loss of keras_mp.losses. (Under a policy of "
            "keras_mp, gradients are summed in float32.)",
            # That explains a few roundings of the sum of magnitudes.
            matters=worst > 4 * UNIT_ROUNDOFF[dtype],
            worst=worst,
            found=tf.reduce_mean(found),
            exact=tf.reduce_mean(exact),
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
        yield observed(
            "the model's outputs",
            "outputs in 16 bits",
            f"The outputs are {output.dtype.name}. Of the labels of this batch, up to "
            "{largest:.6g}, {infinite:,} are infinite in it, and of the others {lost:.1%} of the "
            "variance is lost, so the outputs cannot predict them.",
            'Give the last layer dtype="float32", or scale the labels.',
            matters=(numbers["infinite"] > 0) | (numbers["lost"] > _MOST_VARIANCE),
            **numbers,
        )


def before_a_logarithm(step: TracedStep) -> Iterator[Observed]:
    """A loss takes the logarithm of probabilities that 16 bits have rounded."""
    for operation in step.in_16_bits(("Softmax", "Sigmoid")):
        probabilities, kind = operation.outputs[0], operation.type.lower()
        is_true = _true_labels(step, probabilities.shape)
        logarithm = step.leads_to(probabilities, ("Log", "Log1p"), _TO_A_LOGARITHM, steps=12)
        if logarithm is None or is_true is None:
            continue
        wide, logits = as_float32(probabilities), as_float32(operation.inputs[0])
        exact = tf.nn.log_softmax(logits)
        if kind == "sigmoid":
            exact = tf.math.log_sigmoid([logits, -logits])
            wide = tf.stack([wide, 1.0 - wide])
            is_true = tf.stack([is_true, tf.logical_not(is_true)])
        errors = tf.abs(tf.math.log(tf.clip_by_value(wide, _SMALLEST, 1.0)) - exact)
        worst = tf.reduce_max(tf.where(is_true, errors, 0.0))
        yield observed(
            operation,
            f"a {kind} in 16 bits",
            f"The loss takes the logarithm of what a {kind} returns in {probabilities.dtype.name}: "
            "for a label of this batch it is {worst:.3g} away from that of float32.",
            "Return logits and use a loss with from_logits=True, or give the activation "
            'dtype="float32". A loss of keras_mp.losses computes it from the logits by itself.',
            matters=worst >= _TOO_FAR,
            worst=worst,
        )


def _true_labels(step: TracedStep, shape: tf.TensorShape) -> tf.Tensor | None:
    """Returns where a probability is that of the true class, by the labels of the batch."""
    for given in tf.nest.flatten(step.batch.y):
        if given is None or not (given.dtype.is_floating or given.dtype.is_integer):
            continue
        labels = tf.squeeze(given, -1) if given.shape[-1:] == [1] else given
        if labels.shape == shape or (shape[-1:] == [1] and labels.shape == shape[:-1]):
            return tf.reshape(as_float32(labels), shape) > 0.5
        if shape.rank and shape[-1] and labels.shape.is_compatible_with(shape[:-1]):
            return tf.one_hot(tf.cast(labels, tf.int32), shape[-1], True, False)
    return None


def small_gradients(step: TracedStep) -> Iterator[Observed]:
    """Gradients in float16 are too small for it, and nothing scales the loss."""
    sizes, is_unscaled = [], step.scaling is None and step.optimizer is not None
    for each in step.in_16_bits({"Cast", *graph.COUNTED} if is_unscaled else (), forward=False):
        # Where a kernel of float16 is slow, keras_mp computes in float32 and rounds.
        gradient = each.inputs[0] if each.type == "Cast" else each.outputs[0]
        is_one = origins.is_of_backward_pass(gradient.op.name) and is_floating(gradient)
        if is_one and each.outputs[0].dtype == tf.float16:
            sizes.append(tf.abs(as_float32(gradient)))
    if not sizes:
        return
    small, others = (
        tf.add_n([tf.math.count_nonzero((size > 0) & (size < limit)) for size in sizes])
        for limit in (_SMALLEST_NORMAL, np.inf)
    )
    share = tf.math.divide_no_nan(tf.cast(small, tf.float64), tf.cast(others, tf.float64))
    yield observed(
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
        takes = inputs if operation.type in _TO_THE_LOSS else inputs[: operation.type in _QUOTIENTS]
        for constant, other in (inputs, inputs[::-1]) if operation.type == "Mul" else ():
            if (value := static_value(constant)) is not None and value.size == 1:
                factor, takes = value.item(), [other]
                if factor < _LIKE_A_LOSS_SCALE or not np.log2(factor).is_integer():
                    continue
                yield observed(
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
        waiting += [each.op for each in takes if each.op not in waiting]


def clipping(step: TracedStep) -> Iterator[Observed]:
    """Gradients are clipped while they are still multiplied by the loss scale."""
    clips = [o for o in step.scaled if origins.is_made_in(o, _CLIPPING) and origins.is_users(o)]
    for operation in clips[:1]:
        gradient = next(tensor for tensor in operation.inputs if tensor.op in step.scaled)
        largest = tf.reduce_max(tf.abs(as_float32(gradient)))
        yield observed(
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
    for dtype in dict.fromkeys(tf.as_dtype(each.dtype) for each in variables):
        if not isinstance(epsilon, (int, float)) or np.array(epsilon, dtype.as_numpy_dtype) != 0:
            continue
        divided = [each for each in variables if tf.as_dtype(each.dtype) == dtype]
        bad = not_finite_of(divided)
        yield observed(
            f"the optimizer ({type(optimizer).__name__})",
            EPSILON if dtype in LOW_PRECISION else EPSILON.removesuffix(" in 16 bits"),
            f"Its epsilon, {epsilon:g}, is 0 in {dtype.name}, the dtype of {len(divided)} "
            "variables: after one step with this batch {bad:,} of their {size:,} numbers are not "
            "finite.",
            "Pass a larger epsilon, such as 1e-4. Variables in float32, as under the policy "
            '"mixed_float16", take 1e-7, too.',
            matters=bad > 0,
            bad=bad,
            size=tf.add_n([tf.size(tf.convert_to_tensor(each)) for each in divided]),
        )
    if step.scaling is not None:
        bad, gradients = not_finite_of(variables), not_finite_of(step.backward_products)
        loss_is_finite = tf.reduce_all(tf.math.is_finite(as_float32(step.scaling.inputs[0])))
        yield observed(
            f"the optimizer ({type(step.optimizer).__name__})",
            "a step that cannot be skipped",
            "Gradients overflow at the loss scale {scale:g}, and the step is not skipped: it makes "
            "{bad:,} numbers of the weights infinite or NaN.",
            "Use a dynamic loss scale, which skips such a step, or a smaller fixed one.",
            matters=(bad > 0) & loss_is_finite & (gradients > 0),
            bad=bad,
            scale=step.scale,
        )


# In this order: causes before their consequences.
HAZARDS: tuple[Callable[[TracedStep], Iterator[Observed]], ...] = (
    *(batches, inputs, results, sums, labels, before_a_logarithm),
    *(small_gradients, factors, clipping, weights),
)
