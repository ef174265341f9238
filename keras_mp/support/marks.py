"""What Keras notes on tensors: the mask of a sequence, the logits of a softmax."""

from typing import Any

import tensorflow as tf

from keras_mp.support.dtypes import FLOATING


def cast(tensor: Any, dtype: tf.DType | str) -> Any:
    """Casts a floating-point tensor. What Keras has noted on it stays with it.

    Args:
        tensor: a tensor (a ragged, sparse or symbolic one, too) or a variable.
        dtype: DType or str. The floating-point dtype to cast to.

    Returns:
        A tensor of that dtype with the mask of `tensor`, and its logits in that dtype. A tensor
        that has the dtype, or is not of a floating-point one, comes back as it is.
    """
    if tensor.dtype == dtype or tensor.dtype not in FLOATING:
        return tensor
    result: Any = tf.cast(tensor, dtype)
    if hasattr(tensor, "_keras_mask"):
        result._keras_mask = tensor._keras_mask
    if hasattr(tensor, "_keras_logits"):
        # Losses and metrics of cross entropy look for it.
        result._keras_logits = tf.cast(tensor._keras_logits, dtype)
    return result
