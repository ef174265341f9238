"""Does things on a condition without a branch, in and beside code for XLA.

On a GPU, a branch copies its condition to the host, which waits for it. Where XLA compiles, both
branches of `choose` are computed, one after the other, and each write to a variable selects the new
value or the old one, elementwise. XLA makes that selection in the loop that computes the new value.

This module needs TensorFlow only.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.support import host, variable_ops
from keras_mp.tensorflow_api import graphs
from keras_mp.tensorflow_api.features import WITHOUT_BRANCHES

# Operations that write to the rows of a variable that the second input names.
_ROW_WRITES = frozenset(
    f"ResourceScatter{kind}" for kind in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Update")
)
# The operations whose output is a handle in a function's graph: an argument, or the variable
# itself.
_SOURCES = frozenset(("Placeholder", "VarHandleOp"))


def is_without_branches() -> bool:
    """Whether `choose` makes no branch here."""
    if not host.is_compiled_by_xla():
        return False
    # A branch may call Python, which XLA cannot do. If a private name is missing, the step is
    # refused.
    for name in WITHOUT_BRANCHES.names:
        name.get()
    return True


def chosen(
    condition: bool | tf.Tensor, value: Callable[[], Any], otherwise: Callable[[], Any]
) -> Any:
    """Returns one of two values, without a branch.

    Eager code computes only the one that it returns.

    Args:
        condition: bool, or bool scalar tensor.
        value: function that returns the value if it is True.
        otherwise: function that returns the value if it is False.
    """
    if isinstance(condition, bool) or tf.executing_eagerly():
        return value() if condition else otherwise()
    return tf.where(condition, value(), otherwise())


def choose(
    condition: bool | tf.Tensor, chosen: Callable[[], Any], otherwise: Callable[[], Any]
) -> Any:
    """Does one thing or another.

    It is `tf.cond`, but without a branch in code that XLA compiles.

    Args:
        condition: bool, or bool scalar tensor.
        chosen: function that writes to variables.
        otherwise: another such function. Without a branch, both run, this one second, and what it
            writes is dropped if the condition is True.

    Returns:
        The result of the branch that is taken; None if there is no branch.
    """
    condition = tf.convert_to_tensor(condition)
    if not is_without_branches():
        return tf.cond(condition, chosen, otherwise)
    with writes_only_if(condition):
        chosen()
    with writes_only_if(tf.logical_not(condition)):
        otherwise()
    return None


def choose_among(index: tf.Tensor, branches: Sequence[Callable[[], Any]]) -> Any:
    """Does one of several things.

    It is `tf.switch_case`, but without a branch in code that XLA compiles.

    Args:
        index: int32 scalar tensor.
        branches: functions that write to variables. A later one may see the writes of an earlier
            one only if the earlier one is taken.

    Returns:
        The result of the branch that is taken; None if there is no branch.
    """
    if not is_without_branches():
        return tf.switch_case(index, branches)
    for i, branch in enumerate(branches):
        with writes_only_if(tf.equal(index, i)):
            branch()
    return None


@contextlib.contextmanager
def writes_only_if(condition: tf.Tensor) -> Iterator[None]:
    """Context manager in which writes to variables count only on a condition.

    If it is False, the variables keep their values.

    Args:
        condition: bool scalar tensor.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    original, is_ours = graph._create_op_internal, False

    def create(op_type: str, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> tf.Operation:
        nonlocal is_ours
        # Collectives order themselves.
        is_read = op_type in variable_ops.THAT_ONLY_READ or op_type.startswith("Collective")
        handles = [] if is_ours or is_read else list(filter(_is_of_variable, inputs))
        if not handles:
            return original(op_type, inputs, *args, **kwargs)
        is_ours = True
        try:
            rows = inputs[1] if op_type in _ROW_WRITES else None
            before = [_read(handle, rows) for handle in handles]
            operation = original(op_type, inputs, *args, **kwargs)
            for handle, old in zip(handles, before, strict=True):
                _write(handle, rows, tf.where(condition, _read(handle, rows), old))
        finally:
            is_ours = False
        return operation

    graph._create_op_internal = create
    try:
        yield
    finally:
        # `original` is put back only if it is the function of an outer context: a bound method
        # would be a cycle.
        del graph._create_op_internal
        if not hasattr(original, "__self__"):
            graph._create_op_internal = original


def _is_of_variable(tensor: Any) -> bool:
    return tensor.dtype == tf.resource and (
        not hasattr(tensor, "graph") or tensor.op.type in _SOURCES
    )


def _read(handle: tf.Tensor, rows: tf.Tensor | None) -> tf.Tensor:
    dtype = graphs.handle_data(handle).shape_and_type[0].dtype
    if rows is None:
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
    return tf.raw_ops.ResourceGather(resource=handle, indices=rows, dtype=dtype)


def _write(handle: tf.Tensor, rows: tf.Tensor | None, value: tf.Tensor) -> None:
    if rows is None:
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    else:
        tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=rows, updates=value)
