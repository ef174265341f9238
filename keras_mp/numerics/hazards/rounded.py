"""What is lost before the first product, or beside the gradients: inputs, ids, and weights."""

from collections.abc import Iterator

import tensorflow as tf

from keras_mp.numerics.distances import UNIT_ROUNDOFF
from keras_mp.numerics.hazards.traced_step import (
    MOST_VARIANCE,
    Observed,
    Said,
    TracedStep,
    count,
    share_of_variance,
    widened,
)
from keras_mp.support.dtypes import LOW_PRECISION

_FEW = 8
_SAME = ("Identity", "Cast", "Reshape", "ExpandDims", "Squeeze")


def inputs(step: TracedStep) -> Iterator[Observed]:
    """Numbers of the batch are rounded to 16 bits, and what tells them apart is lost."""
    for operation in step.forward:
        if operation.type != "Cast" or operation.outputs[0].dtype not in LOW_PRECISION:
            continue
        source, rounded = operation.inputs[0], operation.outputs[0]
        size, rank = source.shape.num_elements(), source.shape.rank
        if _source(source).op.type != "Placeholder" or not size or rank < 2:
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
            _in_a_layer(step, takers),
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


def _in_a_layer(step: TracedStep, takers: list[tf.Operation]) -> tf.Operation:
    """Returns the first operation in a layer among those that a tensor goes to, or the first."""
    first = takers[0]
    for _ in range(3):  # Models cast and reshape inputs before a layer gets them.
        for taker in takers:
            if step.layers.name(taker.name):
                return taker
        takers = [after for each in takers for out in each.outputs for after in out.consumers()]
    return first


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that another one has the values of."""
    while tensor.op.type in ("Identity", "ExpandDims") or (
        tensor.op.type == "Cast" and tensor.dtype not in LOW_PRECISION
    ):
        tensor = tensor.op.inputs[0]
    return tensor


def written_weights(step: TracedStep) -> Iterator[Observed]:
    """A layer assigns to a float32 weight what it computed from 16 bits."""
    for operation in step.forward:
        if operation.type != "AssignVariableOp" or operation.inputs[0].ref() not in step.trained:
            continue
        value = source = operation.inputs[1]
        while source.op.type in _SAME and source.dtype not in LOW_PRECISION:
            source = source.op.inputs[0]
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
