"""Where did these probabilities come from? What fuses a cross entropy with its softmax.

RFC 293, "Softmax and cross entropy". The logarithm of a softmax is exact when it is computed from
the logits, and lost when the softmax has been rounded to 0 or 1 in between. A tensor of a graph
knows the operation that made it, so the way back to the logits can be walked. An eager tensor does
not; there Keras leaves the logits with the tensor that its softmax returns, and `cast` remembers
which tensor it has cast.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

# Keras's own, where it keeps probabilities from 0 and 1.
_EPSILON = 1e-7
# What changes no value, or only rounds it.
_KEEPS_VALUES = ("Cast", "Identity", "IdentityN", "CheckNumerics", "EnsureShape")
_KEEPS_ORDER = ("Reshape", "Squeeze", "ExpandDims")
_ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.nn.sigmoid}
# What people do to probabilities after the softmax and before the loss.
_ADJUSTS = (
    *_KEEPS_VALUES,
    *_KEEPS_ORDER,
    *("Add", "AddN", "AddV2", "ClipByValue", "ConcatV2", "DivNoNan", "Exp", "Log", "Log1p"),
    *("Maximum", "Mean", "Minimum", "Mul", "Neg", "Pow", "RealDiv", "SelectV2", "Sqrt", "Square"),
    *("StopGradient", "StridedSlice", "Sub", "Transpose"),
)


def cast(prediction: Any, dtype: str) -> Any:
    """Casts a floating-point tensor; what Keras has noted on it stays with it.

    Args:
        prediction: a tensor (a ragged, sparse or symbolic one, too), an array, or None.
        dtype: str. The floating-point dtype to cast to.

    Returns:
        A tensor of that dtype with the mask and the logits of `prediction`. None, and a tensor that
        is not of a floating-point dtype, come back as they are.

    Example:

    >>> from keras_mp import softmax_and_cross_entropy
    >>> softmax_and_cross_entropy.cast(tf.constant([0.5], tf.float16), "float32").dtype
    tf.float32

    Source: RFC 293, "Softmax and cross entropy".
    """
    if prediction is None:
        return None
    if not tf.is_tensor(prediction):
        prediction = tf.convert_to_tensor(prediction)
    if not prediction.dtype.is_floating or prediction.dtype == dtype:
        return prediction
    result = tf.cast(prediction, dtype)
    if _is_eager(result):
        result._keras_mp_cast_of = prediction
    if hasattr(prediction, "_keras_mask"):
        result._keras_mask = prediction._keras_mask
    if hasattr(prediction, "_keras_logits"):
        # Metrics of cross entropy look for it, as they do in a float32 model.
        result._keras_logits = tf.cast(prediction._keras_logits, dtype)
    return result


def widen(prediction: Any, dtype: str = "float32") -> Any:
    """Casts as `cast` does, but never to a narrower dtype.

    Args:
        prediction: as for `cast`.
        dtype: str. The floating-point dtype that is wide enough.

    Returns:
        `prediction` in `dtype`, or in its own dtype if that is as wide.

    Example:

    >>> from keras_mp import softmax_and_cross_entropy
    >>> softmax_and_cross_entropy.widen(tf.constant([0.5], tf.float64)).dtype
    tf.float64
    """
    own = getattr(prediction, "dtype", None)
    if own is None or tf.as_dtype(own).size >= tf.as_dtype(dtype).size:
        return prediction
    return cast(prediction, dtype)


def logits_of(predictions: Any, activation: str, axis: int = -1) -> tf.Tensor | None:
    """Finds the tensor of which an activation made the predictions.

    Casts, identities, transpositions and reshapes that keep the axis of the classes may lie between
    the activation and the predictions; the logits are returned as if they had gone the same way.

    Args:
        predictions: tensor, dense or ragged. What a loss was given.
        activation: str. `"Softmax"` or `"Sigmoid"`.
        axis: int. The axis along which the softmax must have been taken.

    Returns:
        A tensor of the shape of `predictions` and of the dtype in which the activation ran, or None
        if it was another activation, along another axis, or cannot be found.

    Example:

    >>> from keras_mp import softmax_and_cross_entropy
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
    return _logits_in_graph(predictions, activation, axis)


def ran_in_float16(predictions: Any) -> bool:
    """Were the predictions, or the softmax or sigmoid that they were made of, in float16?

    Args:
        predictions: tensor, dense or ragged. What a loss was given.

    Returns:
        bool. In eager only what `cast` has cast is known; False where nothing is.

    Example:

    >>> from keras_mp import softmax_and_cross_entropy
    >>> half = tf.constant([0.5], tf.float16)
    >>> softmax_and_cross_entropy.ran_in_float16(softmax_and_cross_entropy.cast(half, "float32"))
    True
    """
    if isinstance(predictions, tf.RaggedTensor):
        predictions = predictions.flat_values
    if not isinstance(predictions, tf.Tensor):
        return False
    if _is_eager(predictions):
        return _before_cast(predictions).dtype == tf.float16
    if any(tensor.dtype == tf.float16 for tensor in _way_back(predictions)):
        return True
    return any(
        tensor.dtype == tf.float16 and tensor.op.type in _ACTIVATIONS
        for tensor in _adjusted(predictions)
    )


