"""The notes of Keras on tensors: the mask of a sequence, the logits of a softmax."""

from typing import Any

import tensorflow as tf

from keras_mp.support.dtypes import FLOATING


def copy(source: Any, result: Any) -> Any:
    """Puts Keras's notes on a tensor also on another one that was computed from it.

    Args:
        source: tensor.
        result: another tensor of the same shape. It gets logits in its dtype.

    Returns:
        `result`.
    """
    if hasattr(source, "_keras_mask"):
        result._keras_mask = source._keras_mask
    return copy_logits(source, result)


def copy_logits(source: Any, result: Any) -> Any:
    """As `copy`, without the mask, which is only of what a layer returns."""
    if hasattr(source, "_keras_logits"):
        # Losses and metrics of cross entropy look for this attribute.
        result._keras_logits = tf.cast(source._keras_logits, result.dtype)
    return result


def cast(tensor: Any, dtype: tf.DType | str) -> Any:
    """Casts a floating-point tensor, which keeps the notes of Keras on it.

    Args:
        tensor: a tensor (also a ragged, sparse or symbolic one) or a variable.
        dtype: DType or str. The floating-point dtype to cast to.

    Returns:
        The tensor in that dtype. A tensor that has the dtype already, or is not floating, is
        returned as it is.
    """
    if tensor.dtype == dtype or tensor.dtype not in FLOATING:
        return tensor
    return copy(tensor, tf.cast(tensor, dtype))


def cast_prediction(prediction: Any, dtype: str) -> Any:
    """Casts a floating-point tensor. What Keras has noted on it stays with it.

    An eager result remembers the tensor, so that a loss finds its logits.

    Args:
        prediction: a tensor (a ragged, sparse or symbolic one, too), an array, or None.
        dtype: str. The floating-point dtype to cast to.

    Returns:
        A tensor of that dtype with the mask and the logits of `prediction`. None, and a tensor that
        is not of a floating-point dtype, come back as they are.

    Example:

    >>> from keras_mp.support import marks
    >>> marks.cast_prediction(tf.constant([0.5], tf.float16), "float32").dtype
    tf.float32

    Source: RFC 293, "Softmax and cross entropy".
    """
    if prediction is None:
        return None
    if not tf.is_tensor(prediction):
        prediction = tf.convert_to_tensor(prediction)
    result = cast(prediction, dtype)
    if result is not prediction and not tf.is_symbolic_tensor(result):
        result._keras_mp_cast_of = prediction
    return result


def widen(prediction: Any, dtype: str = "float32") -> Any:
    """Casts as `cast_prediction` does, but never to a narrower dtype.

    Args:
        prediction: as for `cast_prediction`.
        dtype: str. The floating-point dtype that is wide enough.

    Returns:
        `prediction` in `dtype`, or in its own dtype if that is as wide.

    Example:

    >>> from keras_mp.support import marks
    >>> marks.widen(tf.constant([0.5], tf.float64)).dtype
    tf.float64
    """
    own = getattr(prediction, "dtype", None)
    if own is None or tf.as_dtype(own).size >= tf.as_dtype(dtype).size:
        return prediction
    return cast_prediction(prediction, dtype)
