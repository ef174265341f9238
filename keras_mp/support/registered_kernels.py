"""Which kernels TensorFlow has registered for an operation."""

import functools

from tensorflow.python.framework import kernels as _kernels


@functools.cache
def allowed_types(op: str, *devices: str) -> tuple[dict[str, frozenset[int]], ...]:
    """Returns what the kernels of an operation allow, one for each kernel.

    Args:
        op: str. The operation's type.
        *devices: str. Types of devices, such as "CPU"; "DEFAULT" is any.

    Returns:
        tuple of dicts: for each attribute that a kernel limits, the numbers of its dtypes.
    """
    return tuple(
        {each.name: frozenset(each.allowed_values.list.type) for each in kernel.constraint}
        for kernel in _kernels.get_registered_kernels_for_op(op).kernel
        if kernel.device_type in devices
    )
