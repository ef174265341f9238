"""What weights are made of is float32: random numbers, and other weights.

The first values of 16-bit weights are drawn in float32, and rounded. In bfloat16 there are 128
uniform random numbers, and their mean is too small by half a step. Some initializers have no kernel
in 16 bits. With the same seed, a model in 16 bits begins where that in float32 does, up to a
rounding.

Weights that a layer reads in `build`, to make others of them, are float32. The scope in which an
outer layer casts weights is in force there, too: a copy of a weight, or a weight with the dtype of
another one, would be stored in 16 bits.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import hooks, keras_api
from keras_mp.hooks import Method, Replacement, When, reach
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


# Layers in float16 that were built, whose policy has a loss scale.
scaled_layers: "weakref.WeakSet[Any]" = weakref.WeakSet()


def install() -> None:
    """Lets layers draw first values of 16-bit variables, and build, in float32."""
    place, names = Method.of(tf.keras.layers.Layer, "add_weight"), keras_api.names
    hooks.install(
        [
            Replacement(place, _drawing_in_float32, When.ALWAYS),
            Replacement(names.build_once, _reading_float32, When.ALWAYS, names.BUILDS),
        ]
    )


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


def _reading_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_once(self: tf.keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        if self.built:
            return original(self, *args, **kwargs)
        policies: Any = self.dtype_policy, keras_api.get_global_policy()
        # A float32 layer inside of one that has a policy of ours may have one of Keras's.
        is_ours = reach.current() is not None or any(isinstance(p, Policy) for p in policies)
        is_cast = keras_api.autocast_dtype() is not None and is_ours
        with keras_api.autocast_scope(None) if is_cast else contextlib.nullcontext():
            result = original(self, *args, **kwargs)
        policy = policies[0]
        if isinstance(policy, Policy) and policy.scales_loss and self.compute_dtype == "float16":
            scaled_layers.add(self)
        return result

    return build_once
