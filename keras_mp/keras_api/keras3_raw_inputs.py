"""Layers that read raw inputs, in Keras 3."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Everywhere, Method, Replacement, When
from keras_mp.keras_api.keras3_names import RAW_INPUTS, convert_inputs_of_model

keras = tf.keras

# The layer that casts inputs before it calls `Layer.__call__`.
PreprocessingLayer: Any = next(
    cls for cls in keras.layers.Normalization.__mro__ if "__call__" in vars(cls)
)

# They square, count, sum and subtract themselves, where others call functions of TensorFlow.
OWN_ARITHMETIC = (
    *("norm", "normalize", "cdist", "average", "corrcoef", "nanmean", "nanvar", "nanstd"),
    *("squareplus", "sparsemax", "tanh_shrink", "celu", "sparse_plus", "sinc", "trapezoid"),
    *("quantile", "nanquantile", "percentile", "nanpercentile", "linspace", "logspace"),
    *("logaddexp2", "log2", "log10", "cbrt", "hypot", "deg2rad", "rad2deg", "psnr"),
    *("binary_crossentropy", "categorical_crossentropy", "floor_divide"),
    *("moments", "histogram", "cross", "lstsq", "arange", "stft"),
    *("image.gaussian_blur", "image.ssim"),
)


def is_operation(layer: keras.layers.Layer) -> bool:
    del layer  # An operation is no layer.
    return False


def note_input_casts(
    policy_class: type, note: Callable[[Any, Any], None], before: Callable[[Any], Any]
) -> None:

    def converting(original: Callable[..., Any]) -> Callable[..., Any]:
        def convert_input(self: Any, x: Any, autocast: bool, dtype: Any) -> Any:
            result = original(self, x, autocast, dtype)
            note(x, result)
            return result

        return convert_input

    def converting_all(original: Callable[..., Any]) -> Callable[..., Any]:
        def convert_inputs(self: Any, flat_inputs: Sequence[Any]) -> list[Any]:
            flat_inputs = [before(each) for each in flat_inputs]
            results = original(self, flat_inputs)
            for each, result in zip(flat_inputs, results):
                note(each, result)
            return results

        return convert_inputs

    def preprocessing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, inputs: Any, **kwargs: Any) -> Any:
            # In a graph it converts them before it calls `Layer.__call__`.
            if any(before(each) is not each for each in keras.tree.flatten(inputs)):
                inputs = keras.tree.map_structure(before, inputs)
            return original(self, inputs, **kwargs)

        return call

    preprocess = Method(PreprocessingLayer, "__call__")
    hooks.install(
        [
            Replacement(Method(policy_class, "convert_input"), converting, When.ALWAYS, RAW_INPUTS),
            Replacement(convert_inputs_of_model, converting_all, When.ALWAYS, RAW_INPUTS),
            Replacement(preprocess, preprocessing, When.ALWAYS, RAW_INPUTS),
        ]
    )


def widen_functions(in_float32: Callable[[Any], Callable[..., Any]]) -> None:
    replacements = []
    for path in OWN_ARITHMETIC:
        group, _, name = path.rpartition(".")
        original = getattr(getattr(keras.ops, group) if group else keras.ops, name, None)
        if original:
            replacements.append(Replacement(Everywhere(original, (name,)), in_float32))
    hooks.install(replacements)


def add_in_float32(autocast_scope: Callable[[None], AbstractContextManager[None]]) -> None:
    """Lets `assign_add` and `assign_sub` of weights add to the float32 value.

    Keras adds to what a layer reads, so that a count in bfloat16 stops at 256.

    Args:
        autocast_scope: a context manager in which weights are not cast.
    """

    def in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
        def add(self: Any, value: Any) -> Any:
            with autocast_scope(None):
                return original(self, value)

        return add

    names = "assign_add", "assign_sub"
    hooks.install([Replacement(Method(keras.Variable, name), in_float32) for name in names])


def let_policy_change(cls: type) -> None:
    del cls  # Keras asks the policy each time.


def makes_weights(layer: Any) -> bool:
    del layer
    return False  # Those of Keras 3 are cast by who reads them.


def report_rounded(
    cls: Any, rounds_to: Callable[[Any], tf.DType | None], mapped: Callable[..., Any]
) -> None:
    def rounded(original: Callable[..., Any]) -> Callable[..., Any]:
        def compute_output_spec(self: Any, *args: Any, **kwargs: Any) -> Any:
            dtype, spec = rounds_to(self), original(self, *args, **kwargs)
            if dtype is None:
                return spec
            return mapped(functools.partial(_with_dtype, dtype.name), self, spec)

        return compute_output_spec

    hooks.install([Replacement(Method(cls, "compute_output_spec"), rounded, When.ALWAYS)])


def _with_dtype(dtype: str, spec: Any) -> Any:
    if not isinstance(spec, keras.KerasTensor) or spec.dtype not in ("float32", "float64"):
        return spec
    return keras.KerasTensor(
        spec.shape, dtype, sparse=spec.sparse, ragged=spec.ragged, name=spec.name
    )
