"""Operations in a region of `autocast`, where the program sees float32.

The door (`door.py`) hands each operation in a region over. The region's table (`cast_policy.py`)
decides whether it runs in 16 bits, by what its inputs were computed in. If it does, they are cast,
and so is the result (`lower_precision.py`). The door then makes the operation as in any code that
has chosen its dtypes.

This module needs TensorFlow only.
"""

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.hooks import faces, reach
from keras_mp.hooks.reach import Region
from keras_mp.kernels import cast_policy, known_operations, lower_precision
from keras_mp.kernels.cast_policy import OpPolicy
from keras_mp.kernels.known_operations import Operation
from keras_mp.kernels.trials import shape_of, usual_device
from keras_mp.support import op_table, registered_kernels
from keras_mp.tensorflow_api import operations
from keras_mp.variables import scope

# Outside of this range float16 has fewer digits, or none.
_SMALLEST, _LARGEST = 1e-4, 1e4
# A factor can do no more harm than an addition.
_LARGEST_FACTOR = 2.0
# Their result counts as a weight if the input does.
_VIEWS = op_table.ops("identities", "reshapes", "views")
_READS = ("ReadVariableOp",)


class Plan(NamedTuple):
    """What is the same for all calls of an operation in a region.

    Attributes:
        known: the `Operation`.
        policy: str. A key of `cast_policy.POLICIES`; those that change nothing have no plan.
        region: the Region.
    """

    known: Operation
    policy: str
    region: Region


def policy_for(op: str, region: Region, device: str) -> Any:
    """Returns the `OpPolicy` for an operation, or None if there is none.

    Args:
        op: str.
        region: Region.
        device: str, "CPU" or "GPU".
    """
    if op in region.deny:
        return OpPolicy(cast_policy.DENY, "the user says so")
    if op in region.allow:
        return OpPolicy(cast_policy.ALLOW, "the user says so")
    row = cast_policy.ROWS.get(op)
    if row is None or row.policy not in (cast_policy.ALLOW, cast_policy.INFER, cast_policy.CLEAR):
        return row
    if region.dtype == tf.float16 and op in cast_policy.DENIED_IN_FLOAT16:
        return OpPolicy(cast_policy.DENY, cast_policy.WHY_NOT_IN_FLOAT16)
    if device == "CPU" and op in cast_policy.SLOW_ON_CPU:
        return OpPolicy(cast_policy.DENY, cast_policy.WHY_SLOW_ON_CPU)
    ops = (op, *op_table.gradients_of(op))
    if not all(_has_kernel(each, region.dtype, device) for each in ops):
        why = f"this TensorFlow has no {region.dtype.name} kernel of it for a {device}"
        return OpPolicy(cast_policy.DENY, why)
    return row


def _has_kernel(op: str, dtype: tf.DType, device: str) -> bool:
    attribute, enum = known_operations.attribute_of(op, dtype), dtype.as_datatype_enum
    if attribute is None:
        return False
    return registered_kernels.has_kernel(op, {attribute: enum}, device)


def plan_for(op: str) -> Plan | None:
    """Returns the plan of this thread's region for an operation.

    It is None if the operation is left alone.

    Args:
        op: str. The operation.
    """
    return None if reach.thread.is_decided else _plan_of(op, reach.thread.region)


@functools.cache
def _plan_of(op: str, region: Any) -> Plan | None:
    row = policy_for(op, region, usual_device())
    if row is None or row.policy in (cast_policy.DENY, cast_policy.NONE):
        return None
    known = known_operations.taking(op, region.dtype)
    return None if known is None else Plan(known, row.policy, region)


def made(plan: Plan, given: Sequence[Any], pairs: Sequence[Any], make: Callable[..., Any]) -> Any:
    """Returns the results of an operation of a region.

    Args:
        plan: the region's for the operation.
        given: its inputs.
        pairs: names and values of its attributes in turn.
        make: takes inputs, attributes, and the DType of gradients in 16 bits if there is one;
            returns the result, or a list of them.
    """
    known, region = plan.known, plan.region
    read = {i: _read(given[i]) for i in known.positions}
    values = _tensors_and_numbers(list(read.values()))
    dtype = _dtype_for(plan, values, pairs, region.dtype)
    if dtype is None and (known.name not in _VIEWS or not tf.executing_eagerly()):
        return make(given, pairs)
    only_gradients = region.gradients_only and dtype == region.dtype
    wanted = tf.float32 if only_gradients else dtype
    cast: list[Any] = [known.as_tensor(i, value) for i, value in enumerate(given)]
    for i, value in read.items():
        cast[i] = value if wanted is None else _cast(value, wanted)
    if dtype is None:
        result = make(cast, pairs)
        if values and _is_weight(values[0]):
            faces.note(result, None, faces.WEIGHT)
        return result
    if only_gradients:
        return make(cast, pairs, dtype)
    try:
        results = make(cast, pairs)
    except operations.QuickWayFailed.get():
        if len({value.dtype for value in values if tf.is_tensor(value)}) > 1:
            raise
        # No such kernel, or a mistake of the user's, which TensorFlow is to report.
        return make(given, pairs)
    # In a graph, tapes hear of these casts when they have heard of the operation: see
    # `door.on_tape`.
    return _to_float32(results, region.dtype, known.name)


