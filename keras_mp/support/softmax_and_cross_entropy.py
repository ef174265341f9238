"""Finds the logits of probabilities, so a cross entropy fuses with its softmax.

RFC 293, "Softmax and cross entropy". The logarithm of a softmax is exact when it is computed from
the logits, and lost when the softmax has been rounded to 0 or 1 in between. A tensor of a graph
knows the operation that made it, so the way back to the logits can be walked. An eager tensor does
not; there Keras leaves the logits with the tensor that its softmax returns, and
`marks.cast_prediction` remembers which tensor it has cast.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.support import op_table

# Keras clips probabilities to [_EPSILON, 1 - _EPSILON].
_EPSILON = 1e-7
# A little less than the largest loss that this clipping allows, since Keras rounds.
_CUT_OFF = -0.99 * math.log(_EPSILON)
# Operations that change no value, or only round it.
_KEEPS_VALUES = op_table.ops(
    *("casts", "identities", "identities of lists", "identities that check")
)
_KEEPS_ORDER = op_table.ops("reshapes")
_ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.nn.sigmoid}
_STATIC = {
    "AddV2": np.add,
    "ConcatV2": lambda *inputs: np.concatenate(inputs[:-1]),
    "Pack": lambda *inputs: np.stack(inputs),
    "Range": np.arange,
    "Sub": np.subtract,
}
# Operations by which programs adjust probabilities after the softmax and before the loss.
_ADJUSTS = op_table.ops(
    *(*op_table.SAME_NUMBERS, "identities that check", "interpolations"),
    *("sums over axes", "sums of tensors", "products over axes", "maxima over axes"),
    *("average pooling", "max pooling", "additions", "multiplications", "squares", "powers"),
    *("divisions", "divisions without NaN", "reciprocals", "roots", "exponentials", "logarithms"),
    *("maxima of two", "selections", "signs"),
)


def logits_of(predictions: Any, activation: str, axis: int = -1) -> tf.Tensor | None:
    """Returns the tensor from which an activation computed the predictions.

    Casts, identities, transpositions, and reshapes, stacks and concatenations that keep the axis of
    the classes may lie between the activation and the predictions; the logits are returned as if
    they had gone the same way.

    Args:
        predictions: tensor, dense or ragged. The predictions that a loss was given.
        activation: str. `"Softmax"` or `"Sigmoid"`.
        axis: int. The axis along which the softmax must have been taken.

    Returns:
        A tensor of the shape of `predictions` and of the dtype in which the activation ran, or None
        if it was another activation, along another axis, or cannot be found.

    Example:

    >>> from keras_mp.support import softmax_and_cross_entropy
    >>> @tf.function
    ... def back_to_logits(logits):
    ...     probabilities = tf.cast(tf.nn.softmax(logits), "float16")
    ...     return softmax_and_cross_entropy.logits_of(probabilities, "Softmax")
    >>> back_to_logits(tf.constant([50.0, 0.0])).numpy()
    array([50.,  0.], dtype=float32)

    Source: RFC 293, "Softmax and cross entropy".
    """
    if isinstance(predictions, tf.RaggedTensor):
        is_last = axis in (
            -1,
            None if predictions.shape.rank is None else predictions.shape.rank - 1,
        )
        logits = logits_of(predictions.flat_values, activation) if is_last else None
        return None if logits is None else predictions.with_flat_values(logits)
    if not isinstance(predictions, tf.Tensor) or predictions.shape.rank is None:
        return None
    axis %= predictions.shape.rank or 1
    if _is_eager(predictions):
        return _logits_in_eager(predictions, activation, axis)
    logits, along = _logits_in_graph(predictions, activation)
    return None if activation == "Softmax" and along != axis else logits


def ran_in_float16(predictions: tf.Tensor | tf.RaggedTensor, activation: str) -> bool:
    """Whether predictions, or the activation that made them, were in float16.

    Args:
        predictions: tensor, dense or ragged. The predictions that a loss was given.
        activation: str. `"Softmax"` or `"Sigmoid"`.

    Returns:
        bool. In eager only what `marks.cast_prediction` has cast is known; False where nothing is.

    Example:

    >>> from keras_mp.support import marks, softmax_and_cross_entropy
    >>> half = tf.constant([0.5], tf.float16)
    >>> wide = marks.cast_prediction(half, "float32")
    >>> softmax_and_cross_entropy.ran_in_float16(wide, "Softmax")
    True
    """
    if isinstance(predictions, tf.RaggedTensor):
        predictions = predictions.flat_values
    if not isinstance(predictions, tf.Tensor):
        return False
    if _is_eager(predictions):
        return _before_cast(predictions).dtype == tf.float16
    same = predictions
    while same is not None:
        if same.dtype == tf.float16:
            return True
        same = _before(same)
    return any(
        tensor.dtype == tf.float16 and tensor.op.type == activation
        for tensor in _adjusted(predictions)
    )


def lost_to_float16(labels: tf.Tensor, predictions: tf.Tensor, losses: tf.Tensor) -> bool:
    """Whether values show that probabilities in float16 cut off a cross entropy.

    An eager tensor that a layer has cast does not tell its former dtype. But if a true class has a
    probability of 0 and all others are numbers of float16, a wider softmax made none of them.

    Args:
        labels: tensor. Class ids, or labels of the shape of `predictions`.
        predictions: tensor of probabilities, dense or ragged, of float32 or float64.
        losses: tensor. The cross entropies that were computed from them.

    Returns:
        bool. False in a graph, whose tensors have no values yet.

    Example:

    >>> from keras_mp.support import softmax_and_cross_entropy
    >>> lost, label = tf.constant([[1.0, 0.0]]), tf.constant([[0.0, 1.0]])
    >>> softmax_and_cross_entropy.lost_to_float16(label, lost, tf.constant([16.118]))
    True
    """
    if not (_is_eager(predictions) and _is_eager(losses)) or predictions.dtype.size < 4:
        return False
    is_cut_off = tf.reduce_any(losses >= _CUT_OFF)
    if _is_eager(labels) and labels.shape == predictions.shape and labels.dtype.is_floating:
        is_cut_off |= tf.reduce_any(tf.abs(labels - tf.cast(predictions, labels.dtype)) == 1)
    if not is_cut_off:
        return False
    return bool(
        tf.reduce_all(tf.cast(tf.cast(predictions, "float16"), predictions.dtype) == predictions)
    )


def finite(logits: tf.Tensor) -> tf.Tensor:
    """Replaces a logit of -inf by the lowest finite number.

    Such a logit is what float16 makes of the -1e9 of a mask. A class that a mask excludes costs 0
    times its logit, which is NaN where the logit is infinite.

    Args:
        logits: floating-point tensor, dense or ragged.

    Returns:
        Tensor of the same dtype without -inf.

    Example:

    >>> from keras_mp.support import softmax_and_cross_entropy
    >>> softmax_and_cross_entropy.finite(tf.constant([-1e9, 1], tf.float16)).numpy()
    array([-6.55e+04,  1.00e+00], dtype=float16)
    """
    return tf.maximum(logits, tf.constant(logits.dtype.min, logits.dtype))


def categorical_focal_crossentropy(
    y_true: tf.Tensor,
    logits: tf.Tensor,
    alpha: float | Sequence[float],
    gamma: float,
    label_smoothing: float,
    axis: int,
) -> tf.Tensor:
    """Computes the focal cross entropy of `tf.keras` from logits.

    It never uses their softmax.

    Args:
        y_true: tensor. Probabilities of the classes, of the shape and the dtype of `logits`.
        logits: floating-point tensor, dense or ragged.
        alpha: number or list of numbers. Weight of all classes, or of each.
        gamma: number. Exponent of the focal factor, `1 - probability`.
        label_smoothing: number in [0, 1]. How much of the labels is spread over all classes.
        axis: int. Axis of the classes.

    Returns:
        Tensor of the shape of `logits` without the axis of the classes.

    Example:

    >>> from keras_mp.support import softmax_and_cross_entropy
    >>> softmax_and_cross_entropy.categorical_focal_crossentropy(
    ...     tf.constant([[0.0, 1.0]]), tf.constant([[50.0, 0.0]]), 0.25, 2.0, 0.0, axis=-1
    ... ).numpy()
    array([12.5], dtype=float32)

    Source: Lin et al. 2018, "Focal Loss for Dense Object Detection", eq. 5.
    """
    if isinstance(logits, tf.RaggedTensor):
        options = {"alpha": alpha, "gamma": gamma, "label_smoothing": label_smoothing, "axis": -1}
        focal = functools.partial(categorical_focal_crossentropy, **options)
        return tf.ragged.map_flat_values(focal, y_true, logits)
    if label_smoothing:
        classes = tf.cast(tf.shape(y_true)[-1], y_true.dtype)
        y_true = y_true * (1.0 - label_smoothing) + label_smoothing / classes
    log_probabilities = tf.nn.log_softmax(logits, axis)
    # Below 1, so that an exponent below 1 has a finite gradient.
    probabilities = tf.minimum(tf.exp(log_probabilities), 1.0 - _EPSILON)
    factor = alpha * (1.0 - probabilities) ** gamma
    return -tf.reduce_sum(factor * log_probabilities * y_true, axis)


def _is_eager(tensor: tf.Tensor) -> bool:
    return not tf.is_symbolic_tensor(tensor)


def _before_cast(tensor: tf.Tensor) -> tf.Tensor:
    return getattr(tensor, "_keras_mp_cast_of", tensor)


def _logits_in_eager(predictions: tf.Tensor, activation: str, axis: int) -> tf.Tensor | None:
    predictions = _before_cast(predictions)
    logits = getattr(predictions, "_keras_logits", None)
    if logits is None or logits.shape != predictions.shape:
        return None
    # Keras notes logits in the same way for both activations, and not along which axis.
    along = {"axis": axis} if activation == "Softmax" else {}
    again = tf.cast(_ACTIVATIONS[activation](logits, **along), predictions.dtype)
    is_same = (again == predictions) | tf.math.is_nan(predictions)
    return logits if tf.reduce_all(is_same) else None


def _logits_in_graph(tensor: tf.Tensor, activation: str) -> tuple[tf.Tensor | None, int | None]:
    """Returns a tensor's logits in its shape, and along which axis the softmax went.

    The axis is None where a reshape has broken it up. A sigmoid has none, and needs none.
    """
    op, rank = tensor.op, tensor.shape.rank
    if rank is None:
        return None, None
    if op.type == activation:
        return op.inputs[0], rank - 1
    if op.type in ("Pack", "ConcatV2"):
        return _logits_of_parts(tensor, activation)
    before = _before(tensor)
    if before is None:
        return None, None
    logits, axis = _logits_in_graph(before, activation)
    if logits is None:
        return None, None
    if op.type == "Transpose":
        permutation = _static_value(op.inputs[1])
        if permutation is None:
            return None, None
        logits = tf.transpose(logits, permutation)
        axis = None if axis is None else list(permutation).index(axis)
    elif op.type in _KEEPS_ORDER:
        axis = _axis_after(before.shape, tensor.shape, axis)
        logits = tf.reshape(logits, tf.shape(tensor))
    return tf.ensure_shape(logits, tensor.shape), axis


def _logits_of_parts(tensor: tf.Tensor, activation: str) -> tuple[tf.Tensor | None, int | None]:
    """Does the same as `_logits_in_graph` for a tensor that was put together."""
    op, rank = tensor.op, tensor.shape.rank
    is_stack = op.type == "Pack"
    along = op.get_attr("axis") if is_stack else _static_value(op.inputs[-1])
    parts = op.inputs if is_stack else list(op.inputs)[:-1]
    if along is None:
        return None, None
    along = int(along) % rank
    logits, axes = zip(*(_logits_in_graph(part, activation) for part in parts))
    dtypes = {None if each is None else each.dtype for each in logits}
    if None in dtypes or len(dtypes) > 1:
        return None, None
    axis = axes[0] if len(set(axes)) == 1 else None
    if is_stack:
        axis = None if axis is None else axis + (along <= axis)
        return tf.stack(logits, along), axis
    return tf.concat(logits, along), None if axis == along else axis


def _before(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the input of an operation that only casts or moves values; else None."""
    op = tensor.op
    is_same = op.type in _KEEPS_VALUES | _KEEPS_ORDER | {"Transpose"}
    if not is_same or _has_own_gradient(op):
        return None
    before = op.inputs[tensor.value_index if op.type == "IdentityN" else 0]
    return before if before.dtype.is_floating else None


