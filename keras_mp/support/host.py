"""Where code runs: in eager, in a graph, or in what XLA compiles.

This module needs TensorFlow only.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.support import features, function_graphs, op_callbacks
from keras_mp.tensorflow_api import graphs
from keras_mp.tensorflow_api.features import XLA


def local_variable(name: str, value: Any, dtype: tf.DType = tf.int64) -> tf.Variable:
    """Makes a variable that each replica reads and writes for itself.

    Args:
        name: str.
        value: number or list of numbers. The initial value.
        dtype: DType. Defaults to int64.
    """
    on_read, first = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.ONLY_FIRST_REPLICA
    how = {"trainable": False, "synchronization": on_read, "aggregation": first}
    with tf.init_scope():
        return tf.Variable(value, dtype=dtype, name=name, **how)


def as_one_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes one operation of a function.

    In a graph, each operation costs, even in a branch that is not taken.

    Args:
        function: function of structures of tensors, which may assign to variables.

    Returns:
        In eager, a function that does the same; in a graph, one that makes one operation at each
        call.
    """
    return function if tf.executing_eagerly() else _one_operation(function)


def shared_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function as `as_one_operation` does, but traces it only once.

    All callers share the trace. A trace for arguments of certain shapes and dtypes is kept for as
    long as the process runs.

    Args:
        function: function of structures of tensors, which depends on nothing else but whether XLA
            compiles it.

    Returns:
        The decorated function.
    """
    operations = [_one_operation(function) for _ in range(2)]

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if tf.executing_eagerly():
            return function(*args)
        # Otherwise the operations of the first caller's observers would stay in the trace that all
        # callers run.
        with op_callbacks.unobserved():
            return operations[is_compiled_by_xla()](*args)

    return call


def _one_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})


def rarely(condition: Any, function: Callable[[], None]) -> None:
    """Calls a function if a condition holds, which seldom does.

    A GPU would wait for the condition. There, and where XLA compiles, the function is called in any
    case.

    Args:
        condition: bool scalar tensor.
        function: function without arguments or results. It changes nothing if the condition does
            not hold.
    """
    if tf.executing_eagerly():
        return function() if condition else None
    kinds = {device.device_type for device in tf.config.list_logical_devices()}
    is_free = kinds == {"CPU"} and not is_compiled_by_xla()
    return tf.cond(condition, function, lambda: None) if is_free else function()


def is_compiled_by_xla() -> bool:
    """Whether XLA compiles the function that is being traced."""
    if not features.is_on(XLA):
        # Without the private names: code for XLA works in every function.
        return function_graphs.is_of_function(current_graph())
    return graphs.xla_context() is not None


def in_v1_graph() -> bool:
    """Whether a graph of TensorFlow 1, which a session runs, is being built."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def current_graph() -> Any:
    """Returns the graph that is being built, or None in eager."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def chosen(
    condition: bool | tf.Tensor, value: Callable[[], Any], otherwise: Callable[[], Any]
) -> Any:
    """Returns one of two values, without a branch.

    On a GPU, a branch copies its condition to the host, which waits for it. Eager code computes
    only the value that it returns.

    Args:
        condition: bool, or bool scalar tensor.
        value: function that returns the value if it is True.
        otherwise: function that returns the value if it is False.
    """
    if isinstance(condition, bool) or tf.executing_eagerly():
        return value() if condition else otherwise()
    return tf.where(condition, value(), otherwise())
