"""The loop of Keras 2's LSTM."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Replacement
from keras_mp.keras_api import keras2_adapters, keras2_names

# Keras's tests see which of its kernels ran. This is its number for none that it knows.
_NO_KERNEL_OF_KERAS = 0.0
_TENSORS = ("inputs", "init_h", "init_c", "kernel", "recurrent_kernel", "bias")


def replace_slow_layers(lstm: Callable[..., Any], batch_normalization: Callable[..., Any]) -> None:
    del batch_normalization  # one kernel in Keras 2
    # One runs in eager, the other in graphs. They return the results and the kernel that ran.
    feature = keras2_names.LSTM
    make = functools.partial(_replaced, lstm)
    hooks.install(Replacement(name, make, feature=feature) for name in feature.names)
    keras2_adapters.let_functions_find_variables()


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
