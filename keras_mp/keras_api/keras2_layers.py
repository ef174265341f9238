"""Layers of Keras 2: raw inputs, and the loop of an LSTM."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Method, Replacement
from keras_mp.keras_api import keras2_names
from keras_mp.support import features, new_variables
from keras_mp.support.dtypes import FLOATING, LOW_PRECISION
from keras_mp.tensorflow_api.names import Name
from keras_mp.variables.wrapper import WrapperType

# Keras's tests see which of its kernels ran. This is its number for none that it knows.
_NO_KERNEL_OF_KERAS = 0.0
_TENSORS = ("inputs", "init_h", "init_c", "kernel", "recurrent_kernel", "bias")

EARLY_CASTING: tuple[Method, ...] = ()


def input_casts(policy_class: type) -> tuple[Name | Method, ...]:
    del policy_class  # A layer casts its inputs itself.
    return keras2_names.cast_input, keras2_names.convert_input_of_model


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


CASTS_OF_STATES = (
    Replacement(keras2_names.inputs_of_rnn, _casting_states, feature=keras2_names.RAW_INPUTS),
)


def exact_functions() -> list[Any]:
    return []


def set_policy(layer: Any, policy: Any) -> None:
    if features.is_on(keras2_names.RAW_INPUTS):
        keras2_names.set_policy(layer, policy)


def report_of_outputs(cls: Any) -> Name | Method:
    del cls  # They all have the same method.
    return keras2_names.output_signature


def with_dtype(dtype: tf.DType, output: Any) -> Any:
    spec: Any = output.type_spec
    if spec.dtype not in (tf.float32, tf.float64):
        return output
    if isinstance(spec, tf.RaggedTensorSpec):
        ragged: Any = spec
        spec = tf.RaggedTensorSpec(spec.shape, dtype, ragged.ragged_rank, ragged.row_splits_dtype)
    else:
        kind = tf.SparseTensorSpec if isinstance(spec, tf.SparseTensorSpec) else tf.TensorSpec
        spec = kind(spec.shape, dtype)
    output._type_spec = spec  # So its mask and its shape stay with it.
    return output


def replace_slow_layers(lstm: Callable[..., Any], batch_normalization: Callable[..., Any]) -> None:
    del batch_normalization  # one kernel in Keras 2
    # One runs in eager, the other in graphs. They return the results and the kernel that ran.
    feature = keras2_names.LSTM
    make = functools.partial(_replaced, lstm)
    hooks.install(Replacement(name, make, feature=feature) for name in feature.names)
    _let_functions_find_variables()


def _replaced(run: Callable[..., Any], loop: Callable[..., Any]) -> Callable[..., Any]:
    parameters = tuple(inspect.signature(loop).parameters)

    def replaced(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        arguments = {**dict(zip(parameters, args)), **kwargs}
        is_plain = arguments["mask"] is None and arguments["sequence_lengths"] is None
        found = None
        if is_plain and not arguments["time_major"]:
            found = run(*(arguments[name] for name in _TENSORS), arguments["go_backwards"])
        if found is None:
            return loop(**arguments)
        outputs, last, cell_state = found
        shown = outputs if arguments["return_sequences"] else last[:, tf.newaxis]
        return last, shown, last, cell_state, _NO_KERNEL_OF_KERAS

    return replaced


def _let_functions_find_variables() -> None:
    """Lets a `tf.function` find the trace for a variable that Keras casts.

    Keras's own type of such a variable equals no other, so each call makes another trace. On a GPU
    optimizers compile that, for each variable in each step.
    """

    def type_of(variable: Any, context: object) -> WrapperType:
        del context
        return WrapperType(variable, variable.dtype, lambda same: same)

    if features.is_on(keras2_names.TRACES):
        keras2_names.AutoCastVariable.get().__tf_tracing_type__ = type_of


def _with_weights_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_weight(metric: Any, *args: Any, **kwargs: Any) -> Any:
        with new_variables.made_at_once():
            return original(metric, *args, **kwargs)

    return add_weight


# Not the methods of layers: only a second trace knows which of their weights a skipped step is to
# put back.
IN_ONE_TRACE = (Replacement(Method(tf.keras.metrics.Metric, "add_weight"), _with_weights_at_once),)