def categorical_focal_crossentropy(
    y_true: tf.Tensor,
    logits: tf.Tensor,
    alpha: Any,
    gamma: float,
    label_smoothing: float,
    axis: int,
) -> tf.Tensor:
    """The focal cross entropy of `tf.keras`, computed from logits and never from their softmax.

    Args:
        y_true: tensor. Probabilities of the classes, of the shape and the dtype of `logits`.
        logits: floating-point tensor.
        alpha: number or list of numbers. Weight of all classes, or of each.
        gamma: number. Exponent of the focal factor, `1 - probability`.
        label_smoothing: number in [0, 1]. How much of the labels is spread over all classes.
        axis: int. Axis of the classes.

    Returns:
        Tensor of the shape of `logits` without the axis of the classes.

    Example:

    >>> from keras_mp import softmax_and_cross_entropy
    >>> softmax_and_cross_entropy.categorical_focal_crossentropy(
    ...     tf.constant([[0.0, 1.0]]), tf.constant([[50.0, 0.0]]), 0.25, 2.0, 0.0, axis=-1
    ... ).numpy()
    array([12.5], dtype=float32)

    Source: Lin et al. 2018, "Focal Loss for Dense Object Detection", eq. 5.
    """
    if label_smoothing:
        classes = tf.cast(tf.shape(y_true)[-1], y_true.dtype)
        y_true = y_true * (1.0 - label_smoothing) + label_smoothing / classes
    log_probabilities = tf.nn.log_softmax(logits, axis)
    # Below 1, so that an exponent below 1 has a finite gradient.
    probabilities = tf.minimum(tf.exp(log_probabilities), 1.0 - _EPSILON)
    factor = alpha * (1.0 - probabilities) ** gamma
    # A class that is masked by a logit of -inf counts for nothing if it has no label.
    losses = tf.math.multiply_no_nan(log_probabilities, y_true)
    return -tf.reduce_sum(factor * losses, axis)


def _is_eager(tensor: Any) -> bool:
    return isinstance(tensor, tf.__internal__.EagerTensor)


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


def _logits_in_graph(predictions: tf.Tensor, activation: str, axis: int) -> tf.Tensor | None:
    way = list(_way_back(predictions))
    made = way.pop()
    if made.op.type != activation or made.shape.rank is None:
        return None
    logits = made.op.inputs[0]
    at = made.shape.rank - 1
    for tensor in reversed(way):
        op = tensor.op
        if op.type == "Transpose":
            permutation = tf.get_static_value(op.inputs[1])
            if permutation is None:
                return None
            logits = tf.transpose(logits, permutation)
            at = None if at is None else list(permutation).index(at)
        elif op.type in _KEEPS_ORDER:
            at = _axis_after(op.inputs[0].shape, tensor.shape, at)
            logits = tf.reshape(logits, tf.shape(tensor))
    if activation == "Softmax" and at != axis:
        return None
    return tf.ensure_shape(logits, predictions.shape)


def _way_back(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yields a tensor of a graph, what it is only a cast or another shape of, and so on."""
    while True:
        yield tensor
        op = tensor.op
        is_same = op.type in (*_KEEPS_VALUES, *_KEEPS_ORDER, "Transpose")
        if not is_same or _has_own_gradient(op):
            return
        before = op.inputs[tensor.value_index if op.type == "IdentityN" else 0]
        if not before.dtype.is_floating:
            return
        tensor = before


def _has_own_gradient(op: tf.Operation) -> bool:
    try:
        op.get_attr("_gradient_op_type")
    except ValueError:
        return False
    return True


def _axis_after(before: tf.TensorShape, after: tf.TensorShape, axis: int | None) -> int | None:
    """Where is an axis after a reshape? None if it is not there any more, or nobody knows."""
    if axis is None or before.rank is None or after.rank is None or before[axis] is None:
        return None
    inner = before[axis + 1 :].num_elements()
    for candidate in range(after.rank):
        if after[candidate] == before[axis] and after[candidate + 1 :].num_elements() == inner:
            return candidate if inner is not None else None
    return None


def _adjusted(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yields the tensors that a tensor was made of by arithmetic alone."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        yield tensor
        if tensor.op.type in _ADJUSTS:
            waiting.extend(tensor.op.inputs)
