"""Hazards of the step itself: of its loss, its gradients and the weights."""

import math
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from keras_mp import keras_api, low_precision_weights
from keras_mp.numerics.graphs import origins
from keras_mp.numerics.hazards.traced_step import (
    Suspect,
    TracedStep,
    count,
    health,
    not_finite_of,
    static_value,
    widened,
)
from keras_mp.numerics.results import Finding
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION, LOW_PRECISION_NAMES

# Operations between a product in a loss function and the loss that is scaled.
_ON_THE_WAY = op_table.ops(
    *("casts", "identities", "reshapes", "additions", "sums of tensors", "sums over axes")
)
_BELOW_ONE = op_table.ops("divisions", "divisions without NaN")
# Programs that scale a loss by hand use a power of two that is at least as large.
_LIKE_A_LOSS_SCALE = 64
_STEP = "the training step"
# Of float16. Smaller numbers have fewer digits, which some gradients may have.
_SMALLEST_NORMAL = 2.0**-14
_MOST_SMALL = 0.1
# Rounding loses some updates everywhere.
_MOST_LOST = 0.1


def gradients_that_vanish(traced: TracedStep) -> Suspect:
    """Gradients in float16 are too small for it, and nothing scales the loss."""
    if traced.scaling is not None or traced.optimizer is None:
        return None
    products = traced.backward_products
    # Where a kernel of float16 is slow, keras_mp computes in float32 and rounds.
    rounded = [
        user.outputs[0] for each in products for user in each.consumers() if user.type == "Cast"
    ]
    gradients = [each for each in (*products, *rounded) if each.dtype == tf.float16]
    if not gradients:
        return None
    sizes = [tf.abs(widened(gradient)) for gradient in gradients]
    casts = [
        operation
        for operation in traced.operations
        if operation.type == "Cast" and origins.is_of_backward_pass(operation.name)
    ]
    # What vanishes there is 0 in all gradients behind it.
    gone = [
        count((each.outputs[0] == 0) & (each.inputs[0] != 0))
        for each in casts
        if each.outputs[0].dtype == tf.float16 and each.inputs[0].dtype == tf.float32
    ]
    small, others = yield (
        tf.add_n([count((size > 0) & (size < _SMALLEST_NORMAL)) for size in sizes] + gone),
        tf.add_n([count(size > 0) for size in sizes] + gone),
    )
    if not others or small < _MOST_SMALL * others:
        return None
    return Finding(
        "float16 without loss scaling",
        _STEP,
        None,
        f"{small / others:.0%} of the numbers in gradients, apart from those that are 0 in "
        "float32, too, are below 6e-5: there float16 loses digits, and below 6e-8 it is zero.",
        'Make the model under keras_mp.set_global_policy("mixed_float16"), whose loss scale keeps '
        "them large, or compile it with keras_mp.LossScaleOptimizer(optimizer).",
    )


def loss_multiplied_by_a_number(traced: TracedStep) -> Iterator[Suspect]:
    """The loss is multiplied by a number before it is multiplied by the loss scale."""
    if traced.scaling is None:
        return
    waiting, visited = list(traced.scaling.inputs), set()
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
                if value is None or np.size(value) != 1:
                    continue
                waiting.append(other)
                factor = float(np.ravel(value)[0])
                if factor >= _LIKE_A_LOSS_SCALE and np.log2(factor).is_integer():
                    yield _about_factor(traced, operation, other, factor)


def _about_factor(
    traced: TracedStep, operation: tf.Operation, loss: tf.Tensor, factor: float
) -> Suspect:
    mean, scale = yield tf.reduce_mean(widened(loss)), traced.scale
    return traced.finding(
        operation,
        "a loss multiplied by a number",
        f"The loss, {mean:.4g} for this batch, is multiplied by {factor:g}, and then by the loss "
        f"scale, {scale:g}. Only the latter is taken out of the gradients: they are {factor:g} "
        "times too large.",
        "Remove this factor: the loss scale has the same purpose. (For a larger step, change the "
        "learning rate.)",
    )


