"""Is a step on a GPU bound by what the host sends: many small operations for little arithmetic?

TensorFlow sends the operations of a graph to a GPU one by one. Their number is read from the graph,
and so is what the GPU has to compute and to move. How long either takes is an estimate, from steps
on one H200 (docs/speed.md); it tells orders of magnitude apart. Code that XLA compiles is sent by
XLA, which takes a tenth of the time.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeGuard

import tensorflow as tf

from keras_mp.hardware import devices
from keras_mp.numerics.graphs import tensor_cores
from keras_mp.numerics.graphs.walk import Node
from keras_mp.numerics.graphs.work import Shape
from keras_mp.support import op_table

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
}
_OLDEST = (8e12, 0.3e12)
# Products that tensor cores do not take.
_WITHOUT_TENSOR_CORES = 1 / 4
# An estimate that says less is not told.
_LEAST_OPERATIONS = 100
# They start nothing on a GPU.
_NOT_SENT = op_table.ops(
    *("arguments", "constants", "results", "variables", "reads of variables", "shapes", "calls"),
    *("conditions", "loops", "entries of frames", "exits of frames", "frames", "no numbers"),
    *("identities", "identities of lists", "identities without a gradient", "reshapes"),
)


class Sending(NamedTuple):
    """What the host sends to a GPU for one call of a function. The seconds are estimates.

    Attributes:
        operations: int. How many operations are sent one by one. Those that XLA compiles are not
            among them.
        host_seconds: float. How long the host takes for them.
        gpu_seconds: float. How long a GPU takes to compute them, with what XLA compiles.
        helps: tuple of str. The code with which XLA compiles it, that which takes in most first.

    Example:

    >>> from keras_mp.numerics.graphs.sending import Sending
    >>> Sending(5000, 0.05, 0.03, ()).is_bound
    True
    """

    operations: int
    host_seconds: float
    gpu_seconds: float
    helps: tuple[str, ...]

    @property
    def is_bound(self) -> bool:
        """Whether the GPU waits for the host."""
        return self.operations >= _LEAST_OPERATIONS and self.host_seconds > self.gpu_seconds


def of(nodes: Sequence[Node], device: str | None, model: tf.keras.Model | None) -> Sending | None:
    """Returns what a host sends for a graph; None if no GPU computes.

    Args:
        nodes: of the graph, as it runs.
        device: str. A GPU, such as "GPU 7.0"; None for those of this machine.
        model: the model whose step it is, or None.
    """
    found = [gpu.capability or (0, 0) for gpu in devices.gpus()] if device is None else []
    capability = min(found, default=None) if device is None else tensor_cores.capability(device)
    if capability is None:
        return None
    products, moved = next((of for at, of in _GPUS.items() if capability >= at), _OLDEST)
    sent, seconds = 0, 0.0
    for node in nodes:
        if not node.dtypes or node.proto.op in _NOT_SENT:
            continue
        sent += 0 if node.is_compiled else node.turns
        dtype = next(iter(node.dtypes.values()))
        speed = products * (1 if tensor_cores.take(dtype, device) else _WITHOUT_TENSOR_CORES)
        computing = 0.0 if node.work is None else node.work.count / speed
        numbers = sum(math.prod(shape) for shape in (*node.inputs, *node.outputs) if _known(shape))
        seconds += node.turns * max(computing, numbers * tf.as_dtype(dtype).size / moved)
    helps = tuple(_what_helps(nodes, model))
    return Sending(sent, sent * _SECONDS_OF_AN_OPERATION, seconds, helps)


def sentences(found: Sending) -> Iterator[str]:
    """Says that the host is what a step waits for, and what would help.

    Args:
        found: `Sending`.
    """
    if not found.is_bound:
        return
    yield (
        f"It is bound by what the host sends: {found.operations:,} operations one by one, about "
        f"{_milliseconds(found.host_seconds)} on a slow host, for about "
        f"{_milliseconds(found.gpu_seconds)} of the GPU (estimates)."
    )
    if found.helps:
        yield f"XLA sends what it compiles in a few calls: {', or '.join(found.helps)}."


def _what_helps(nodes: Sequence[Node], model: tf.keras.Model | None) -> Iterator[str]:
    """Yields the code with which XLA compiles all of it, or the update of the weights."""
    # XLA has no kernel for the recurrent layers of cuDNN.
    if not any(node.proto.op.startswith("Cudnn") for node in nodes):
        if model is not None:
            yield "model.compile(..., jit_compile=True)"
        yield "tf.function(step, jit_compile=True)"


def _known(shape: Shape) -> TypeGuard[tuple[int, ...]]:
    return shape is not None and None not in shape


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2g} ms"
