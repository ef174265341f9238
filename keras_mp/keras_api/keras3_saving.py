"""How Keras 3 saves, loads and copies."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Replacement, When, wrapped
from keras_mp.keras_api import keras3_names
from keras_mp.support import features
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

keras = tf.keras


def export_as_called(
    is_ours: Callable[[Any], bool],
    around: Callable[[Any], AbstractContextManager[None]],
) -> None:
    """Lets what a SavedModel has of a model compute what the model does.

    Signatures of subclassed models take float32, where Keras notes their 16 bits. Keras 2 saves
    the calls of layers, too.

    Args:
        is_ours: tells whether a model is saved in this way.
        around: takes a layer and returns the context manager in which its call is traced.
    """
    del around  # Keras calls the model, and keeps no layer apart from its class.
    owner = next(cls for cls in keras.Layer.__mro__ if "input_dtype" in vars(cls))

    def with_wide_inputs(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(model: Any) -> Any:
            if not is_ours(model):
                return original(model)
            # Keras notes the shapes of inputs, and takes this dtype for all of them.
            with wrapped.here(owner, "input_dtype", _widened):
                return original(model)

        return call

    names = keras3_names.exported_signature, keras3_names.saved_signature
    hooks.install(
        Replacement(name, with_wide_inputs, When.ALWAYS, keras3_names.FILES) for name in names
    )


def _widened(input_dtype: Callable[[Any], str]) -> Callable[[Any], str]:
    def widened(layer: Any) -> str:
        dtype = input_dtype(layer)
        return "float32" if dtype in LOW_PRECISION_NAMES else dtype

    return widened


def name_functions(layer: tf.keras.layers.Layer, config: dict[str, Any]) -> dict[str, Any]:
    """Writes names for the functions of a `Lambda` into its config.

    Returns:
        dict of the functions by these names, for a `custom_object_scope`; empty if the config
        is enough to make the layer anew in this process.
    """
    # Keras writes the code of a lambda, without the module in which it finds `tf`, and of another
    # function the name, by which it finds registered ones only.
    shape = None
    if features.is_on(keras3_names.TRUST):
        shape = keras3_names.output_shape_of_lambda.of(layer)
    functions = {"function": layer.function, "output_shape": shape}
    named = {}
    for key, function in functions.items():
        if callable(function):
            config[key] = f"keras_mp_{key}_{id(function)}"
            named[config[key]] = function
    return named
