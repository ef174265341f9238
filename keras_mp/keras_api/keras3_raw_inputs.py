"""Layers that read raw inputs, in Keras 3."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from keras_mp.keras_api.keras3_names import RAW_INPUTS, convert_inputs_of_model
from keras_mp.kernels.replaced import Replacement, replace
from keras_mp.support import features, reach
from keras_mp.support.autograph import do_not_convert

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
    if not features.is_on(RAW_INPUTS):
        return
    convert_input = policy_class.convert_input  # pyright: ignore[reportAttributeAccessIssue]
    convert_inputs = convert_inputs_of_model.get()
    preprocess = PreprocessingLayer.__call__

    @functools.wraps(convert_input)
    def converted(self: Any, x: Any, autocast: bool, dtype: Any) -> Any:
        result = convert_input(self, x, autocast, dtype)
        note(x, result)
        return result

    @functools.wraps(convert_inputs)
    @do_not_convert
    def all_converted(self: Any, flat_inputs: Sequence[Any]) -> list[Any]:
        flat_inputs = [before(each) for each in flat_inputs]
        results = convert_inputs(self, flat_inputs)
        for each, result in zip(flat_inputs, results):
            note(each, result)
        return results

    @functools.wraps(preprocess)
    @do_not_convert
    def call(self: Any, inputs: Any, **kwargs: Any) -> Any:
        # In a graph it converts them before it calls `Layer.__call__`.
        if any(before(each) is not each for each in keras.tree.flatten(inputs)):
            inputs = keras.tree.map_structure(before, inputs)
        return preprocess(self, inputs, **kwargs)

    policy_class.convert_input = converted  # pyright: ignore[reportAttributeAccessIssue]
    convert_inputs_of_model.set(all_converted)
    PreprocessingLayer.__call__ = call


def widen_functions(in_float32: Callable[[Any], Callable[..., Any]]) -> None:
    replacements = []
    for path in OWN_ARITHMETIC:
        group, _, name = path.rpartition(".")
        own = getattr(getattr(keras.ops, group) if group else keras.ops, name, None)
        if own:
            replacements.append(Replacement(own, (name,), in_float32(own)))
    replace(replacements, "keras")


def add_in_float32(autocast_scope: Callable[[None], AbstractContextManager[None]]) -> None:
    """Lets `assign_add` and `assign_sub` of weights add to the float32 value.

    Keras adds to what a layer reads, so that a count in bfloat16 stops at 256.

    Args:
        autocast_scope: a context manager in which weights are not cast.
    """

    def in_float32(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        @do_not_convert
        def add(self: Any, value: Any) -> Any:
            if reach.current() is None:
                return own(self, value)
            with autocast_scope(None):
                return own(self, value)

        return add

    for name in ("assign_add", "assign_sub"):
        setattr(keras.Variable, name, in_float32(getattr(keras.Variable, name)))


def let_policy_change(cls: type) -> None:
    del cls  # Keras asks the policy each time.


def makes_weights(layer: Any) -> bool:
    del layer
    return False  # Those of Keras 3 are cast by who reads them.


def report_rounded(
    cls: Any, rounds_to: Callable[[Any], tf.DType | None], mapped: Callable[..., Any]
) -> None:
    own = cls.compute_output_spec

    @functools.wraps(own)
    @do_not_convert
    def compute_output_spec(self: Any, *args: Any, **kwargs: Any) -> Any:
        dtype, spec = rounds_to(self), own(self, *args, **kwargs)
        if dtype is None:
            return spec
        return mapped(functools.partial(_with_dtype, dtype.name), self, spec)

    cls.compute_output_spec = compute_output_spec


def _with_dtype(dtype: str, spec: Any) -> Any:
    if not isinstance(spec, keras.KerasTensor) or spec.dtype not in ("float32", "float64"):
        return spec
    return keras.KerasTensor(
        spec.shape, dtype, sparse=spec.sparse, ragged=spec.ragged, name=spec.name
    )
