"""Hazards of the step itself: the dtypes of layers, the loss, gradients and weights."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from keras_mp import kernels
from keras_mp.layer_calls import data_layers
from keras_mp.numerics import origins
from keras_mp.numerics.results import Observed, Said
from keras_mp.numerics.traced_step import (
    TracedStep,
    before,
    count,
    not_finite_of,
    static_number,
    widened,
)
from keras_mp.numerics.value_hazards import EPSILON
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION, LOW_PRECISION_NAMES

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


# Layers with a smaller share of the model's work are not reported.
_LARGE_SHARE = 0.01

# What is said of a layer in float32.
_OF_ANOTHER_POLICY, _NOT_CAST, _IGNORES = (
    "a layer of another policy",
    "a variable that is not cast",
    "a layer that ignores its policy",
)

_OF_A_LAYER = {
    _OF_ANOTHER_POLICY: "Create it under the policy of the model, without a dtype of its own, or "
    "pass dtype=self.dtype_policy from the layer that creates it. If float32 is intended, ignore "
    "this.",
    _NOT_CAST: "Make the variable with `add_weight`, which casts it where it is read, or wrap it "
    "in keras_mp.autocast_variable.",
    _IGNORES: "Let its `call` cast to self.compute_dtype, and not to float32; or, if it needs "
    'float32, create it with dtype="float32".',
}


def layers_in_float32(step: TracedStep) -> Iterator[Observed]:
    """A layer multiplies in float32, against its policy or in the middle of a 16-bit model."""
    found = (step.layers.layer(operation.name) for operation, _ in step.products)
    dtypes = {id(layer): layer.compute_dtype for layer in found if layer is not None}
    is_mostly_low = 2 * sum(each in LOW_PRECISION_NAMES for each in dtypes.values()) >= len(dtypes)
    by_layer: dict[str, list[tuple[int, tf.Operation]]] = {}
    for operation, work in step.products:
        path = step.layers.name(operation.name)
        # What keras_mp decides is in 16 bits, but for what is inside of the kernel.
        if path and operation.outputs[0].dtype == tf.float32 and not kernels.has_decided(operation):
            by_layer.setdefault(path, []).append((work, operation))
    total = sum(work for _, work in step.products)
    for products in by_layer.values():
        _, operation = max(products, key=lambda each: each[0])
        layer = step.layers.layer(operation.name)
        if layer is None or id(layer) in step.output_layers or data_layers.reads_raw(type(layer)):
            continue
        hazard = _NOT_CAST if any(map(_is_variable, operation.inputs)) else _IGNORES
        if layer.compute_dtype not in LOW_PRECISION_NAMES:
            hazard = _OF_ANOTHER_POLICY
        if is_mostly_low or hazard != _OF_ANOTHER_POLICY:
            share = sum(work for work, _ in products) / total
            yield Observed(operation, hazard=hazard, share=share, policy=layer.dtype_policy.name)


def judge_layer_in_float32(hazard: str, share: float, policy: str) -> Said | None:
    """It matters if the layer has much of the work."""
    if share < _LARGE_SHARE:
        return None
    return Said(
        hazard,
        f"{share:.0%} of the multiplications of the forward pass run in float32 here; its policy "
        f"is {policy}.",
        _OF_A_LAYER[hazard],
    )


def _is_variable(tensor: tf.Tensor) -> bool:
    """Whether a tensor comes from a read of a variable, and nothing has cast it."""
    return before(tensor, origins.MOVES).op.type == "ReadVariableOp"


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
    sizes = [tf.abs(widened(gradient)) for gradient in gradients]
    # What vanishes in a cast of the backward pass is 0 in all gradients behind it.
    gone = [
        count((each.outputs[0] == 0) & (each.inputs[0] != 0))
        for each in step.operations
        if each.type == "Cast" and origins.is_of_backward_pass(each.name)
        if each.outputs[0].dtype == tf.float16 and each.inputs[0].dtype == tf.float32
    ]
    yield Observed(
        "the training step",
        small=tf.add_n([count((size > 0) & (size < _SMALLEST_NORMAL)) for size in sizes] + gone),
        others=tf.add_n([count(size > 0) for size in sizes] + gone),
    )


def judge_small_gradients(small: int, others: int) -> Said | None:
    """Many numbers of gradients, apart from zeros, are below float16's normal numbers."""
    if not others or small < _MOST_SMALL * others:
        return None
    return Said(
        "float16 without loss scaling",
        f"{small / others:.0%} of the numbers in gradients, apart from those that are 0 in "
        "float32, too, are below 6e-5: there float16 loses digits, and below 6e-8 it is zero.",
        'Make the model under keras_mp.set_global_policy("mixed_float16"), whose loss scale keeps '
        "them large, or compile it with keras_mp.LossScaleOptimizer(optimizer).",
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
                factor = static_number(constant)
                if factor is None:
                    continue
                waiting.append(other)
                loss = tf.reduce_mean(widened(other))
                yield Observed(operation, factor=factor, loss=loss, scale=step.scale)


def judge_factor(factor: float, loss: float, scale: float) -> Said | None:
    """A power of two that is large is there to scale the loss."""
    if factor < _LIKE_A_LOSS_SCALE or not np.log2(factor).is_integer():
        return None
    return Said(
        "a loss multiplied by a number",
        f"The loss, {loss:.4g} for this batch, is multiplied by {factor:g}, and then by the loss "
        f"scale, {scale:g}. Only the latter is taken out of the gradients: they are {factor:g} "
        "times too large.",
        "Remove this factor: the loss scale has the same purpose. (For a larger step, change the "
        "learning rate.)",
    )


def clipping(step: TracedStep) -> Iterator[Observed]:
    """Gradients are clipped while they are still multiplied by the loss scale."""
    for operation in step.scaled:
        is_clipping = origins.is_made_in(operation, ("clip_ops.py",))
        if is_clipping and origins.maker_of(operation) == "user":
            gradient = next(tensor for tensor in operation.inputs if tensor.op in step.scaled)
            largest = tf.reduce_max(tf.abs(widened(gradient)))
            yield Observed(operation, largest=largest, scale=step.scale)
            return


def judge_clipping(largest: float, scale: float) -> Said:
    """The threshold depends on the scale."""
    return Said(
        "clipping before unscaling",
        f"Gradients are clipped while they are multiplied by the loss scale, {scale:g}: the "
        f"largest number of the first one is {largest:.3g} there, and {largest / scale:.3g} "
        "without it. So the threshold depends on the scale.",
        "Unscale first: optimizer.get_unscaled_gradients(gradients), then clip, then apply; or "
        "pass clipnorm, clipvalue or global_clipnorm to the optimizer.",
    )


def epsilon(step: TracedStep) -> Iterator[Observed]:
    """The optimizer divides by a root plus an epsilon that is 0 in the dtype of its variables."""
    optimizer = getattr(step.optimizer, "inner_optimizer", step.optimizer)
    number = getattr(optimizer, "epsilon", None)
    variables = [
        variable
        for variable in step.model.trainable_variables
        if isinstance(number, (int, float))
        and (dtype := tf.as_dtype(variable.dtype)).is_floating
        and np.array(number, dtype.as_numpy_dtype) == 0
    ]
    if variables:
        yield Observed(
            _the_optimizer(optimizer),
            epsilon=number,
            dtypes=sorted({tf.as_dtype(each.dtype).name for each in variables}),
            variables=len(variables),
            size=sum(math.prod(length or 0 for length in each.shape) for each in variables),
            bad=not_finite_of(variables),
        )


def judge_epsilon(
    epsilon: float, dtypes: Sequence[str], variables: int, size: int, bad: int
) -> Said | None:
    """In float32 it does no harm where every weight has a gradient."""
    in_16_bits = not set(dtypes).isdisjoint(LOW_PRECISION_NAMES)
    if not bad:
        return None
    return Said(
        EPSILON if in_16_bits else "an epsilon that is 0",
        f"Its epsilon, {epsilon:g}, is 0 in {' and '.join(dtypes)}, the dtype of {variables} "
        f"variables: after one step with this batch {bad:,} of their {size:,} numbers are not "
        "finite.",
        'Keep variables in float32 (the policy "mixed_float16"), or pass epsilon=1e-4.'
        if in_16_bits
        else "Pass an epsilon above 0, such as 1e-7.",
    )


def weights(step: TracedStep) -> Iterator[Observed]:
    """One step makes weights infinite or NaN, since it is not skipped."""
    variables = [v for v in step.model.trainable_variables if tf.as_dtype(v.dtype).is_floating]
    in_16_bits = any(o.outputs and o.outputs[0].dtype in LOW_PRECISION for o in step.forward)
    if step.optimizer is None or not variables or not in_16_bits or step.scaling is None:
        return
    gradients = [
        operation.outputs[0]
        for operation in step.operations
        if origins.is_of_backward_pass(operation.name)
        and operation.outputs
        and operation.outputs[0].dtype.is_floating
    ]
    yield Observed(
        _the_optimizer(step.optimizer),
        bad=not_finite_of(variables),
        scale=step.scale,
        loss_is_finite=tf.reduce_all(tf.math.is_finite(widened(step.scaling.inputs[0]))),
        bad_in_gradients=not_finite_of(gradients),
    )


def judge_weights(
    bad: int, scale: float, loss_is_finite: bool, bad_in_gradients: float
) -> Said | None:
    """Where all gradients are finite, it is the optimizer that makes the weights what they are."""
    if not bad or not loss_is_finite or not bad_in_gradients:
        return None
    return Said(
        "a step that cannot be skipped",
        f"Gradients overflow at the loss scale {scale:g}, and the step is not skipped: it makes "
        f"{bad:,} numbers of the weights infinite or NaN.",
        "Use a dynamic loss scale, which skips such a step and halves the scale, or a smaller "
        "fixed one.",
    )


def _the_optimizer(optimizer: object) -> str:
    return f"the optimizer ({type(optimizer).__name__})"
