"""Products whose result is float32's, and whose gradients are computed in 16 bits.

TensorFlow has no product that takes 16 bits and returns float32 on a CPU, and one that returns 16
bits has rounded each number. So the forward product is one in float32, and the two products of the
backward pass are those of the same operation in 16 bits. This module needs TensorFlow only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from keras_mp.hooks import reach
from keras_mp.support.dtypes import LOW_PRECISION
from keras_mp.tensorflow_api import gradients, graphs

_Results = TypeVar("_Results")


def run_in_eager(
    run: Callable[..., _Results], op: str, args: Sequence[Any], inputs: int, dtype: tf.DType
) -> _Results:
    """Runs an operation in eager, and tells tapes of its gradient in 16 bits.

    Args:
        run: takes `args` and returns the result, or a list of them.
        op: str. The operation.
        args: its inputs, in float32, then names and values of attributes in turn.
        inputs: int. How many of `args` are inputs.
        dtype: DType of 16 bits.
    """
    with gradients.stop_recording():
        results = run(*args)
    tensors = tf.nest.flatten(list(args[:inputs]))
    computed = results if isinstance(results, list | tuple) else [results]
    name = _gradient_of(op, dtype).name
    gradients.record_gradient(name, tensors, tuple(args[inputs:]), list(computed))
    return results


def set_in_graph(op: tf.Operation, dtype: tf.DType) -> None:
    """Gives an operation in a graph its gradient in 16 bits.

    The inputs of the operation are float32. An attribute would not do: in a file, TensorFlow takes
    it for a function like an identity's.
    """
    gradient = _gradient_of(op.type, dtype)
    graphs.gradient_function.set_of(op, gradient)


def name_of_gradient(op: str, results: Sequence[Any]) -> str:
    """Returns the name of the gradient of an operation.

    It is the operation's type, or the name that `set_in_graph` gave.

    Args:
        op: str. Its type.
        results: its results.
    """
    is_in_graph = results and not tf.executing_eagerly()
    gradient = graphs.gradient_function.of(results[0].op) if is_in_graph else None
    return gradient.name if isinstance(gradient, _Gradient) else op


class _InLowPrecision:
    """An operation as its gradient function sees it, with 16-bit inputs.

    Args:
        op: operation, or the object in its place that a tape has kept.
        dtype: DType.
    """

    def __init__(self, op: tf.Operation, dtype: tf.DType) -> None:
        self._op, self._dtype = op, dtype
        # As `backward.py` marks what was made in reach; a tape has no mark of this one.
        self.attrs, self._keras_mp_made = None, dtype
        self.inputs = [_cast(each, dtype) for each in op.inputs]

    def get_attr(self, name: str) -> object:
        value = self._op.get_attr(name)
        # A DType equals its number too, and 1 is that of float32.
        return self._dtype if isinstance(value, tf.DType) and value == tf.float32 else value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)


class _Gradient:
    """The gradient function of an operation with float32 inputs, in 16 bits.

    Attributes:
        name: str, under which TensorFlow knows it.

    Args:
        op: str. The type of the operation.
        dtype: DType.
    """

    def __init__(self, op: str, dtype: tf.DType) -> None:
        self._op, self._dtype = op, dtype
        self.name = f"KerasMpGradientIn_{dtype.name}_{op}"
        tf.RegisterGradient(self.name)(self)

    def __call__(self, op: tf.Operation, *upstream: tf.Tensor | None) -> object:
        if not isinstance(op, tf.Operation):
            op.type = self._op  # On a tape, the name of the gradient is there.
        differentiate = gradients.registry.get().lookup(self._op)
        low = [_cast(each, self._dtype) for each in upstream]
        with reach.entered(self._dtype):
            found = differentiate(_InLowPrecision(op, self._dtype), *low)
        return tf.nest.map_structure(lambda each: _cast(each, tf.float32), found)


def _cast(value: Any, dtype: tf.DType) -> Any:
    """Casts a float32 or 16-bit tensor; returns anything else as it is."""
    is_float = isinstance(value, tf.Tensor) and value.dtype in (tf.float32, *LOW_PRECISION)
    return tf.cast(value, dtype) if is_float and value.dtype != dtype else value


_gradient_of = functools.cache(_Gradient)
