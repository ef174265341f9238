"""The hazard of weights in 16 bits: updates that are too small for them."""

import tensorflow as tf

from keras_mp import low_precision_weights
from keras_mp.numerics.hazards.traced_step import Suspect, TracedStep, count
from keras_mp.numerics.results import Finding
from keras_mp.support.dtypes import LOW_PRECISION

# Rounding loses some updates everywhere.
_MOST_LOST = 0.1


def updates_that_are_lost(traced: TracedStep) -> Suspect:
    """Weights in 16 bits do not move, though they have gradients."""
    optimizer = getattr(traced.model, "optimizer", None)
    if optimizer is None or low_precision_weights.keeps_digits(optimizer):
        return None
    of_shapes = {tuple(gradient.shape): gradient for gradient in traced.backward_products}
    measured = []
    for variable in traced.model.trainable_variables:
        gradient = of_shapes.get(tuple(variable.shape))
        before = _value_before_the_step(traced, variable)
        if tf.as_dtype(variable.dtype) not in LOW_PRECISION or gradient is None or before is None:
            continue
        has_gradient = tf.not_equal(gradient, 0)
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