def clipping_before_unscaling(traced: TracedStep) -> Suspect:
    """Gradients are clipped while they are still multiplied by the loss scale."""
    for operation in traced.scaled:
        if not origins.is_made_in(operation, ("clip_ops.py",)):
            continue
        if origins.maker_of(operation) != "user":
            continue
        gradient = next(tensor for tensor in operation.inputs if tensor.op in traced.scaled)
        largest, scale = yield tf.reduce_max(tf.abs(widened(gradient))), traced.scale
        return traced.finding(
            operation,
            "clipping before unscaling",
            f"Gradients are clipped while they are multiplied by the loss scale, {scale:g}: the "
            f"largest number of the first one is {largest:.3g} there, and {largest / scale:.3g} "
            "without it. So the threshold depends on the scale.",
            "Unscale first: optimizer.get_unscaled_gradients(gradients), then clip, then apply; or "
            "pass clipnorm, clipvalue or global_clipnorm to the optimizer.",
        )
    return None


def accumulation_under_a_moving_scale(traced: TracedStep) -> Suspect:
    """Gradients that are still scaled are added up over steps, while the scale may move."""
    for operation in traced.scaled:
        if operation.type not in ("AssignAddVariableOp", "AssignVariableOp"):
            continue
        value = operation.inputs[1]
        if not value.shape.rank or origins.maker_of(operation) != "user":
            continue

        [scale] = yield [traced.scale]
        return traced.finding(
            operation,
            "gradient accumulation under a moving scale",
            f"Gradients are added up while they are multiplied by the loss scale, {scale:g} for "
            "this batch. When it moves in between, terms of one sum are scaled differently, and "
            "one that is not finite stays in the sum.",
            "Unscale each gradient before it is added; or let the optimizer do it "
            "(gradient_accumulation_steps), or use keras_mp.GradScaler, which keeps the scale "
            "until the sum is complete.",
        )
    return None


def epsilon_of_the_optimizer(traced: TracedStep) -> Suspect:
    """The optimizer divides by a root plus an epsilon that is 0 in the dtype of its variables."""
    optimizer = getattr(traced.optimizer, "inner_optimizer", traced.optimizer)
    epsilon = getattr(optimizer, "epsilon", None)
    if not isinstance(epsilon, (int, float)):
        return None
    variables = [
        v
        for v in traced.model.trainable_variables
        if (dtype := tf.as_dtype(v.dtype)).is_floating
        and np.array(epsilon, dtype.as_numpy_dtype) == 0
    ]
    if not variables:
        return None
    dtypes = {tf.as_dtype(v.dtype).name for v in variables}
    in_16_bits = not dtypes.isdisjoint(LOW_PRECISION_NAMES)
    size = sum(math.prod(length or 0 for length in v.shape) for v in variables)
    [bad] = yield [not_finite_of(variables)]
    if not (bad or in_16_bits):
        return None
    return Finding(
        "an epsilon that is 0 in 16 bits" if in_16_bits else "an epsilon that is 0",
        f"the optimizer ({type(optimizer).__name__})",
        None,
        f"Its epsilon, {epsilon:g}, is 0 in {' and '.join(sorted(dtypes))}, the dtype of "
        f"{len(variables)} variables: after one step with this batch {bad:,} of their {size:,} "
        "numbers are not finite.",
        'Keep variables in float32 (the policy "mixed_float16"), or pass epsilon=1e-4.'
        if in_16_bits
        else "Pass an epsilon above 0, such as 1e-7.",
    )


def weights_that_are_lost(traced: TracedStep) -> Suspect:
    """One step makes weights infinite or NaN, since it is not skipped."""
    variables = [v for v in traced.model.trainable_variables if tf.as_dtype(v.dtype).is_floating]
    optimizer = traced.optimizer
    in_16_bits = any(o.outputs and o.outputs[0].dtype in LOW_PRECISION for o in traced.forward)
    if optimizer is None or not variables or not in_16_bits or traced.scaling is None:
        return None
    gradients = [
        health(operation.outputs[0])
        for operation in traced.operations
        if origins.is_of_backward_pass(operation.name)
        and operation.outputs
        and operation.outputs[0].dtype.is_floating
    ]
    bad, scale, loss, of_gradients = yield (
        not_finite_of(variables),
        traced.scale,
        widened(traced.scaling.inputs[0]),
        tf.reduce_sum(gradients, 0) if gradients else tf.zeros([5], tf.float64),
    )
    # Where all gradients are finite, it is the optimizer that makes the weights what they are.
    if not bad or not np.all(np.isfinite(loss)) or not of_gradients[2:].any():
        return None
    return Finding(
        "a step that cannot be skipped",
        f"the optimizer ({type(optimizer).__name__})",
        None,
        f"Gradients overflow at the loss scale {scale:g}, and the step is not skipped: it makes "
        f"{bad:,} numbers of the weights infinite or NaN.",
        "Use a dynamic loss scale, which skips such a step and halves the scale, or a smaller "
        "fixed one.",
    )


