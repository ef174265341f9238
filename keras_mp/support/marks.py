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
