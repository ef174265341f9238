"""Layers that read raw inputs, in Keras 2."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Everywhere, Method, Replacement, When
from keras_mp.keras_api import keras2_names
from keras_mp.support.dtypes import FLOATING, LOW_PRECISION

keras = tf.keras

PreprocessingLayer = keras.layers.experimental.preprocessing.PreprocessingLayer


def is_operation(layer: Any) -> bool:
    return getattr(layer, "_must_restore_from_config", False)


def note_input_casts(
    policy_class: type, note: Callable[[Any, Any], None], before: Callable[[Any], Any]
) -> None:
    del policy_class  # A layer casts its inputs itself.

    def casting(original: Callable[..., Any]) -> Callable[..., Any]:
        def cast_single_input(self: Any, x: Any) -> Any:
            result = original(self, x)
            note(x, result)
            return result

        return cast_single_input

    def conforming(original: Callable[..., Any]) -> Callable[..., Any]:
        def conform_to_reference_input(self: Any, tensor: Any, ref_input: Any) -> Any:
            tensor = before(tensor)
            result = original(self, tensor, ref_input)
            note(tensor, result)
            return result

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


def widen_functions(in_float32: Callable[[Any], Callable[..., Any]]) -> None:
    # It subtracts itself; else it calls functions of TensorFlow.
    hooks.install([Replacement(Everywhere(keras.backend.hard_sigmoid), in_float32)])


def let_policy_change(cls: Any) -> None:
    def compute_dtype(self: Any) -> tf.DType | None:
        name = self._dtype_policy.compute_dtype
        return None if name is None else tf.as_dtype(name)

    def keep(self: Any, value: tf.DType | None) -> None:
        del self, value  # Keras notes the dtype when the layer is made.

    cls._compute_dtype_object = property(compute_dtype, keep)


def makes_weights(layer: Any) -> bool:
    return not layer.built


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

    hooks.install([Replacement(Method(cls, "_infer_output_signature"), rounded, When.ALWAYS)])


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
