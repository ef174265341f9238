"""In which dtype an operation of a region runs, given what comes in.

This module needs TensorFlow only.
"""

import numbers
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_mp.op_autocast import op_table, visible
from keras_mp.op_autocast.plans import Plan
from keras_mp.support.dtypes import LOW_PRECISION

_FLOATS = (tf.float32, *LOW_PRECISION)
# Beyond these float16 has fewer digits, or none.
_SMALLEST, _LARGEST = 1e-4, 1e4
# A factor can do no more harm than an addition.
_LARGEST_FACTOR = 2.0


def dtype_for(plan: Plan, values: Sequence[Any], dtype: tf.DType) -> tf.DType | None:
    """Decides in which dtype an operation runs.

    Args:
        plan: of the operation.
        values: its inputs that share a dtype: tensors and numbers.
        dtype: DType of the region.

    Returns:
        The region's dtype, or float32 where 16-bit and float32 tensors meet, or None: as it is.
    """
    found = {value.dtype for value in values if not isinstance(value, numbers.Real)}
    if not found or not found.issubset(_FLOATS) or tf.float32 not in found:
        return None
    if plan.verdict == op_table.ALLOW:
        return dtype
    if len(found) > 1:
        return tf.float32
    if plan.verdict == op_table.PROMOTE:
        return None
    if not any(visible.narrow_of(value, dtype) is not None for value in values):
        return None
    if not all(_is_safe(value, dtype) for value in values):
        return None
    if plan.op == "Mul" and dtype == tf.float16 and not any(map(_is_small_factor, values)):
        return None
    return dtype


def _is_safe(value: Any, dtype: tf.DType) -> bool:
    """Does the value fit into the dtype as well as what models compute in it?"""
    if visible.narrow_of(value, dtype) is not None or visible.origin(value).is_weight:
        return True
    if dtype == tf.bfloat16:  # It has the range of float32.
        return isinstance(value, numbers.Real) or value.shape.rank == 0
    number = _number(value)
    return number is not None and (number == 0 or _SMALLEST <= abs(number) <= _LARGEST)


def _is_small_factor(value: Any) -> bool:
    if visible.origin(value).is_bounded:
        return True
    number = _number(value)
    return number is not None and abs(number) <= _LARGEST_FACTOR


def _number(value: Any) -> float | None:
    """The value of a scalar that is known here and now."""
    if isinstance(value, numbers.Real):
        return float(value)
    if value.shape.rank != 0:
        return None
    if isinstance(value, tf.__internal__.EagerTensor):
        # Reading it from another device would wait for the device.
        return float(value) if value.device.endswith("CPU:0") else None
    known = tf.get_static_value(value)
    return None if known is None else float(known)
