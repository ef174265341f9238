"""The functions of `Lambda` layers of Keras 3, which `convert` keeps."""

from typing import Any

import tensorflow as tf

from keras_mp.keras_api.keras3_names import LAMBDAS, output_shape_of_lambda
from keras_mp.support import features


def name_functions(layer: tf.keras.layers.Layer, config: dict[str, Any]) -> dict[str, Any]:
    """Writes names for the functions of a `Lambda` into its config.

    Returns:
        dict of the functions by these names, for a `custom_object_scope`; empty if the config
        is enough to make the layer anew in this process.
    """
    # Keras writes the code of a lambda, without the module in which it finds `tf`, and of another
    # function the name, by which it finds registered ones only.
    shape = None
    if features.is_on(LAMBDAS):
        shape = output_shape_of_lambda.of(layer)
    functions = {"function": layer.function, "output_shape": shape}
    named = {}
    for key, function in functions.items():
        if callable(function):
            name = f"keras_mp_{key}_{id(function)}"
            named[name] = function
            # As Keras writes functions.
            config[key] = {
                "module": "builtins",
                "class_name": "function",
                "config": name,
                "registered_name": "function",
            }
    return named
