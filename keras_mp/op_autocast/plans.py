"""The plan of an operation in a region: inputs to cast, and the dtype to run in.

The `Plan` is the same for all calls of an operation in a region, and has the inputs. The dtype
depends on the inputs of each call: `dtype_for`. This module needs TensorFlow only.
"""

import difflib
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_mp.hooks.reach import Region
from keras_mp.kernels import sums, trials
from keras_mp.op_autocast import cast_policy, lower_precision
from keras_mp.op_autocast.cast_policy import OpPolicy
from keras_mp.support import features, op_table, registered_kernels
from keras_mp.tensorflow_api import operations
from keras_mp.tensorflow_api.features import REGIONS

# Outside of this range float16 has fewer digits, or none.
_SMALLEST, _LARGEST = 1e-4, 1e4
# A factor can do no more harm than an addition.
_LARGEST_FACTOR = 2.0


class Plan(NamedTuple):
    """Facts that are the same for all calls of an operation in a region.

    Attributes:
        op: str. Its name.
        policy: str. A key of `cast_policy.POLICIES`; those that change nothing have no plan.
        names: of all inputs, in their order.
        positions: of the inputs that share the dtype that a region changes.
        others: the positions of other inputs, such as shapes and indices, their dtypes or None, and
            those that empty lists have.
        is_bounded: bool. Whether results are at most 1.
        is_view: bool. Whether the result counts as the value of a variable if the input does.
    """

    op: str
    policy: str
    names: tuple[str, ...]
    positions: tuple[int, ...]
    others: tuple[tuple[int, tf.DType | None, tf.DType | None], ...]
    is_bounded: bool
    is_view: bool


def dtype_for(plan: Plan, values: Sequence[tf.Tensor | float], dtype: tf.DType) -> tf.DType | None:
    """Returns the dtype that an operation runs in.

    Args:
        plan: the `Plan` of the operation.
        values: the inputs that share a dtype: tensors and numbers.
        dtype: DType of the region.

    Returns:
        The region's dtype, or float32 where 16-bit and float32 tensors meet, or None if the
        operation is left alone.
    """
    found = {value.dtype for value in values if isinstance(value, tf.Tensor)}
    if not found or not found.issubset(lower_precision.FLOATS) or tf.float32 not in found:
        return None
    if plan.policy == cast_policy.ALLOW:
        return dtype
    if len(found) > 1:
        return tf.float32
    if plan.policy == cast_policy.PROMOTE:
        return None
    if not any(lower_precision.low_precision_of(value, dtype) is not None for value in values):
        return None
    if not all(_is_safe(value, dtype) for value in values):
        return None
    if plan.op == "Mul" and dtype == tf.float16 and not any(map(_is_small_factor, values)):
        return None
    return dtype


def _is_safe(value: tf.Tensor | float, dtype: tf.DType) -> bool:
    """Whether a value fits into the dtype.

    It does as well as the numbers that models compute in this dtype.
    """
    if lower_precision.low_precision_of(value, dtype) is not None:
        return True
    if lower_precision.origin(value).is_weight:
        return True
    if dtype == tf.bfloat16:  # It has the range of float32.
        return not isinstance(value, tf.Tensor) or value.shape.rank == 0
    number = _number(value)
    return number is not None and (number == 0 or _SMALLEST <= abs(number) <= _LARGEST)


def _is_small_factor(value: tf.Tensor | float) -> bool:
    if lower_precision.origin(value).is_bounded:
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


