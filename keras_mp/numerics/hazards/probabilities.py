"""Softmax, sigmoid and losses in 16 bits."""

from collections.abc import Iterator

import tensorflow as tf

from keras_mp import kernels
from keras_mp.numerics.hazards.traced_step import UNIT_ROUNDOFF, Suspect, TracedStep, widened
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


def softmax_before_a_logarithm(traced: TracedStep) -> Iterator[Suspect]:
    """A loss takes the logarithm of probabilities that 16 bits have rounded."""
    for operation, probabilities in _probabilities(traced):
        if traced.leads_to(probabilities, ("Log", "Log1p"), _ON_THE_WAY, steps=12) is not None:
            yield _before_a_logarithm(traced, operation, probabilities)


def _before_a_logarithm(
    traced: TracedStep, operation: tf.Operation, probabilities: tf.Tensor
) -> Suspect:
    logits, wide = widened(operation.inputs[0]), widened(probabilities)
    is_true = _labels(traced, wide)
    if is_true is None:
        return None
    if operation.type == "Softmax":
        exact, of_label = tf.nn.log_softmax(logits), wide
    else:
        exact = tf.where(is_true, tf.math.log_sigmoid(logits), tf.math.log_sigmoid(-logits))
        of_label = tf.where(is_true, wide, 1.0 - wide)
        is_true = tf.ones_like(is_true)
    errors = tf.abs(tf.math.log(tf.clip_by_value(of_label, _SMALLEST, 1.0)) - exact)
    [worst] = yield [tf.reduce_max(tf.where(is_true, errors, 0.0))]
    if worst < _TOO_FAR:
        return None
    return traced.finding(
        operation,
        f"a {operation.type.lower()} in 16 bits",
        f"The loss takes the logarithm of what a {operation.type.lower()} returns in "
        f"{probabilities.dtype.name}: for a label of this batch it is {worst:.3g} away from that "
        "of float32.",
        "Return logits and use a loss with from_logits=True, or give the activation "
        'dtype="float32". A loss of keras_mp.losses computes it from the logits by itself.',
    )


def _probabilities(traced: TracedStep) -> Iterator[tuple[tf.Operation, tf.Tensor]]:
    """Yields each softmax and sigmoid in 16 bits, and what it returns.

    Where a kernel of keras_mp computes it in float32 inside, that is the cast of the result.
    """
    for operation in traced.forward:
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


def _labels(traced: TracedStep, probabilities: tf.Tensor) -> tf.Tensor | None:
    """Returns where a probability is that of the true class, by the labels of the batch."""
    shape = probabilities.shape
    for labels in tf.nest.flatten(traced.batch.y):
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


def softmax_that_does_not_add_up(traced: TracedStep) -> Iterator[Suspect]:
    """Probabilities do not add up to 1, since their sum was made in 16 bits."""
    for operation in traced.in_16_bits(("Softmax",)):
        yield _sum_of_probabilities(traced, operation)


def _sum_of_probabilities(traced: TracedStep, operation: tf.Operation) -> Suspect:
    output = operation.outputs[0]
    total = tf.reduce_sum(widened(output), -1)
    off = tf.where(tf.math.is_finite(total), tf.abs(total - 1.0), 0.0)
    [worst] = yield [tf.reduce_max(off)]
    if worst < 16 * UNIT_ROUNDOFF[output.dtype]:
        return None
    return traced.finding(
        operation,
        "a softmax in 16 bits",
        f"A softmax over {output.shape[-1]} values in {output.dtype.name} returns probabilities "
        f"whose sum is up to {worst:.2g} away from 1: it adds up in {output.dtype.name}.",
        'Give the softmax a layer of its own with dtype="float32", or cast its inputs to float32.',
    )


def loss_in_16_bits(traced: TracedStep) -> Iterator[Suspect]:
    """A cross entropy is computed in 16 bits."""
    for operation in traced.in_16_bits(_CROSS_ENTROPIES):
        yield _cross_entropy(traced, operation)


def _cross_entropy(traced: TracedStep, operation: tf.Operation) -> Suspect:
    (logits, labels), output = operation.inputs, operation.outputs[0]
    labels = widened(labels) if labels.dtype in LOW_PRECISION else labels
    right = _CROSS_ENTROPIES[operation.type](labels=labels, logits=widened(logits))
    loss, exact = yield tf.reduce_mean(widened(output)), tf.reduce_mean(right)
    if abs(loss - exact) <= 4 * UNIT_ROUNDOFF[output.dtype] * abs(exact):
        return None
    return traced.finding(
        operation,
        "a loss in 16 bits",
        f"The cross entropy is computed in {output.dtype.name}, where its mean is {loss:.6g}; in "
        f"float32 it is {exact:.6g}.",
        "Cast the inputs of the loss to float32, or use a loss of keras_mp.losses.",
    )
