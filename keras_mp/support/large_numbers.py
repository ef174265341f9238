"""Numbers that float32 holds and 16 bits do not.

For example -1e9 is -inf in float16, and 0 times that is NaN. This module needs TensorFlow only.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.support.dtypes import LOW_PRECISION, is_low
from keras_mp.tensorflow_api import operations

# Asking a DType for it takes long.
_MAX = float(tf.float32.max)
_MAX_OF: dict[tf.DType | None, float] = {dtype: float(dtype.max) for dtype in LOW_PRECISION}
# The types of a number that is an input of an operation.
_TYPES = frozenset((float, int, list, tuple, np.ndarray, np.float32, np.float64))


def is_beyond(value: Any, dtype: tf.DType | None) -> bool:
    """Whether a number is finite in float32, but too large for a dtype.

    Args:
        value: a number; an array or list counts if one of its numbers does.
        dtype: DType of 16 bits.
    """
    if isinstance(value, float | int):
        return _MAX_OF[dtype] < abs(value) <= _MAX
    if isinstance(value, list | tuple):
        return any(is_beyond(each, dtype) for each in value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "fiu":
        size = np.abs(value.astype(np.float64))
        return bool(np.any((_MAX_OF[dtype] < size) & (size <= _MAX)))
    return False


def is_operand_beyond(op: str, args: Sequence[Any]) -> bool:
    """Whether a number passed to an operation is infinite in its 16-bit dtype.

    Args:
        op: str. The operation's name.
        args: its inputs, as generated code passes them.
    """
    positions = _positions.get(op)
    if positions is None:
        positions = _positions[op] = _find_positions(op)
    for i in positions:
        if type(args[i]) in _TYPES:
            values = tf.nest.flatten([args[i] for i in positions])
            low = next(
                (each.dtype for each in values if is_low(getattr(each, "dtype", None))), None
            )
            return low is not None and any(is_beyond(each, low) for each in values)
    return False


# By operation: the positions of the inputs that share one dtype, which may have 16 bits.
_positions: dict[str, tuple[int, ...]] = {}


def _find_positions(op: str) -> tuple[int, ...]:
    if not (operations.definition.is_there() and operations.TakeSlowerWay.is_there()):
        return ()
    op_def = operations.definition(op)
    if op_def is None:
        return ()
    low = {dtype.as_datatype_enum for dtype in LOW_PRECISION}
    for attr in op_def.attr:
        allowed = {*attr.allowed_values.list.type}
        if attr.type != "type" or (allowed and not low & allowed):
            continue
        args = [(i, arg) for i, arg in enumerate(op_def.input_arg) if arg.type_attr == attr.name]
        if len(args) > 1 or any(arg.number_attr for _, arg in args):
            return tuple(i for i, _ in args)
    return ()