def policy_for(op: str, region: Region, device: str) -> OpPolicy | None:
    """Returns the policy for an operation, or None if there is none.

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
    if not _has_kernels(op, region.dtype, device):
        why = f"this TensorFlow has no {region.dtype.name} kernel of it for a {device}"
        return OpPolicy(cast_policy.DENY, why)
    return row


@functools.cache
def plan_of(op: str, region: Region) -> Plan | None:
    """Returns the plan of a region for an operation, or None if it is left alone.

    Args:
        op: str.
        region: Region.
    """
    row = policy_for(op, region, trials.usual_device())
    if row is None or row.policy in (cast_policy.DENY, cast_policy.NONE):
        return None
    op_def, attr = operations.definition(op), dtype_attr(op, region.dtype)
    if op_def is None or attr is None:
        return None
    defaults = {
        attr.name: tf.as_dtype(attr.default_value.type)
        for attr in op_def.attr
        if attr.default_value.type
    }
    return Plan(
        op=op,
        policy=row.policy,
        names=tuple(arg.name for arg in op_def.input_arg),
        positions=tuple(i for i, arg in enumerate(op_def.input_arg) if arg.type_attr == attr),
        others=tuple(
            (i, tf.as_dtype(arg.type) if arg.type else None, defaults.get(arg.type_attr))
            for i, arg in enumerate(op_def.input_arg)
            if arg.type_attr != attr and not arg.number_attr and not arg.type_list_attr
        ),
        is_bounded=op in cast_policy.BOUNDED,
        is_view=op in cast_policy.SAME_WEIGHT,
    )


def dtype_attr(op: str, dtype: tf.DType) -> str | None:
    """Returns the attribute that gives the operation's inputs the dtype, or None.

    It is that of the first input that may be float32 as well as of the dtype.

    Args:
        op: str. The operation's name.
        dtype: DType.
    """
    op_def = operations.definition(op)
    if op_def is None:
        return None
    wanted = {tf.float32.as_datatype_enum, dtype.as_datatype_enum}
    allowed = {attr.name: set(attr.allowed_values.list.type) for attr in op_def.attr}
    for arg in op_def.input_arg:
        if arg.type_attr and (not allowed[arg.type_attr] or wanted <= allowed[arg.type_attr]):
            return arg.type_attr
    return None


def check_names(argument: str, ops: Iterable[str], dtype: tf.DType | None) -> frozenset[str]:
    """Checks names of operations that the user passed.

    Args:
        argument: str. The name of the argument.
        ops: iterable of str.
        dtype: DType in which they are to run, or None if they are not to.

    Returns:
        The names.

    Raises:
        TypeError: `ops` is one string, or not iterable.
        ValueError: TensorFlow has no such operation, or it cannot run in `dtype`.
    """
    if isinstance(ops, str) or not hasattr(ops, "__iter__"):
        raise TypeError(
            f"`{argument}` must be a list of names of operations, such as ['Tanh']. "
            f"Received: {argument}={ops!r}"
        )
    names = frozenset(ops)
    if not features.is_on(REGIONS):
        return names
    for op in sorted(names, key=str):
        if not isinstance(op, str) or operations.definition(op) is None:
            by_lower_case = {name.lower(): name for name in dir(tf.raw_ops)}
            wanted = str(op).replace("_", "").lower()
            nearest = difflib.get_close_matches(wanted, by_lower_case, n=1, cutoff=0.5)
            hint = f" Did you mean {by_lower_case[nearest[0]]!r}?" if nearest else ""
            raise ValueError(
                f"TensorFlow has no operation {op!r}; `tf.raw_ops` has their names.{hint} "
                f"Received: {argument}={sorted(map(str, names))}"
            )
        if dtype is None:
            continue
        if op in sums.KERNELS:
            raise ValueError(
                f"The operation {op!r} adds up in the dtype of its inputs, and some of "
                "TensorFlow's kernels lose terms of a sum in 16 bits. Expected other operations. "
                f"Received: {argument}={sorted(names)}"
            )
        if dtype_attr(op, dtype) is None:
            raise ValueError(
                f"The operation {op!r} does not take tensors of {dtype.name}. Expected one that "
                f"takes float32 and {dtype.name}. Received: {argument}={sorted(names)}"
            )
    return names


def _has_kernels(op: str, dtype: tf.DType, device: str) -> bool:
    return all(has_kernel(each, dtype, device) for each in (op, *op_table.gradients_of(op)))


@functools.cache
def has_kernel(op: str, dtype: tf.DType, device: str) -> bool:
    """Whether TensorFlow computes an operation in a dtype.

    Args:
        op: str. The operation's name.
        dtype: DType.
        device: str. The type of the device, "CPU" or "GPU".
    """
    attr, enum = dtype_attr(op, dtype), dtype.as_datatype_enum
    return attr is not None and registered_kernels.has_kernel(op, {attr: enum}, device)
