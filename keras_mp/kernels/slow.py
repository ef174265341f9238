"""Operations that are computed in float32 on CPUs without units for their dtype.

There TensorFlow's kernels convert each number, or compute one by one: a product takes 2.5 times as
long as in float32, a convolution up to ten times. Computed in float32 inside, and rounded once,
they are as fast as float32 but for the casts, and no less exact. The flags of the CPU decide
(`support/cpu.py`), and never a clock.

Two kernels are slow on all CPUs. The gradient of a filter takes 5 to 240 times as long in float16
as in float32. Where the channels of images are no whole vectors, oneDNN normalizes bfloat16 number
by number: a batch of 16384 by 100 takes 33 times as long.

This module needs TensorFlow only.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from keras_mp.hooks import reach
from keras_mp.kernels.trials import device_type, shape_of, usual_device
from keras_mp.support import cpu, host
from keras_mp.support.dtypes import LOW_PRECISION, LOW_PRECISION_NAMES

_GRADIENTS_OF_CONVOLUTIONS = (
    *("Conv2DBackpropFilter", "Conv2DBackpropInput"),
    *("Conv3DBackpropFilterV2", "Conv3DBackpropInputV2"),
    *("DepthwiseConv2dNativeBackpropFilter", "DepthwiseConv2dNativeBackpropInput"),
)
OPS = (
    *("MatMul", "BatchMatMulV2", "Einsum"),
    *("Conv2D", "Conv3D", "DepthwiseConv2dNative"),
    *_GRADIENTS_OF_CONVOLUTIONS,
    *("MaxPool", "MaxPoolGrad", "MaxPool3D", "MaxPool3DGrad"),
    *("AvgPool", "AvgPoolGrad", "AvgPool3D", "AvgPool3DGrad"),
    "FusedBatchNormV3",
)
# The float32 numbers of a vector of AVX512, in which oneDNN normalizes.
_VECTOR = 16


class _Switch:
    """Whether it is on."""

    is_on = True


_switch = _Switch()


def is_slow(op: str, dtype: tf.DType | str, arguments: Mapping[str, Any] | None = None) -> bool:
    """Whether a CPU like this one computes an operation faster in float32.

    Args:
        op: str, one of `OPS`.
        dtype: DType of 16 bits, or its name.
        arguments: those of the operation by name, or None for most.
    """
    name = tf.as_dtype(dtype).name
    if not cpu.has_units(name):
        return True
    if op == "FusedBatchNormV3":
        return name == "bfloat16" and _has_part_of_a_vector(**arguments or {})
    return name == "float16" and op in _GRADIENTS_OF_CONVOLUTIONS


def may_be_slow(op: str, dtype: tf.DType) -> bool:
    """Whether an operation is slow on a CPU like this one for some arguments.

    Args:
        op: str. Any operation.
        dtype: DType of 16 bits.
    """
    return op in OPS and (op == "FusedBatchNormV3" or is_slow(op, dtype))


def _has_part_of_a_vector(x: Any = None, data_format: Any = "NHWC", **others: object) -> bool:
    """Whether the channels of images are no whole vectors."""
    del others
    shape = tf.TensorShape(()) if x is None else shape_of(x)
    is_last = tf.compat.as_str(data_format).endswith("C")  # bytes where the door asks
    channels = shape[-1] if shape.rank and is_last else None
    return bool(channels and channels % _VECTOR)


def is_slow_here(op: str, dtype: tf.DType, arguments: Mapping[str, Any]) -> bool:
    """Whether an operation that is made now is to be computed in float32.

    Args:
        op: str, one of `OPS`.
        dtype: the 16-bit DType of its inputs.
        arguments: its arguments by name.
    """
    return _switch.is_on and device_type() == "CPU" and is_slow(op, dtype, arguments)


def slow_operations(dtype: str) -> list[str]:
    """Returns the operations that are computed in float32 inside in this process.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    if not _switch.is_on or usual_device() != "CPU":
        return []
    return [op for op in OPS if is_slow(op, dtype)]


def fact_for_workers() -> str:
    """Returns, as a text, the operations that are computed in float32 for speed."""
    facts = [f"{op} ({dtype})" for dtype in LOW_PRECISION_NAMES for op in slow_operations(dtype)]
    return ", ".join(facts) or "none"


def enable_float32_where_faster(enabled: bool = True) -> None:
    """Switches float32 inside of operations with slow 16-bit kernels on or off.

    It is on, in the whole process, for what keras_mp computes in 16 bits on a CPU: layers with a
    policy of keras_mp, regions and scopes. On a CPU without units for a dtype, these are products,
    convolutions, recurrent cells and pooling; on all others, gradients of convolutions in float16.
    A `tf.function` keeps what it was traced with. Results are no less exact: the float32 one is
    rounded once.

    Args:
        enabled: bool. False runs TensorFlow's own kernels, however slow they are.

    Example:

    >>> keras_mp.enable_float32_where_faster(False)
    >>> keras_mp.enable_float32_where_faster()
    """
    _switch.is_on = enabled


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Context manager in which operations are made as on a GPU.

    It is for tools that ask what a policy computes, and not what this CPU does instead.
    """
    before, _switch.is_on = _switch.is_on, False
    try:
        yield
    finally:
        _switch.is_on = before


def may_replace_layer(dtype: tf.DType) -> bool:
    """Whether a layer of Keras may run code of keras_mp in place of its own.

    Args:
        dtype: DType in which the layer computes.

    Returns:
        bool. It may in reach, in 16 bits on CPUs, where neither XLA compiles nor a session runs it,
        and only if that is switched on.
    """
    if reach.current() is None or not (_switch.is_on and dtype in LOW_PRECISION):
        return False
    return not host.is_compiled_by_xla() and not host.in_v1_graph() and device_type() == "CPU"
