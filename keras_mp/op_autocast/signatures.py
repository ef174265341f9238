"""Functions that were written for float32, and get 16-bit tensors from a layer.

Concrete functions, those of SavedModels, and functions of Python that run outside of the graph say
which dtypes they take or return. (A `tf.function` that refuses 16 bits is called again in
`promotion.py`.) In the reach of keras_mp (`hooks/reach.py`) they get float32 where they were
written for it, and 16 bits where they were written for these. What they return in float32 meets 16
bits as any float32 tensor does. This module needs TensorFlow only.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.hooks import Everywhere, Replacement, reach
from keras_mp.support.dtypes import LOW_PRECISION
from keras_mp.tensorflow_api import graphs, saving
from keras_mp.tensorflow_api.features import SIGNATURES

_PYTHON = {
    "py_function": tf.py_function,
    "numpy_function": tf.numpy_function,
    "py_func": tf.compat.v1.py_func,
}


def replacements(
    is_active: Callable[[], bool], widened: Callable[[Any], Any]
) -> tuple[Replacement, ...]:
    """Returns the rows of TensorFlow's functions that are replaced.

    Args:
        is_active: whether 16 bits become float32 in this thread.
        widened: takes anything and returns a tensor or variable of 16 bits as a float32 tensor.
    """

    def cast(value: Any, dtype: tf.DType) -> Any:
        if dtype in LOW_PRECISION:
            # Layers that a SavedModel has in 16 bits may be the last ones of a model.
            return narrowed(value, dtype)
        return widened(value) if dtype is tf.float32 else value

    def narrowed(value: Any, dtype: tf.DType | None) -> Any:
        is_wide = isinstance(value, tf.Tensor) and value.dtype == tf.float32
        return value if dtype is None or not is_wide else tf.cast(value, dtype)

    def concrete(original: Callable[..., Any]) -> Callable[..., Any]:
        def call_flat(self: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
            if is_active():
                wanted = [each.dtype for each in self.graph.inputs]
                tensor_inputs = [*map(cast, tensor_inputs, wanted[: len(tensor_inputs)])]
            return original(self, tensor_inputs, captured_inputs)

        return call_flat

    def loaded(original: Callable[..., Any]) -> Callable[..., Any]:
        def is_callable_with(function: Any, inputs: Any, allow_conversion: bool) -> bool:
            if original(function, inputs, allow_conversion):
                return True
            if not (allow_conversion and is_active()):
                return False
            # It casts them when it is called.
            narrow = functools.partial(narrowed, dtype=reach.current())
            return any(
                original(function, tf.nest.map_structure(change, inputs), allow_conversion)
                for change in (widened, narrow)
            )

        return is_callable_with

    def of_python(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(func: Any = None, inp: Any = None, Tout: Any = None, **kwargs: Any) -> Any:
            asks_for_low = any(map(_asks_for_low, tf.nest.flatten(Tout)))
            if inp is not None and is_active() and not asks_for_low:
                inp = tf.nest.map_structure(widened, inp)
            return original(func, inp, Tout, **kwargs)

        return call

    return (
        Replacement(graphs.call_flat, concrete, feature=SIGNATURES),
        Replacement(saving.is_callable_with, loaded, feature=SIGNATURES),
        *(
            Replacement(Everywhere(original, (name,)), of_python)
            for name, original in _PYTHON.items()
        ),
    )


def _asks_for_low(dtype: Any) -> bool:
    return getattr(dtype, "dtype", dtype) in LOW_PRECISION