def _has_own_gradient(op: tf.Operation) -> bool:
    try:
        op.get_attr("_gradient_op_type")
    except ValueError:
        return False
    return True


def _static_value(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns the value of a tensor of a graph, if it is the same in each run."""
    value = tf.get_static_value(tensor)
    if value is not None or tensor.op.type not in _STATIC:
        return value
    # TensorFlow's own way of exchanging two axes, when a softmax is not along the last one.
    inputs = [_static_value(each) for each in tensor.op.inputs]
    return None if any(each is None for each in inputs) else _STATIC[tensor.op.type](*inputs)


def _axis_after(before: tf.TensorShape, after: tf.TensorShape, axis: int | None) -> int | None:
    """Returns where an axis is after a reshape.

    It is None if the axis is gone, or if that is not known.
    """
    if axis is None or before.rank is None or after.rank is None or before[axis] is None:
        return None
    inner = before[axis + 1 :].num_elements()
    for candidate in range(after.rank):
        if after[candidate] == before[axis] and after[candidate + 1 :].num_elements() == inner:
            return candidate if inner is not None else None
    return None


def _adjusted(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yields the tensors that a tensor was made of by arithmetic alone."""
    waiting, visited = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        if tensor.ref() in visited:
            continue
        visited.add(tensor.ref())
        yield tensor
        if tensor.op.type in _ADJUSTS:
            waiting.extend(tensor.op.inputs)
