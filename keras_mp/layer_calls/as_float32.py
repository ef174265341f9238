"""Functions and regularizers that compute in float32 (RFC 293, "Loss dtype")."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import regularizers
from keras_mp.support import softmax_and_cross_entropy as fusion


def as_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function get float32 instead of any other floating-point dtype.

    It is a decorator for your own losses, metrics and regularizers, whose arguments keras_mp
    leaves alone: under `"mixed_float16"` Keras 2 passes float16 to them. A decorated function keeps
    its name and is saved like any other.

    Args:
        function: A function of tensors, or a `tf.keras.regularizers.Regularizer`.

    Returns:
        A function that casts floating-point tensors and arrays among its arguments to float32,
        nested ones too. A regularizer becomes a `keras_mp.regularizers.Float32Regularizer`.

    Raises:
        TypeError: `function` cannot be called, or is a loss or a metric object.

    Example:

    >>> @keras_mp.losses.as_float32
    ... def sum_of_squares(y_true, y_pred):
    ...     return tf.reduce_sum(tf.square(y_true - y_pred))
    >>> float(sum_of_squares(tf.zeros([1]), tf.constant([300], tf.float16)))
    90000.0

    Source: RFC 293, "Loss dtype".
    """
    if isinstance(function, tf.keras.regularizers.Regularizer):
        return regularizers.Float32Regularizer(function)
    if isinstance(function, tf.keras.losses.Loss | tf.keras.metrics.Metric | type) or not callable(
        function
    ):
        raise TypeError(
            "`as_float32` is for functions and regularizers. A loss that subclasses "
            "`keras_mp.losses.Loss` computes in float32; a metric that is passed to `compile` "
            f"gets float32 predictions. Received: {function!r} (of type {type(function)})"
        )

    @functools.wraps(function)
    def in_float32(*args: Any, **kwargs: Any) -> object:
        args, kwargs = tf.nest.map_structure(_cast_tensor, (args, kwargs))
        return function(*args, **kwargs)

    # `compile` of Keras 2 looks for this attribute.
    in_float32._keras_mp_casts_to = "float32"  # pyright: ignore[reportAttributeAccessIssue]
    return in_float32


def _cast_tensor(value: object) -> object:
    is_one = tf.is_tensor(value) or isinstance(value, np.ndarray)
    return fusion.cast(value, "float32") if is_one else value
