"""The products that the tensor cores of a GPU take, and the sizes that they are fastest with."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_mp import hardware
from keras_mp.grappler import optimize
from keras_mp.hardware import devices
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

if TYPE_CHECKING:
    from keras_mp.numerics.graphs.census import Graph

# Other sizes are filled up to a multiple. (Nvidia, "Matrix Multiplication Background",
# "Requirements to Use Tensor Cores": 16 bytes; with the A100, 128 are best.)
_MULTIPLE = 8
# The first GPUs whose tensor cores take float32, of which they drop digits.
_TENSOR_FLOAT_32 = 8, 0
_has_tensor_float_32 = tf.config.experimental.tensor_float_32_execution_enabled


def take(dtype: str, device: str | None) -> bool:
    """Whether tensor cores multiply a dtype.

    Args:
        dtype: str.
        device: str. A GPU, such as "GPU 7.0"; None for those of this machine.
    """
    if dtype not in LOW_PRECISION_NAMES:
        return False
    if device is None:
        return hardware.has_tensor_cores(dtype)
    return capability(device) >= devices.COMPUTE_CAPABILITY[dtype]


def capability(device: str) -> tuple[int, int]:
    """Returns the compute capability of a GPU, such as "GPU 7.0", as two numbers."""
    major, minor = optimize.compute_capability(device).split(".")
    return int(major), int(minor)


def are_odd(sizes: Iterable[int | None]) -> bool:
    """Whether one of the sizes of a product is not a multiple of 8.

    Args:
        sizes: rows, columns and what is summed over; None for what is not known.
    """
    return any(size is not None and size % _MULTIPLE for size in sizes)


def sentences(graph: "Graph", device: str) -> Iterator[str]:
    """Says how much of a graph's products tensor cores take.

    Args:
        graph: `census.Graph`.
        device: str. A GPU, such as "GPU 7.0".
    """
    products = [each for each in graph.operations if each.work]
    total = sum(each.work for each in products)
    if not total:
        return
    taken = [each for each in products if take(each.dtype, device)]
    share = sum(each.work for each in taken) / total
    yield f"The tensor cores of a {device} take {share:.0%} of the multiplications."
    in_float32 = sum(each.work for each in products if each.dtype == "float32") / total
    if in_float32 and capability(device) >= _TENSOR_FLOAT_32 and _has_tensor_float_32():
        yield (
            f"They also take the {in_float32:.0%} in float32, as TensorFloat-32, with as many "
            "digits as float16 (tf.config.experimental.enable_tensor_float_32_execution(False) "
            "ends that)."
        )
    odd = [each for each in taken if are_odd(each.sizes)]
    if odd:
        share = sum(each.work for each in odd) / total
        where = dict.fromkeys(each.layer or each.name for each in odd)
        yield (
            f"{share:.0%} of the multiplications have sizes that are no multiples of {_MULTIPLE}: "
            f"{', '.join(list(where)[:3])}."
        )
