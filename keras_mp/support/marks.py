"""What Keras notes on tensors: the mask of a sequence, the logits of a softmax."""

from typing import Any

import tensorflow as tf


def copy(source: Any, result: Any) -> Any:
    """Puts on a tensor what Keras has noted on the one that it was made of.

    Args:
        source: tensor.
        result: another tensor of its shape. Logits come in its dtype.

    Returns:
        `result`.
    """
    if hasattr(source, "_keras_mask"):
        result._keras_mask = source._keras_mask
    if hasattr(source, "_keras_logits"):
        # Losses and metrics of cross entropy look for it.
        result._keras_logits = tf.cast(source._keras_logits, result.dtype)
    return result
