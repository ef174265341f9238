"""Layers that read raw inputs, in Keras 2."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Replacement, When
from keras_mp.keras_api import keras2_names
from keras_mp.support import features
from keras_mp.support.dtypes import FLOATING, LOW_PRECISION

keras = tf.keras


def is_operation(layer: Any) -> bool:
    return getattr(layer, "_must_restore_from_config", False)


def note_input_casts(
    policy_class: type, noted: Callable[[Any, Any], Any], before: Callable[[Any], Any]
) -> None:
    del policy_class, before  # A layer casts its inputs itself.

    def casting(original: Callable[..., Any]) -> Callable[..., Any]:
        def cast_single_input(self: Any, x: Any) -> Any:
            result = original(self, x)
            return noted(x, result)

        return cast_single_input

    def conforming(original: Callable[..., Any]) -> Callable[..., Any]:
        def conform_to_reference_input(self: Any, tensor: Any, ref_input: Any) -> Any:
            result = original(self, tensor, ref_input)
            return noted(tensor, result)

        return conform_to_reference_input

    feature = keras2_names.RAW_INPUTS
    hooks.install(
        [
            Replacement(keras2_names.cast_input, casting, When.ALWAYS, feature),
            Replacement(keras2_names.convert_input_of_model, conforming, When.ALWAYS, feature),
            Replacement(keras2_names.inputs_of_rnn, _casting_states, feature=keras2_names.STATES),
        ]
    )


def _casting_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets recurrent layers cast initial states and constants, which are inputs, too."""

    def process_inputs(
        self: Any, inputs: Any, initial_state: Any, constants: Any
    ) -> tuple[Any, Any, Any]:
        inputs, *others = original(self, inputs, initial_state, constants)
        dtype = tf.nest.flatten(inputs)[0].dtype
        if dtype not in LOW_PRECISION:
            return inputs, *others
        return inputs, *tf.nest.map_structure(functools.partial(_cast_float, dtype), others)

    return process_inputs


def _cast_float(dtype: tf.DType, value: Any) -> Any:
    is_float = tf.is_tensor(value) and value.dtype in FLOATING
    return tf.cast(value, dtype) if is_float else value


def exact_functions() -> list[Any]:
    return []


def set_policy(layer: Any, policy: Any) -> None:
    if features.is_on(keras2_names.RAW_INPUTS):
        keras2_names.set_policy(layer, policy)


# What lets layers report rounded results, once it is there.
_reporting: list[Any] = []


def report_rounded(
    cls: Any, rounds_to: Callable[[Any], tf.DType | None], mapped: Callable[..., Any]
) -> None:
    def rounded(original: Callable[..., Any]) -> Callable[..., Any]:
        def infer_output_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
            dtype, outputs = rounds_to(self), original(self, *args, **kwargs)
            if dtype is None:
                return outputs
            return mapped(functools.partial(_with_dtype, dtype), self, outputs)

        return infer_output_signature

    del cls  # They all have the same method.
    if not _reporting:
        _reporting.append(rounded)
        place, feature = keras2_names.output_signature, keras2_names.RAW_INPUTS
        hooks.install([Replacement(place, rounded, When.ALWAYS, feature)])


def _with_dtype(dtype: tf.DType, output: Any) -> Any:
    """Gives a symbolic output another dtype; its mask and its shape stay with it."""
    spec: Any = output.type_spec
    if spec.dtype not in (tf.float32, tf.float64):
        return output
    if isinstance(spec, tf.RaggedTensorSpec):
        ragged: Any = spec
        spec = tf.RaggedTensorSpec(spec.shape, dtype, ragged.ragged_rank, ragged.row_splits_dtype)
    else:
        kind = tf.SparseTensorSpec if isinstance(spec, tf.SparseTensorSpec) else tf.TensorSpec
        spec = kind(spec.shape, dtype)
    output._type_spec = spec
    return output
