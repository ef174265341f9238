"""Layers whose policy has an `output_dtype`: float32 layers with gradients of products in 16 bits.

`keras_mp.Policy` says what such a policy means. Keras asks a policy for dtypes only, so its layers
are called through a function of this module.
"""

import functools
from typing import Any

import tensorflow as tf

from keras_mp.op_autocast import context_manager
from keras_mp.support.regions import Region


@functools.cache
def install() -> None:
    """Lets layers of `tf.keras` heed the `output_dtype` of their policy, once in a process."""
    owner = next(cls for cls in tf.keras.layers.Layer.__mro__ if "__call__" in vars(cls))
    keras_call = owner.__call__

    @functools.wraps(keras_call)
    def call(self: tf.keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        policy: Any = getattr(self, "dtype_policy", None)
        if getattr(policy, "output_dtype", None) is None:
            return keras_call(self, *args, **kwargs)
        with context_manager.entered(Region(policy.low_precision_dtype, gradients_only=True)):
            return keras_call(self, *args, **kwargs)

    owner.__call__ = call
