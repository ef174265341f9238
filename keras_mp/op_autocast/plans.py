"""What a region does with an operation: which of its inputs are cast, and when.

This module needs TensorFlow only.
"""

import difflib
import functools
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import op_def_registry as _op_defs

from keras_mp.kernels import sums
from keras_mp.op_autocast import op_table
from keras_mp.support import registered_kernels
from keras_mp.support.regions import Region


class Plan(NamedTuple):
    """Of one operation in one region.

    Attributes:
        op: str. Its name.
        verdict: str. A key of `op_table.VERDICTS`; those that change nothing have no plan.
        names: of all inputs, in their order.
        positions: of the inputs that share the dtype in question.
        others: positions of other inputs, such as shapes and indices, and their dtypes, or None.
        is_bounded: bool. Are results at most 1?
        is_view: bool. Is the result as good as a variable if the input is?
    """

    op: str
    verdict: str
    names: tuple[str, ...]
    positions: tuple[int, ...]
    others: tuple[tuple[int, tf.DType | None], ...]
    is_bounded: bool
    is_view: bool


class Plans(dict):
    """The plans of a region by operation, made when they are asked for; None: left alone.

    Args:
        region: Region.
    """

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.dtype = region.dtype
        self._region = region
        self._device = usual_device()

    def __missing__(self, op: str) -> Plan | None:
        self[op] = plan = _make(op, self._region, self._device)
        return plan


plans_of = functools.cache(Plans)


@functools.cache
def usual_device() -> str:
    """Returns the type of the device on which TensorFlow computes unless it is told otherwise."""
    return "GPU" if tf.config.list_logical_devices("GPU") else "CPU"


def verdict_on(op: str, region: Region, device: str) -> op_table.Row | None:
    """Returns what is done with an operation, or None if nothing is known of it.

    Args:
        op: str.
        region: Region.
        device: str, "CPU" or "GPU".
    """
    if op in region.deny:
        return op_table.Row(op_table.DENY, "the user says so")
    if op in region.allow:
        return op_table.Row(op_table.ALLOW, "the user says so")
    row = op_table.ROWS.get(op)
    if row is None or row.verdict not in (op_table.ALLOW, op_table.INFER, op_table.CLEAR):
        return row
    if region.dtype == tf.float16 and op in op_table.SUMS_IN_FLOAT16:
        return op_table.Row(op_table.DENY, op_table.WHY_NOT_IN_FLOAT16)
    if device == "CPU" and op in op_table.SLOW_ON_CPU:
        return op_table.Row(op_table.DENY, op_table.WHY_SLOW_ON_CPU)
    if not _has_kernels(op, region.dtype, device):
        why = f"this TensorFlow has no {region.dtype.name} kernel of it for a {device}"
        return op_table.Row(op_table.DENY, why)
    return row


def _make(op: str, region: Region, device: str) -> Plan | None:
    row = verdict_on(op, region, device)
    if row is None or row.verdict in (op_table.DENY, op_table.APART):
        return None
    op_def = _op_defs.get(op)
    attr = None if op_def is None else dtype_attr(op, region.dtype)
    if attr is None:
        return None
    return Plan(
        op=op,
        verdict=row.verdict,
        names=tuple(arg.name for arg in op_def.input_arg),
        positions=tuple(i for i, arg in enumerate(op_def.input_arg) if arg.type_attr == attr),
        others=tuple(
            (i, tf.as_dtype(arg.type) if arg.type else None)
            for i, arg in enumerate(op_def.input_arg)
            if arg.type_attr != attr and not arg.number_attr and not arg.type_list_attr
        ),
        is_bounded=op in op_table.BOUNDED,
        is_view=op in op_table.VIEWS,
    )


def dtype_attr(op: str, dtype: tf.DType) -> str | None:
    """Returns the attribute that gives the operation's inputs the dtype, or None.

    It is that of the first input that may be float32 as well as of the dtype.

    Args:
        op: str. The name of a registered operation.
        dtype: DType.
    """
    op_def = _op_defs.get(op)
    wanted = {tf.float32.as_datatype_enum, dtype.as_datatype_enum}
    allowed = {attr.name: set(attr.allowed_values.list.type) for attr in op_def.attr}
    for arg in op_def.input_arg:
        if arg.type_attr and (not allowed[arg.type_attr] or wanted <= allowed[arg.type_attr]):
            return arg.type_attr
    return None


def check_names(argument: str, ops: Any, dtype: tf.DType | None) -> frozenset[str]:
    """Checks names of operations that the user passed.

    Args:
        argument: str. What it is called.
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
    for op in sorted(names, key=str):
        if not isinstance(op, str) or _op_defs.get(op) is None:
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
                f"The operation {op!r} adds up in the dtype of what it is given, and some of "
                f"TensorFlow's kernels stop short of a sum in 16 bits. Expected other operations. "
                f"Received: {argument}={sorted(names)}"
            )
        if dtype_attr(op, dtype) is None:
            raise ValueError(
                f"The operation {op!r} does not take tensors of {dtype.name}. Expected one that "
                f"takes float32 and {dtype.name}. Received: {argument}={sorted(names)}"
            )
    return names


def _has_kernels(op: str, dtype: tf.DType, device: str) -> bool:
    ops = (op, *op_table.GRADIENTS.get(op, ()))
    return all(_has_kernel(each, dtype, device) for each in ops)


@functools.cache
def _has_kernel(op: str, dtype: tf.DType, device: str) -> bool:
    if _op_defs.get(op) is None:
        return False
    attr = dtype_attr(op, dtype)
    enum = dtype.as_datatype_enum
    allowed = registered_kernels.allowed_types(op, device, "DEFAULT")
    return any(enum in of_kernel.get(attr, (enum,)) for of_kernel in allowed)
