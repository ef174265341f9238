"""The kernels that TensorFlow has registered for an operation."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from keras_mp.tensorflow_api import operations


def has_kernel(op: str, types: Mapping[str, int], device: str) -> bool:
    """Whether some kernel of an operation computes in the given dtypes.

    Args:
        op: str. The operation's type.
        types: the numbers of the dtypes, by the attributes of the operation.
        device: str. The type of the device, "CPU" or "GPU".
    """
    return any(
        all(dtype in allowed.get(name, (dtype,)) for name, dtype in types.items())
        for allowed in _allowed_types(op, device)
    )


@functools.cache
def _allowed_types(op: str, device: str) -> tuple[dict[str, frozenset[int]], ...]:
    """Returns the dtypes that each kernel allows, by the attributes that it limits."""
    kernels, by_op = _kernels()
    return tuple(
        {each.name: frozenset(each.allowed_values.list.type) for each in kernel.constraint}
        for kernel in (kernels[i] for i in by_op.get(op, ()))
        if kernel.device_type in (device, "DEFAULT")
    )


@functools.cache
def _kernels() -> tuple[Sequence[Any], dict[str, list[int]]]:
    """Returns what TensorFlow says about all kernels, and which each operation has.

    If TensorFlow were asked for one operation, it would look through all kernels as well. If a
    Python object of each kernel were kept, the garbage collector would look through the process.
    """
    kernels = operations.all_kernels().kernel
    by_op: dict[str, list[int]] = {}
    for i, kernel in enumerate(kernels):
        by_op.setdefault(kernel.op, []).append(i)
    return kernels, by_op
