"""The optimizer wrapper that sums gradients in bfloat16, without loss scaling.

RFC 293, "All-reducing in float16", for runs in bfloat16 and float32. `LossScaleOptimizer` does the
same for runs that scale the loss.
"""

from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.optimizer_wrapper import OptimizerWrapper


@keras_api.register_serializable
class AllReduceOptimizer(OptimizerWrapper):
    """An optimizer that sums float32 gradients over replicas in bfloat16.

    That takes half the bytes. It is for training without loss scaling, in `mixed_bfloat16` or
    float32, under `MultiWorkerMirroredStrategy` or `MirroredStrategy`. (A `LossScaleOptimizer` has
    its own `reduce_dtype`.) Nothing wraps an optimizer with it automatically.

    Gradients are rounded to 8 significant bits on their way: each replica's before they are added,
    and then their sum. Clipping, weight decay and averages see the sum, in float32. float16
    gradients are summed in the same dtype; bfloat16 and float64 gradients are summed in their own.
    With one replica, nothing is summed or rounded. Steps are never skipped.

    Args:
        inner_optimizer: The optimizer to wrap: an instance, a name such as `"adam"`, or a config.
        reduce_dtype: `"bfloat16"` (the default) or `"float32"`, or such a DType. The dtype in which
            float32 gradients are summed.

    Raises:
        TypeError: `inner_optimizer` is not an optimizer of `tf.keras`, or is one that sums
            gradients itself: a `LossScaleOptimizer`, or another of this class.
        ValueError: `reduce_dtype` is another dtype, such as float16, which needs loss scaling.

    Example:

    >>> optimizer = keras_mp.AllReduceOptimizer(tf.keras.optimizers.SGD(0.25))
    >>> v = tf.Variable(1.0)
    >>> _ = optimizer.minimize(lambda: v**2, [v])
    >>> float(v), optimizer.reduce_dtype
    (0.5, 'bfloat16')

    Source: RFC 293, "All-reducing in float16"; PyTorch, `MixedPrecision(reduce_dtype=)`.
    """

    def __init__(self, inner_optimizer: Any, reduce_dtype: str | tf.DType = "bfloat16") -> None:
        super().__init__(inner_optimizer)
        self.reduce_dtype = reduce_dtype
