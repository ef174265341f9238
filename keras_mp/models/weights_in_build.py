"""Weights that a layer reads in `build`, to make others of them, are float32.

The scope in which an outer layer casts weights is in force there, too: a copy of a weight, or a
weight with the dtype of another one, would be stored in 16 bits.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import hooks, keras_api
from keras_mp.hooks import Replacement, When, reach
from keras_mp.models import step_tapes
from keras_mp.policy import Policy


def install() -> None:
    """Lets layers read weights in float32 while they are built."""
    row = Replacement(keras_api.BUILD_ONCE, _reading_float32, When.ALWAYS, keras_api.BUILDS)
    hooks.install([row])


def _reading_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_once(self: tf.keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        if self.built:
            return original(self, *args, **kwargs)
        is_cast = keras_api.autocast_dtype() is not None and _is_ours(self)
        with keras_api.autocast_scope(None) if is_cast else contextlib.nullcontext():
            result = original(self, *args, **kwargs)
        step_tapes.note_built(self)
        return result

    return build_once


def _is_ours(layer: tf.keras.layers.Layer) -> bool:
    """Whether a layer has a policy of keras_mp, or is inside of one that does.

    A float32 layer inside may have one of Keras's.
    """
    policies = (layer.dtype_policy, keras_api.get_global_policy())
    return reach.current() is not None or any(isinstance(each, Policy) for each in policies)
