"""What a GPU takes of a step: products on tensor cores, and operations that the host sends it.

TensorFlow sends the operations of a graph to a GPU one by one. Their number is read from the graph,
and so is what the GPU has to compute and to move. How long either takes is an estimate, from steps
on one H200 (docs/speed.md); it tells orders of magnitude apart. Code that XLA compiles is sent by
XLA, which takes a tenth of the time.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_mp.grappler import optimize
from keras_mp.hardware import devices
from keras_mp.numerics.graph import Node, multiplied_sizes
from keras_mp.support import op_table

# Other sizes are filled up to a multiple. (Nvidia, "Matrix Multiplication Background",
# "Requirements to Use Tensor Cores": 16 bytes; with the A100, 128 are best.)
_MULTIPLE = 8

# The models that were run took 15 to 33 microseconds an operation, where the host is slow.
_SECONDS_OF_AN_OPERATION = 15e-6

# By the least compute capability: floating-point operations of products in 16 bits, and bytes, in a
# second: half of what is written on an H100, A10, A100, T4 and V100, and most of its bandwidth.
_GPUS = {
    (9, 0): (500e12, 3.5e12),
    (8, 6): (60e12, 0.5e12),
    (8, 0): (150e12, 1.5e12),
    (7, 5): (30e12, 0.25e12),
    (7, 0): (60e12, 0.8e12),
    (0, 0): (8e12, 0.3e12),
}

# Products that tensor cores do not take.
_WITHOUT_TENSOR_CORES = 1 / 4

# An estimate that says less is not told.
_LEAST_OPERATIONS = 100

# They start nothing on a GPU.
_NOT_SENT = op_table.ops(
    *("arguments", "constants", "results", "variables", "reads of variables", "shapes", "calls"),
    *("conditions", "loops", "no numbers", "identities", "identities of lists"),
    *("identities without a gradient", "reshapes"),
)


class Sending(NamedTuple):
    """What the host sends to a GPU for one call of a function. The seconds are estimates.

    Attributes:
        operations: int. How many operations are sent one by one. Those that XLA compiles are not
            among them.
        host_seconds: float. How long the host takes for them.
        gpu_seconds: float. How long a GPU takes to compute them, with what XLA compiles.
        helps: tuple of str. The code with which XLA compiles it, that which takes in most first.
        is_bound: bool. Whether the GPU waits for the host.

    Example:

    >>> from keras_mp.numerics.gpu import Sending
    >>> Sending(5000, 0.05, 0.03, (), is_bound=True).operations
    5000
    """

    operations: int
    host_seconds: float
    gpu_seconds: float
    helps: tuple[str, ...]
    is_bound: bool

    def sentences(self) -> Iterator[str]:
        """Says that the host is what a step waits for, and what would help."""
        if not self.is_bound:
            return
        host, gpu = (f"{1000 * each:.2g} ms" for each in (self.host_seconds, self.gpu_seconds))
        yield (
            f"It is bound by what the host sends: {self.operations:,} operations one by one, about "
            f"{host} on a slow host, for about {gpu} of the GPU (estimates)."
        )
        if self.helps:
            yield f"XLA sends what it compiles in a few calls: {', or '.join(self.helps)}."


def capability_of(device: str | None) -> tuple[int, int] | None:
    """Returns the compute capability of a GPU as two numbers.

    Args:
        device: str. A GPU, such as "GPU 7.0"; None for the slowest of this machine.

    Returns:
        None if there is none.
    """
    if device is None:
        return min((each.capability or (0, 0) for each in devices.gpus()), default=None)
    major, minor = optimize.compute_capability(device).split(".")
    return int(major), int(minor)


def _is_taken(node: Node, capability: tuple[int, int]) -> bool:
    """Whether tensor cores multiply the dtype of an operation."""
    return capability >= devices.COMPUTE_CAPABILITY.get(node.dtype, (math.inf, 0))


def on_tensor_cores(
    nodes: Sequence[Node], capability: tuple[int, int], whose: str
) -> Iterator[str]:
    """Says how much of a graph's products tensor cores take.

    Args:
        nodes: of the graph.
        capability: two ints, that of the GPU.
        whose: words for the GPU.
    """

    def work_of(some: Sequence[Node]) -> int:
        return sum((each.work or 0) * each.turns for each in some)

    total = work_of(nodes)
    if not total:
        return
    taken = [each for each in nodes if _is_taken(each, capability)]
    in_float32 = [each for each in nodes if each.dtype == "float32"]
    odd = [each for each in taken if any(size % _MULTIPLE for size in multiplied_sizes(each.made))]
    of_taken, of_float32, of_odd = (
        f"{work_of(some) / total:.0%}" for some in (taken, in_float32, odd)
    )
    yield f"The tensor cores of {whose} take {of_taken} of the multiplications."
    has_tensor_float_32 = tf.config.experimental.tensor_float_32_execution_enabled()
    if any(each.work for each in in_float32) and capability >= (8, 0) and has_tensor_float_32:
        yield (
            f"They also take the {of_float32} in float32, as TensorFloat-32, with as many digits "
            "as float16 (tf.config.experimental.enable_tensor_float_32_execution(False) ends that)."
        )
    if odd:
        found = dict.fromkeys(" x ".join(map(str, multiplied_sizes(each.made))) for each in odd)
        yield (
            f"{of_odd} of the multiplications have sizes that are no multiples of {_MULTIPLE}: "
            f"{', '.join(list(found)[:3])}. Round units, filters, or the size of the batch up."
        )


def sending(nodes: Sequence[Node], capability: tuple[int, int], is_model: bool) -> Sending:
    """Returns what a host sends for a graph.

    Args:
        nodes: of the graph.
        capability: two ints, that of the GPU.
        is_model: whether it is the step of a model.
    """
    products, moved = next(of for at, of in _GPUS.items() if capability >= at)
    sent, seconds = 0, 0.0
    for node in nodes:
        if not node.dtype or node.made.type in _NOT_SENT:
            continue
        sent += 0 if node.is_compiled else node.turns
        speed = products * (1 if _is_taken(node, capability) else _WITHOUT_TENSOR_CORES)
        tensors = (*node.made.inputs, *node.made.outputs)
        numbers = sum(tensor.shape.num_elements() or 0 for tensor in tensors)
        moving = numbers * tf.as_dtype(node.dtype).size / moved
        seconds += node.turns * max((node.work or 0) / speed, moving)
    helps = ["model.compile(..., jit_compile=True)"] * is_model
    helps.append("tf.function(step, jit_compile=True)")
    # XLA has no kernel for the recurrent layers of cuDNN.
    if any(node.made.type.startswith("Cudnn") for node in nodes):
        helps = []
    host_seconds = sent * _SECONDS_OF_AN_OPERATION
    is_bound = sent >= _LEAST_OPERATIONS and host_seconds > seconds
    return Sending(sent, host_seconds, seconds, tuple(helps), is_bound)
