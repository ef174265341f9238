"""How Keras 2 saves and loads."""

import contextlib
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Replacement, When
from keras_mp.keras_api import keras2_names
from keras_mp.keras_api.keras2_names import FILES
from keras_mp.support import marks
from keras_mp.support.attributes import replaced
from keras_mp.support.dtypes import LOW_PRECISION

keras = tf.keras


class _Thread(threading.local):
    """Whether Keras traces, in this thread, one layer's call of another.

    It does so for a SavedModel.
    """

    traces_layers = False


_thread = _Thread()


def export_as_called(
    is_ours: Callable[[Any], bool],
    around: Callable[[Any], AbstractContextManager[None]],
) -> None:
    def tracing_in(original: Callable[..., Any]) -> Callable[..., Any]:
        def layer_call_wrapper(calls: Any, method: Callable[..., Any], name: str) -> Any:
            # TensorFlow takes names of arguments from what is wrapped.
            @functools.wraps(method)
            def call(*args: Any, **kwargs: Any) -> Any:
                with around(calls.layer):
                    return method(*args, **kwargs)

            return original(calls, call, name)

        return layer_call_wrapper

    def with_wide_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_save_spec(self: Any, *args: Any, **kwargs: Any) -> Any:
            specs = original(self, *args, **kwargs)
            # Inputs of functional models have the dtypes that the program has given them.
            is_subclassed = isinstance(self, keras.Model) and not self.inputs
            if _thread.traces_layers or not is_subclassed or not is_ours(self):
                return specs
            return tf.nest.map_structure(_widened, specs)

        return get_save_spec

    def with_narrow_layers(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrap_layer_functions(layer: Any, *args: Any, **kwargs: Any) -> Any:
            # Loaded layers call these with inputs that they have cast.
            with replaced(_thread, "traces_layers", True), _wide_regularizer(layer, is_ours):
                functions = original(layer, *args, **kwargs)
            if isinstance(layer, keras.Model) and is_ours(layer):
                functions["__call__"] = _call_of(layer)
            return functions

        return wrap_layer_functions

    rows = (
        (keras2_names.traced_call, tracing_in),
        (keras2_names.save_spec, with_wide_inputs),
        (keras2_names.functions_of_layer, with_narrow_layers),
    )
    hooks.install(Replacement(name, make, When.ALWAYS, FILES) for name, make in rows)


def _wide_regularizer(
    layer: Any, is_ours: Callable[[Any], bool]
) -> contextlib.AbstractContextManager[None]:
    """Context manager in which a saved activity regularizer computes in float32.

    It is a function of its own, out of which no face of a result comes.
    """
    regularizer = layer._activity_regularizer
    is_loaded = isinstance(regularizer, tf.types.experimental.GenericFunction)
    if regularizer is None or is_loaded or not is_ours(layer):
        return contextlib.nullcontext()

    def in_float32(outputs: tf.Tensor) -> tf.Tensor:
        return regularizer(marks.widen(outputs))

    return replaced(layer, "_activity_regularizer", in_float32)


def _call_of(model: keras.Model) -> Any:
    """Returns what is called where a model is called that a SavedModel has.

    That of Keras is the model's part inside of another one, whose outputs have 16 bits.
    """

    def outputs_and_losses(*args: Any, **kwargs: Any) -> tuple[Any, list[tf.Tensor]]:
        return model(*args, **kwargs), []

    functions = keras2_names.layer_calls(model)
    call = functions.add_function(
        keras2_names.outputs_only(model, outputs_and_losses),
        f"call_of_{model.name}",
        match_layer_training_arg=False,
    )
    with keras2_names.tracing_scope():
        functions.trace_with_input_signature()
    return call


def _widened(spec: Any) -> Any:
    if isinstance(spec, tf.TensorSpec) and spec.dtype in LOW_PRECISION:
        return tf.TensorSpec(spec.shape, tf.float32, spec.name)
    return spec
