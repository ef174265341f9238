"""What is lost before the first product, or beside the gradients: inputs, ids, and weights."""

from collections.abc import Iterator

import tensorflow as tf

from keras_mp.numerics.hazards.traced_step import (
    MOST_VARIANCE,
    UNIT_ROUNDOFF,
    Suspect,
    TracedStep,
    count,
    widened,
)
from keras_mp.support.dtypes import LOW_PRECISION

_FEW = 8
_SAME = ("Identity", "Cast", "Reshape", "ExpandDims", "Squeeze")


def inputs_that_are_rounded(traced: TracedStep) -> Iterator[Suspect]:
    """Numbers of the batch are rounded to 16 bits, and what tells them apart is lost."""
    for operation in traced.forward:
        if operation.type != "Cast" or operation.outputs[0].dtype not in LOW_PRECISION:
            continue
        source, rounded = operation.inputs[0], operation.outputs[0]
        size, rank = source.shape.num_elements(), source.shape.rank
        if _source(source).op.type != "Placeholder" or not size or rank < 2:
            continue
        takers = [taker for taker in rounded.consumers() if taker in traced.forward]
        # A few numbers may be close to one another by chance.
        if not takers or size < _FEW * (source.shape[-1] or 1):
            continue
        yield _rounded_input(traced, source, rounded, takers)


def _rounded_input(
    traced: TracedStep, source: tf.Tensor, rounded: tf.Tensor, takers: list[tf.Operation]
) -> Suspect:
    wide, near = widened(source), widened(rounded)
    rows = list(range(source.shape.rank - 1))
    error = tf.reduce_mean(tf.square(wide - near), rows)
    variance = tf.math.reduce_variance(wide, rows)
    # A constant tells nothing apart.
    varies = variance > 1e-10 * tf.reduce_mean(tf.square(wide), rows)
    shares = tf.where(varies, tf.math.divide_no_nan(error, variance), 0.0)
    whole = _cast_to_integers(traced, rounded)
    ids = tf.int64 if whole is None else whole.outputs[0].dtype
    are_others = (tf.cast(wide, ids) != tf.cast(near, ids)) & tf.math.is_finite(near)
    lost, infinite, others, largest = yield (
        tf.reduce_max(shares),
        count(tf.math.is_inf(near)),
        count(are_others),
        tf.reduce_max(tf.abs(wide)),
    )
    if infinite:
        return None  # `not_finite` reports them.
    if whole is not None and others:
        what = f"{others:,} become other integers"
    elif whole is None and lost > MOST_VARIANCE:
        what = f"up to {lost:.1%} of the variance of a column is lost"
    else:
        return None
    return traced.finding(
        _in_a_layer(traced, takers),
        "inputs that are rounded",
        f"Of this batch, whose numbers go up to {largest:.6g}, {what} when they are rounded to "
        f"{rounded.dtype.name}.",
        "Standardize them before the model, start it with a layer that reads raw numbers "
        '(Normalization, Rescaling, Embedding), or give this layer dtype="float32".',
    )


def _in_a_layer(traced: TracedStep, takers: list[tf.Operation]) -> tf.Operation:
    """Returns the first operation in a layer among those that a tensor goes to, or the first."""
    first = takers[0]
    for _ in range(3):  # Models cast and reshape inputs before a layer gets them.
        for taker in takers:
            if traced.layers.name(taker.name):
                return taker
        takers = [after for each in takers for out in each.outputs for after in out.consumers()]
    return first


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that another one has the values of."""
    while tensor.op.type in ("Identity", "ExpandDims") or _is_widening(tensor.op):
        tensor = tensor.op.inputs[0]
    return tensor


def _is_widening(operation: tf.Operation) -> bool:
    return operation.type == "Cast" and operation.outputs[0].dtype not in LOW_PRECISION


def _cast_to_integers(traced: TracedStep, tensor: tf.Tensor) -> tf.Operation | None:
    taker = traced.leads_to(tensor, ("Cast",), ("Identity",), steps=2)
    return taker if taker is not None and taker.outputs[0].dtype.is_integer else None


def weights_written_in_16_bits(traced: TracedStep) -> Iterator[Suspect]:
    """A layer assigns to a float32 weight what it computed from 16 bits."""
    for operation in traced.forward:
        if operation.type != "AssignVariableOp" or operation.inputs[0].ref() not in traced.trained:
            continue
        value = operation.inputs[1]
        source = value
        while source.op.type in _SAME and source.dtype not in LOW_PRECISION:
            source = source.op.inputs[0]
        if value.dtype == tf.float32 and source.dtype in LOW_PRECISION:
            yield _written_weight(traced, operation, source.dtype)


def _written_weight(traced: TracedStep, operation: tf.Operation, dtype: tf.DType) -> Suspect:
    [largest] = yield [tf.reduce_max(tf.abs(operation.inputs[1]))]
    return traced.finding(
        operation,
        "a weight that is written in 16 bits",
        f"What is assigned to a float32 weight, numbers up to {largest:.3g}, was computed in "
        f"{dtype.name}: updates of less than {UNIT_ROUNDOFF[dtype]:.2%} of a number are lost in "
        "each step.",
        'Compute what is assigned in float32: give this layer dtype="float32", or read the weight '
        "in keras_mp.autocast_scope(None).",
    )