def updates_that_are_lost(traced: TracedStep) -> Suspect:
    """Weights in 16 bits do not move, though they have gradients."""
    optimizer = traced.optimizer
    if optimizer is None or low_precision_weights.keeps_digits(optimizer):
        return None
    measured = []
    for variable in traced.model.trainable_variables:
        before = _value_before_the_step(traced, variable)
        if tf.as_dtype(variable.dtype) not in LOW_PRECISION or before is None:
            continue
        gradients = list(_gradients_of(traced, variable, before.op.inputs[0]))
        if not gradients:
            continue
        has_gradient = tf.reduce_any([tf.not_equal(each, 0) for each in gradients], 0)
        stays = tf.equal(tf.convert_to_tensor(variable), before)
        measured.append(tf.stack([count(has_gradient & stays), count(has_gradient)]))
    if not measured:
        return None

    [(lost, all_of_them)] = yield [tf.add_n(measured)]
    if lost < _MOST_LOST * all_of_them or not all_of_them:
        return None
    dtype = low_precision_weights.dtype_of(traced.model)
    constants = ", ".join(low_precision_weights.vanishing_constants(optimizer, dtype))
    why = f" In {dtype}, {constants}." if constants else ""
    return Finding(
        "updates that are lost",
        f"the optimizer ({type(optimizer).__name__})",
        None,
        f"{lost / all_of_them:.0%} of {all_of_them:,} weights in {dtype} with a gradient have "
        f"the same value after the step.{why}",
        "Compile the model with keras_mp.MasterWeightOptimizer(optimizer), or keep variables "
        f'in float32 (the policy "mixed_{dtype}").',
    )


def _gradients_of(
    traced: TracedStep, variable: tf.Variable, handle: tf.Tensor
) -> Iterator[tf.Tensor]:
    """Yields the gradients of a weight from each product that it is in."""
    for gradient in traced.backward_products:
        if gradient.shape != variable.shape:
            continue
        # The gradient of the other factor may have this shape, too: a product with the weight.
        is_in_product = _reads(traced.forward_of(gradient.op), handle)
        if is_in_product and not _reads(gradient.op, handle):
            yield gradient


def _reads(operation: tf.Operation, handle: tf.Tensor) -> bool:
    """Whether an operation takes the value of a variable, rounded or not."""
    for tensor in operation.inputs:
        while tensor.op.type in ("Cast", "Identity"):
            tensor = tensor.op.inputs[0]
        if tensor.op.type == "ReadVariableOp" and tensor.op.inputs[0] is handle:
            return True
    return False


def _value_before_the_step(traced: TracedStep, variable: tf.Variable) -> tf.Tensor | None:
    """Returns what the forward pass reads of a variable."""
    stored = tf.convert_to_tensor(variable)
    while stored.op.type == "Identity":
        stored = stored.op.inputs[0]
    if stored.op.type != "ReadVariableOp":
        return None
    [handle] = stored.op.inputs
    reads = (op for op in traced.forward if op.type == "ReadVariableOp" and op.inputs[0] is handle)
    first = next(reads, None)
    return None if first is None else first.outputs[0]


def replicas_that_do_not_agree(traced: TracedStep) -> Iterator[Finding]:
    """Keras's own wrapper looks at the gradients of one replica before it skips a step for all."""
    optimizer = traced.optimizer
    replicas = traced.model.distribute_strategy.num_replicas_in_sync
    is_of_keras = isinstance(optimizer, keras_api.KerasLossScaleOptimizer)
    if replicas < 2 or not is_of_keras or type(optimizer).__module__.startswith("keras_mp"):
        return
    if not keras_api.APPLY_TAKES_SCALED_GRADIENTS:
        return  # Keras 2 asks all replicas.
    yield Finding(
        "a step that cannot be skipped",
        "the optimizer (Keras's own LossScaleOptimizer)",
        None,
        f"There are {replicas} replicas, and it skips a step if the gradients of the first one are "
        f"not finite. An infinite gradient on one of the other {replicas - 1} reaches the weights "
        "of all.",
        "Pass the inner optimizer to compile() under a policy of keras_mp.",
    )
