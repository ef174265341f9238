"""Layers that read raw inputs, in Keras 3."""

from typing import Any

import tensorflow as tf

from keras_mp.hooks import Method, Replacement
from keras_mp.keras_api.keras3_names import convert_inputs_of_model
from keras_mp.tensorflow_api.names import Name

keras = tf.keras

# What casts inputs in a graph before `Layer.__call__` is called.
EARLY_CASTING: tuple[Method, ...] = (Method.of(keras.layers.Normalization, "__call__"),)
# What casts the initial states of recurrent layers: they do so themselves.
CASTS_OF_STATES: tuple[Replacement, ...] = ()

# They subtract what is nearly equal, or multiply matrices, and `stft` refuses 16 bits.
_IN_FLOAT32 = (
    "corrcoef",
    "cross",
    "lstsq",
    "moments",
    "stft",
    "tanh_shrink",
)
# They compute the size of a kernel, or coordinates, in the dtype of images.
_OF_IMAGES_IN_FLOAT32 = ("gaussian_blur", "elastic_transform")


def exact_functions() -> list[Any]:
    """Returns Keras's own functions that need float32 as a whole."""
    found = [getattr(keras.ops, name, None) for name in _IN_FLOAT32]
    found += [getattr(keras.ops.image, name, None) for name in _OF_IMAGES_IN_FLOAT32]
    return [each for each in found if each]


def input_casts(policy_class: type) -> tuple[Name | Method, ...]:
    """Returns the methods by which layers and models cast their inputs.

    They take an input, or a list of inputs, and return what becomes of it.

    Args:
        policy_class: class of the policies whose layers do.
    """
    return Method(policy_class, "convert_input"), convert_inputs_of_model


def set_policy(layer: Any, policy: Any) -> None:
    """Gives a layer without variables another policy."""
    layer.dtype_policy = policy


def report_of_outputs(cls: Any) -> Name | Method:
    """Returns the method by which layers of a class say what their results are like."""
    return Method.of(cls, "compute_output_spec")


def with_dtype(dtype: tf.DType, output: Any) -> Any:
    """Gives a symbolic result of float32 or float64 another dtype."""
    if not isinstance(output, keras.KerasTensor) or output.dtype not in ("float32", "float64"):
        return output
    return keras.KerasTensor(
        output.shape, dtype.name, sparse=output.sparse, ragged=output.ragged, name=output.name
    )
