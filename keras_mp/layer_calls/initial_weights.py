"""Draws the first values of 16-bit weights in float32, and rounds them.

In bfloat16 there are 128 uniform random numbers, and their mean is too small by half a step. Some
initializers have no kernel in 16 bits. With the same seed, a model in 16 bits begins where that in
float32 does, up to a rounding.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Method, Replacement, When
from keras_mp.policy import Policy
from keras_mp.support.dtypes import LOW_PRECISION, parse

# The positional arguments of `add_weight`. TensorFlow 2 and the RFC have `add_weight("kernel", [3,
# 4])`, and Keras 3 has `add_weight([3, 4], "zeros")`.
_NAME_FIRST = ("name", "shape", "dtype", "initializer", "regularizer", "trainable", "constraint")
_SHAPE_FIRST = ("shape", "initializer", "dtype")


def positional_arguments(args: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the names that positional arguments of `add_weight` may have.

    Args:
        args: the arguments. A string or None in the first place is a name.
    """
    return _NAME_FIRST if args and isinstance(args[0], str | None) else _SHAPE_FIRST


def install() -> None:
    """Lets layers with 16-bit variables draw their first values in float32."""
    place = Method.of(tf.keras.layers.Layer, "add_weight")
    hooks.install([Replacement(place, _drawing_in_float32, When.ALWAYS)])


def _drawing_in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_weight(self: tf.keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        policy: Any = getattr(self, "dtype_policy", None)
        order = positional_arguments(args)
        if isinstance(policy, Policy) and len(args) <= len(order):
            given = dict(zip(order, args)) | kwargs
            is_known = len(given) == len(args) + len(kwargs)
            is_normalization = isinstance(self, tf.keras.layers.BatchNormalization)
            if is_known and given.get("dtype") is None and is_normalization:
                given["dtype"] = "float32"
            if is_known and parse(given.get("dtype") or policy.variable_dtype) in LOW_PRECISION:
                chosen = given.get("initializer")
                chosen = tf.keras.initializers.get("glorot_uniform" if chosen is None else chosen)
                if callable(chosen):
                    return original(self, **given | {"initializer": _in_float32(chosen)})
            if is_known and given.get("dtype") == "float32":
                return original(self, **given)
        return original(self, *args, **kwargs)

    return add_weight


def _in_float32(initializer: Callable[..., Any]) -> Callable[..., tf.Tensor]:
    def draw(shape: Any, dtype: Any, **kwargs: Any) -> tf.Tensor:
        wide = "float32" if isinstance(dtype, str) else tf.float32
        return tf.cast(initializer(shape, dtype=wide, **kwargs), dtype)

    return draw
