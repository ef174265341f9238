"""Batch normalization in 16 bits on CPUs as one kernel.

Keras 3 computes it as moments and products, in float32, whatever the policy. TensorFlow's kernel
reads and writes 16 bits, and computes in float32 inside. This module needs TensorFlow only.
"""

import tensorflow as tf

from keras_mp.hooks import faces, reach
from keras_mp.kernels import slow


def batch_normalization(
    x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor] | None:
    """Normalizes a batch by its own mean and variance.

    Args:
        x: tensor of two axes or more. The last one has the channels.
        scale: float32 tensor of shape [channels].
        offset: float32 tensor of that shape.
        epsilon: float. It is added to the variance.

    Returns:
        The normalized batch, of the dtype of `x`; its mean and variance, in float32. None where it
        is not known to be faster: in other dtypes than 16 bits, where XLA compiles, on other
        devices than CPUs, and where the number of channels is not known.
    """
    if x.shape.rank is None or x.shape.rank < 2 or x.shape[-1] is None:
        return None
    is_exact = faces.is_exact(x)  # What Keras computes takes the float32 face.
    if is_exact or scale.dtype != tf.float32 or not slow.may_replace_layer(x.dtype):
        return None
    channels = x.shape[-1]
    # The kernel takes images.
    images = x if x.shape.rank == 4 else tf.reshape(x, [-1, 1, 1, channels])
    with reach.without_region():
        found = tf.raw_ops.FusedBatchNormV3(
            x=images,
            scale=scale,
            offset=offset,
            mean=tf.zeros([0]),
            variance=tf.zeros([0]),
            epsilon=epsilon,
            exponential_avg_factor=1.0,  # An int, its default, takes TensorFlow's slower way.
        )
        # It estimates the variance of the population that the batch is a sample of.
        count = tf.cast(tf.size(x) // channels, tf.float32)
        variance = found.batch_variance * ((count - 1) / count)
        y = found.y if x.shape.rank == 4 else tf.reshape(found.y, tf.shape(x))
        return tf.ensure_shape(y, x.shape), found.batch_mean, variance
