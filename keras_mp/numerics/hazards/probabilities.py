"""Softmax, sigmoid and losses in 16 bits."""

from collections.abc import Iterator

import tensorflow as tf

from keras_mp import kernels
from keras_mp.numerics.causes import Observed, Said
from keras_mp.numerics.distances import UNIT_ROUNDOFF
from keras_mp.numerics.hazards.traced_step import TracedStep, widened
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION

# Operations between probabilities and the logarithm of a cross entropy.
_ON_THE_WAY = op_table.ops(
    *("casts", "identities", "reshapes", "maxima of two", "additions"),
    *("divisions", "divisions without NaN", "moves", "views"),
)
# In nats. A probability that is 5 % off.
_TOO_FAR = 0.05
# As Keras clips probabilities before it takes logarithms.
_SMALLEST = 1e-7
_CROSS_ENTROPIES = {
    "SparseSoftmaxCrossEntropyWithLogits": tf.nn.sparse_softmax_cross_entropy_with_logits,
    "SoftmaxCrossEntropyWithLogits": tf.nn.softmax_cross_entropy_with_logits,
}


def before_a_logarithm(step: TracedStep) -> Iterator[Observed]:
    """A loss takes the logarithm of probabilities that 16 bits have rounded."""
    for operation, probabilities in _probabilities(step):
        if step.leads_to(probabilities, ("Log", "Log1p"), _ON_THE_WAY, steps=12) is None:
            continue
        wide, logits = widened(probabilities), widened(operation.inputs[0])
        is_true = _labels(step, wide)
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


def _labels(step: TracedStep, probabilities: tf.Tensor) -> tf.Tensor | None:
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


def sums(step: TracedStep) -> Iterator[Observed]:
    """Probabilities do not add up to 1, since their sum was made in 16 bits."""
    for operation in step.in_16_bits(("Softmax",)):
        output = operation.outputs[0]
        total = tf.reduce_sum(widened(output), -1)
        off = tf.where(tf.math.is_finite(total), tf.abs(total - 1.0), 0.0)
        numbers = {"dtype": output.dtype.name, "length": output.shape[-1]}
        yield Observed(operation, **numbers, worst=tf.reduce_max(off))


def judge_sum(dtype: str, length: int | None, worst: float) -> Said | None:
    """Rounding each of them explains less."""
    if worst < 16 * UNIT_ROUNDOFF[dtype]:
        return None
    return Said(
        "a softmax in 16 bits",
        f"A softmax over {length} values in {dtype} returns probabilities whose sum is up to "
        f"{worst:.2g} away from 1: it adds up in {dtype}.",
        'Give the softmax a layer of its own with dtype="float32", or cast its inputs to float32.',
    )


def cross_entropies(step: TracedStep) -> Iterator[Observed]:
    """A cross entropy is computed in 16 bits."""
    for operation in step.in_16_bits(_CROSS_ENTROPIES):
        (logits, labels), output = operation.inputs, operation.outputs[0]
        labels = widened(labels) if labels.dtype in LOW_PRECISION else labels
        right = _CROSS_ENTROPIES[operation.type](labels=labels, logits=widened(logits))
        loss, exact = tf.reduce_mean(widened(output)), tf.reduce_mean(right)
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
