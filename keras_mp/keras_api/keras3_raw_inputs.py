"""Layers that read raw inputs, in Keras 3."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Method, Replacement, When
from keras_mp.keras_api.keras3_names import RAW_INPUTS, convert_inputs_of_model

keras = tf.keras

# The layer that casts inputs before it calls `Layer.__call__`.
PreprocessingLayer: Any = next(
    cls for cls in keras.layers.Normalization.__mro__ if "__call__" in vars(cls)
)

# They subtract what is nearly equal, or multiply matrices, and `stft` refuses 16 bits.
_IN_FLOAT32 = (
    "binary_crossentropy",
    "corrcoef",
    "cross",
    "lstsq",
    "moments",
    "stft",
    "tanh_shrink",
)


def exact_functions() -> list[Any]:
    """Returns Keras's own functions that need float32 as a whole."""
    found = [getattr(keras.ops, name, None) for name in _IN_FLOAT32]
    return [each for each in (*found, getattr(keras.ops.image, "gaussian_blur", None)) if each]


def is_operation(layer: keras.layers.Layer) -> bool:
    """Whether a layer is an operation on a symbolic tensor.

    Keras 2 makes such a layer of `2.0 * x`.
    """
    del layer  # An operation is no layer.
    return False


def note_input_casts(
    policy_class: type, noted: Callable[[Any, Any], Any], before: Callable[[Any], Any]
) -> None:
    """Has the casts noted that layers and models make of their inputs.

    Args:
        policy_class: class of the policies whose layers do.
        noted: takes an input and what it became, and returns the latter.
        before: takes an input of a preprocessing layer, and returns it unrounded.
    """

    def converting(original: Callable[..., Any]) -> Callable[..., Any]:
        def convert_input(self: Any, x: Any, autocast: bool, dtype: Any) -> Any:
            result = original(self, x, autocast, dtype)
            return noted(x, result)

        return convert_input

    def converting_all(original: Callable[..., Any]) -> Callable[..., Any]:
        def convert_inputs(self: Any, flat_inputs: Sequence[Any]) -> list[Any]:
            results = original(self, flat_inputs)
            return list(map(noted, flat_inputs, results))

        return convert_inputs

    def preprocessing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, inputs: Any, **kwargs: Any) -> Any:
            # In a graph it converts them before it calls `Layer.__call__`.
            return original(self, keras.tree.map_structure(before, inputs), **kwargs)

        return call

    hooks.install(
        [
            Replacement(Method(PreprocessingLayer, "__call__"), preprocessing, When.ALWAYS),
            Replacement(Method(policy_class, "convert_input"), converting, When.ALWAYS, RAW_INPUTS),
            Replacement(convert_inputs_of_model, converting_all, When.ALWAYS, RAW_INPUTS),
        ]
    )


def set_policy(layer: Any, policy: Any) -> None:
    """Gives a layer without variables another policy."""
    layer.dtype_policy = policy


# The classes whose `compute_output_spec` reports rounded results.
_reporting: set[type] = set()


def report_rounded(
    cls: Any, rounds_to: Callable[[Any], tf.DType | None], mapped: Callable[..., Any]
) -> None:
    """Lets layers of a class say the dtype to which their float32 results are rounded.

    Args:
        cls: class of layers.
        rounds_to: takes a layer and returns that DType, or None.
        mapped: takes a function, a layer and its outputs, and maps those that are rounded.
    """

    def rounded(original: Callable[..., Any]) -> Callable[..., Any]:
        def compute_output_spec(self: Any, *args: Any, **kwargs: Any) -> Any:
            dtype, spec = rounds_to(self), original(self, *args, **kwargs)
            if dtype is None:
                return spec
            return mapped(functools.partial(_with_dtype, dtype.name), self, spec)

        return compute_output_spec

    owner = next(each for each in cls.__mro__ if "compute_output_spec" in vars(each))
    if owner not in _reporting:
        _reporting.add(owner)
        hooks.install([Replacement(Method(owner, "compute_output_spec"), rounded, When.ALWAYS)])


def _with_dtype(dtype: str, spec: Any) -> Any:
    if not isinstance(spec, keras.KerasTensor) or spec.dtype not in ("float32", "float64"):
        return spec
    return keras.KerasTensor(
        spec.shape, dtype, sparse=spec.sparse, ragged=spec.ragged, name=spec.name
    )
