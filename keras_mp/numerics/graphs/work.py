"""Counts the floating-point operations of matrix products and convolutions.

A multiplication and the addition of its result count as two, as in TensorFlow's profiler. Other
operations (activations, sums, casts) are not counted: their time depends on the bytes that they
move, not on what they compute. This module needs TensorFlow only.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import tensorflow as tf

from keras_mp.hardware.stopwatch import CONVOLUTION, MATRIX_PRODUCT
from keras_mp.support import op_table

NodeDef: TypeAlias = tf.compat.v1.NodeDef
# The sizes of a tensor, each None where it is not known; or None where its rank is not.
Shape = tuple[int | None, ...] | None
_Known = Sequence[tuple[int, ...]]


class Work(NamedTuple):
    """The work of an operation.

    Attributes:
        kind: "matrix product" or "convolution", as in `keras_mp.hardware.speeds`.
        count: int. Number of floating-point operations.
    """

    kind: str
    count: int


def of(node: NodeDef, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Work | None:
    """Counts the floating-point operations of one operation.

    Args:
        node: `NodeDef`.
        inputs: the shapes of its inputs.
        outputs: the shapes of its outputs.

    Returns:
        `Work`; None if it is neither a product nor a convolution, or if a shape is not known.
    """
    try:
        kind, count = COUNTED[_plain(node.op)]
        return Work(kind, 2 * count(node, cast(_Known, inputs), cast(_Known, outputs)))
    except (KeyError, TypeError, IndexError):  # It is no product, or a shape is not known.
        return None


def is_counted(op: str) -> bool:
    """Whether it is the type of a product or of a convolution."""
    return _plain(op) in COUNTED


def _plain(op: str) -> str:
    # Grappler fuses a product with what follows, and keeps its inputs.
    return op.removeprefix("_Fused")


def multiplied_sizes(
    node: NodeDef, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> tuple[int | None, ...]:
    """Returns the sizes that a tensor core divides into tiles: rows, columns, what is summed over.

    Args:
        node: `NodeDef`.
        inputs: the shapes of its inputs.
        outputs: the shapes of its outputs.

    Returns:
        tuple of int or None; empty for what is no plain product or convolution.
    """
    try:
        if _plain(node.op) == "MatMul":
            return (*cast(_Known, outputs)[0], _summed_over(node, cast(_Known, inputs)))
        if _plain(node.op) == "Conv2D":
            return cast(_Known, inputs)[1][-2:]
    except (TypeError, IndexError):
        return ()
    return ()


def _summed_over(node: NodeDef, inputs: _Known) -> int:
    return inputs[0][-2 if node.attr["transpose_a"].b else -1]


def _matrix_product(node: NodeDef, inputs: _Known, outputs: _Known) -> int:
    return math.prod(outputs[0]) * _summed_over(node, inputs)


def _batch_of_products(node: NodeDef, inputs: _Known, outputs: _Known) -> int:
    return math.prod(outputs[0]) * inputs[0][-2 if node.attr["adj_x"].b else -1]


def _einsum(node: NodeDef, inputs: _Known, outputs: _Known) -> int:
    terms = node.attr["equation"].s.decode().partition("->")[0].split(",")
    if len(terms) < 2:
        return 0
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, inputs, strict=True):
        before, dots, after = term.partition("...")
        of_labels = [*shape[: len(before)], *(shape[-len(after) :] if after else ())]
        sizes.update(zip(before + after, of_labels))
        if dots:
            hidden = shape[len(before) : len(shape) - len(after)]
            sizes["..."] = max(sizes.get("...", 1), math.prod(hidden))
    return math.prod(sizes.values())


def _convolution(image: int, kernel: int, depthwise: bool = False) -> Callable[..., int]:
    """Returns a count for operations that go along with, or against, a convolution.

    Args:
        image: which tensor has the size of what the convolution makes: that of an input, or -1 for
            the output.
        kernel: which has that of the kernel.
        depthwise: bool. Whether there is one kernel for each channel.
    """

    def count(node: NodeDef, inputs: _Known, outputs: _Known) -> int:
        made = outputs[0] if image == -1 else inputs[image]
        window = outputs[0] if kernel == -1 else inputs[kernel]
        return math.prod(made) * math.prod(window[:-2] if depthwise else window[:-1])

    return count


# By operation: its kind, and a function that counts half of its floating-point operations.
COUNTED = {
    **dict.fromkeys(
        op_table.ops("matrix products", "matrix products into another dtype"),
        (MATRIX_PRODUCT, _batch_of_products),
    ),
    "MatMul": (MATRIX_PRODUCT, _matrix_product),
    "Einsum": (MATRIX_PRODUCT, _einsum),
    **{
        op: (CONVOLUTION, _convolution(image, kernel, op.startswith("Depthwise")))
        for kind, image, kernel in (
            ("convolutions", -1, 1),
            ("transposed convolutions", 2, 1),
            ("transposed convolutions to the shape of a tensor", 2, 1),
            ("gradients of kernels", 2, -1),
        )
        for op in op_table.BY_KIND[kind]
    },
}
