"""The notes of Keras on tensors: the mask of a sequence, the logits of a softmax."""

from typing import Any

import tensorflow as tf

from keras_mp.support.dtypes import FLOATING


def copy(source: Any, result: Any) -> Any:
    """Puts the notes of Keras on a tensor on another one that was computed from it.

    Args:
        source: tensor.
        result: another tensor of its shape. Logits come in its dtype.

    Returns:
        `result`.
    """
    if hasattr(source, "_keras_mask"):
        result._keras_mask = source._keras_mask
    if hasattr(source, "_keras_logits"):
        # Losses and metrics of cross entropy look for this attribute.
        result._keras_logits = tf.cast(source._keras_logits, result.dtype)
    return result


def cast(tensor: Any, dtype: tf.DType | str) -> Any:
    """Casts a floating-point tensor. The notes of Keras on it stay with it.

    Args:
        tensor: a tensor (a ragged, sparse or symbolic one, too) or a variable.
        dtype: DType or str. The floating-point dtype to cast to.

    Returns:
        A tensor of that dtype. One that has the dtype, or is not of a floating-point dtype, comes
        back as it is.
    """
    if tensor.dtype == dtype or tensor.dtype not in FLOATING:
        return tensor
    return copy(tensor, tf.cast(tensor, dtype))
