"""Layers that read raw inputs, in Keras 2."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.keras_api import keras2_names
from keras_mp.kernels.replaced import Replacement, replace
from keras_mp.support import features, reach
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import FLOATING, LOW_PRECISION

keras = tf.keras

PreprocessingLayer = keras.layers.experimental.preprocessing.PreprocessingLayer


def is_operation(layer: Any) -> bool:
    return getattr(layer, "_must_restore_from_config", False)


def note_input_casts(
    policy_class: type, note: Callable[[Any, Any], None], before: Callable[[Any], Any]
) -> None:
    del policy_class  # A layer casts its inputs itself.
    if not features.is_on(keras2_names.RAW_INPUTS):
        return
    cast = keras2_names.cast_input.get()
    conform = keras2_names.convert_input_of_model.get()

    @functools.wraps(cast)
    @do_not_convert
    def cast_single_input(self: Any, x: Any) -> Any:
        result = cast(self, x)
        note(x, result)
        return result

    @functools.wraps(conform)
    @do_not_convert
    def conform_to_reference_input(self: Any, tensor: Any, ref_input: Any) -> Any:
        tensor = before(tensor)
        result = conform(self, tensor, ref_input)
        note(tensor, result)
        return result

    keras2_names.cast_input.set(cast_single_input)
    _cast_states()
    keras2_names.convert_input_of_model.set(conform_to_reference_input)


def _cast_states() -> None:
    """Lets recurrent layers cast initial states and constants, which are inputs, too."""
    if not features.is_on(keras2_names.STATES):
        return
    own = keras2_names.inputs_of_rnn.get()

    @functools.wraps(own)
    def process_inputs(
        self: Any, inputs: Any, initial_state: Any, constants: Any
    ) -> tuple[Any, Any, Any]:
        inputs, *others = own(self, inputs, initial_state, constants)
        dtype = tf.nest.flatten(inputs)[0].dtype
        if reach.current() is None or dtype not in LOW_PRECISION:
            return inputs, *others
        return inputs, *tf.nest.map_structure(functools.partial(_cast_float, dtype), others)

    keras2_names.inputs_of_rnn.set(process_inputs)


def _cast_float(dtype: tf.DType, value: Any) -> Any:
    is_float = tf.is_tensor(value) and value.dtype in FLOATING
    return tf.cast(value, dtype) if is_float else value


def widen_functions(in_float32: Callable[[Any], Callable[..., Any]]) -> None:
    # It subtracts itself; else it calls functions of TensorFlow.
    own = keras.backend.hard_sigmoid
    replace([Replacement(own, ("hard_sigmoid",), in_float32(own))], "tf_keras")


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
    own = cls._infer_output_signature

    @functools.wraps(own)
    @do_not_convert
    def infer_output_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
        dtype, outputs = rounds_to(self), own(self, *args, **kwargs)
        if dtype is None:
            return outputs
        return mapped(functools.partial(_with_dtype, dtype), self, outputs)

    cls._infer_output_signature = infer_output_signature


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