def _read(value: Any) -> Any:
    """Returns an input with tensors in the place of variables and arrays."""
    if isinstance(value, list | tuple):
        return [_read(each) for each in value]
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else scope.read(value)


def _tensors_and_numbers(inputs: Sequence[Any]) -> list[Any]:
    """Returns the inputs and those in lists, or nothing if there is something else."""
    values: list[Any] = []
    for each in inputs:
        values.extend(each if isinstance(each, list | tuple) else [each])
    return values if all(map(_is_tensor_or_number, values)) else []


def _is_tensor_or_number(value: object) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number or isinstance(value, tf.Tensor)


def _dtype_for(
    plan: Plan, values: Sequence[tf.Tensor | float], pairs: Sequence[Any], dtype: tf.DType
) -> Any:
    """Returns the dtype that an operation runs in.

    It is the region's, float32 where 16-bit and float32 tensors meet, or None if the operation is
    left alone.
    """
    found = {value.dtype for value in values if isinstance(value, tf.Tensor)}
    if not found or not found.issubset(lower_precision.FLOATS) or tf.float32 not in found:
        return None
    if plan.policy == cast_policy.ALLOW:
        is_sum = plan.known.has_list and len(values) == 1  # an `einsum` of one tensor
        # Such as positions and frequencies.
        is_outer = known_operations.sums_nothing(values, pairs) and not all(
            lower_precision.low_precision_of(value, dtype) is not None
            or _is_weight(value)
            or shape_of(value).num_elements() == 1
            for value in values
        )
        return None if is_sum or is_outer else dtype
    if len(found) > 1:
        return tf.float32
    if plan.policy == cast_policy.PROMOTE:
        return None
    if not any(lower_precision.low_precision_of(value, dtype) is not None for value in values):
        return None
    if not all(_is_safe(value, dtype) for value in values):
        return None
    is_product = plan.known.name == "Mul" and dtype == tf.float16
    return None if is_product and not any(map(_is_small_factor, values)) else dtype


def _is_safe(value: tf.Tensor | float, dtype: tf.DType) -> bool:
    """Whether a value fits into the dtype.

    It does as well as the numbers that models compute in this dtype.
    """
    if lower_precision.low_precision_of(value, dtype) is not None or _is_weight(value):
        return True
    if dtype == tf.bfloat16:  # It has the range of float32.
        return not isinstance(value, tf.Tensor) or value.shape.rank == 0
    number = _number(value)
    return number is not None and (number == 0 or _SMALLEST <= abs(number) <= _LARGEST)


def _is_weight(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and faces.is_weight(value, _VIEWS, _READS)


def _is_small_factor(value: tf.Tensor | float) -> bool:
    if isinstance(value, tf.Tensor) and faces.kind_of(value) == faces.BOUNDED:
        return True
    number = _number(value)
    return number is not None and abs(number) <= _LARGEST_FACTOR


def _number(value: tf.Tensor | float) -> float | None:
    """Returns the value of a scalar if it is known now."""
    if not isinstance(value, tf.Tensor):
        return float(value)
    if value.shape.rank != 0:
        return None
    if not tf.is_symbolic_tensor(value):
        # Reading it from another device would wait for the device.
        return float(value) if value.device.endswith("CPU:0") else None
    known = tf.get_static_value(value)
    return None if known is None else float(known)


def _cast(value: Any, dtype: tf.DType) -> Any:
    if isinstance(value, list | tuple):
        return [_cast(each, dtype) for each in value]
    if dtype == tf.float32:  # A 16-bit tensor meets float32 ones.
        return tf.cast(value, dtype)
    return lower_precision.to_low_precision(value, dtype)


def _to_float32(result: Any, dtype: tf.DType, op: str) -> Any:
    if isinstance(result, list | tuple):
        return [_to_float32(each, dtype, op) for each in result]
    if not tf.is_tensor(result) or result.dtype != dtype:
        return result
    cast = lower_precision.to_float32(result)
    faces.note(cast, result, faces.BOUNDED if op in cast_policy.BOUNDED else faces.LOW)
    return cast
