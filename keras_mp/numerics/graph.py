"""The operations of a traced function, and their work.

Work is the floating-point operations of matrix products and convolutions. A multiplication and the
addition of its result count as two, as in TensorFlow's profiler. Other operations (activations,
sums, casts) are not counted: their time depends on the bytes that they move, not on what they
compute. This module needs TensorFlow only.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import tensorflow as tf

from keras_mp.grappler import report as rewrites
from keras_mp.support import op_table
from keras_mp.tensorflow_api import graphs

_Known = Sequence[tuple[int, ...]]

_LOOPS = op_table.ops("loops")
CALLS = op_table.ops("calls")
# The attributes that name the functions which an operation runs, or of which it runs one.
_FUNCTIONS = {
    **dict.fromkeys(_LOOPS, ("body",)),
    **dict.fromkeys(CALLS, ("f",)),
    **dict.fromkeys(op_table.ops("conditions"), ("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
}


class Node(NamedTuple):
    """An operation of a graph, or of a function that it calls.

    Attributes:
        made: `tf.Operation`.
        path: str. The names of what calls it, and its own.
        dtype: str. That in which it computes; "" if it has no floating-point one.
        work: int. The work of one run; None if a shape of a product is not known.
        turns: int. How often it runs in one call.
        is_least: bool. Whether it is in a loop of unknown length. It is counted once then.
        is_compiled: bool. Whether it is in a function that XLA compiles.
    """

    made: tf.Operation
    path: str
    dtype: str
    work: int | None
    turns: int
    is_least: bool
    is_compiled: bool


def nodes_of(graph: Any, around: Sequence[Any] = (), caller: Node | None = None) -> Iterator[Node]:
    """Yields the operations of a function's graph, and those of what they call.

    What nothing needs is left out. Of a branch, it is the one with the most work that counts, and
    then the one with more operations. A loop over the rows of a tensor counts for each of them, as
    that of a recurrent layer; another one counts once.

    Args:
        graph: that of a `ConcreteFunction`.
        around: the graphs that call it, the innermost first.
        caller: the node that calls it, with the turns of what it calls.
    """
    needed, known_by = set(), (graph, *around)
    context = (1, False, False) if caller is None else caller[4:]
    # The graph of a function with a gradient may have more outputs.
    outputs = graph.outputs if caller is None else graph.outputs[: len(caller.made.outputs)]
    waiting = [*(tensor.op for tensor in outputs), *graph.control_outputs]
    while waiting:
        made = waiting.pop()
        if made not in needed:
            needed.add(made)
            waiting += [*(tensor.op for tensor in made.inputs), *made.control_inputs]
    for made in graph.get_operations():
        if made not in needed:
            continue
        dtypes = rewrites.floating_dtypes(made.node_def)
        dtype = next((each[0].name for each in (dtypes.get("T"), *dtypes.values()) if each), "")
        path = made.name if caller is None else f"{caller.path}/{made.name}"
        node = Node(made, path, dtype, of(made), *context)
        yield node
        named = [cast(Any, made.get_attr(each)) for each in _FUNCTIONS.get(made.type, ())]
        bodies = []
        for function in tf.nest.flatten(named):
            found = (graphs.function_of_name(each, function.name) for each in known_by)
            body = next(each for each in found if each is not None).graph
            rows = _rows(made) if made.type in _LOOPS else 1
            inside = node._replace(
                turns=node.turns * (rows or 1),
                is_least=node.is_least or not rows,
                is_compiled=node.is_compiled or made.node_def.attr["_XlaMustCompile"].b,
            )
            bodies.append([*nodes_of(body, known_by, inside)])
        yield from max(bodies, key=_amount, default=())


def _rows(loop: tf.Operation) -> int:
    """Returns how many rows a loop goes over; 0 if that is not known."""
    lists = [each.op for each in loop.inputs if each.dtype == tf.variant]
    if any(each.type == "Placeholder" for each in lists):
        return 0
    # A backward pass takes what the loop of the forward pass has kept.
    if forward := [each for each in lists if each.type in _LOOPS]:
        return _rows(forward[0])
    shapes = [each.inputs[0].shape for each in lists if each.type == "TensorListFromTensor"]
    return max((each[0] or 0 for each in shapes if each.rank), default=0)


def _amount(nodes: Sequence[Node]) -> tuple[int, int]:
    return sum((node.work or 0) * node.turns for node in nodes), len(nodes)


def of(made: tf.Operation) -> int | None:
    """Counts the floating-point operations of one operation.

    Returns:
        int: 0 if it is neither a product nor a convolution; None if a shape is not known.
    """
    if made.type not in COUNTED:
        return 0
    try:
        return 2 * _multiplications(made, *_shapes(made))
    except (TypeError, IndexError):
        return None


def multiplied_sizes(made: tf.Operation) -> tuple[int, ...]:
    """Returns the sizes that a tensor core divides into tiles: rows, columns, what is summed over.

    Returns:
        tuple of int; empty for unknown shapes, and for what is no plain product or convolution.
    """
    inputs, outputs = _shapes(made)
    try:
        if made.type == "MatMul":
            return (*outputs[0], math.prod(inputs[0]) // max(outputs[0][0], 1))
        return inputs[1][-2:] if made.type == "Conv2D" else ()
    except (TypeError, IndexError):
        return ()


def _shapes(made: tf.Operation) -> list[Any]:
    """Returns the shapes of its inputs and of its outputs, each a tuple, or None if not known."""
    return [
        [tuple(each.shape) if each.shape.is_fully_defined() else None for each in tensors]
        for tensors in (made.inputs, made.outputs)
    ]


def _multiplications(made: tf.Operation, inputs: _Known, outputs: _Known) -> int:
    if made.type == "Einsum":
        return _einsum(cast(Any, made.get_attr("equation")).decode(), inputs)
    if made.type in _PRODUCTS:
        # A batch may be that of the second input alone.
        return math.prod((*outputs[0][:-2], *inputs[0][-2:], outputs[0][-1]))
    shapes = (*inputs, outputs[0])
    image, kernel = (shapes[place] for place in _CONVOLUTIONS[made.type])
    # A depthwise convolution has one kernel for each channel.
    return math.prod(image) * math.prod(kernel[: -2 if made.type.startswith("Depthwise") else -1])


def _einsum(equation: str, inputs: _Known) -> int:
    terms = equation.partition("->")[0].split(",")
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


_PRODUCTS = op_table.ops("matrix products", "matrix products into another dtype")
# Of what goes along with, or against, a convolution: which of its tensors, the output being the
# last, has the size of what the convolution makes, and which that of the kernel.
_CONVOLUTIONS = {
    op: places
    for kind, places in {
        "convolutions": (-1, 1),
        "transposed convolutions": (2, 1),
        "transposed convolutions to the shape of a tensor": (2, 1),
        "gradients of kernels": (2, -1),
    }.items()
    for op in op_table.BY_KIND[kind]
}
COUNTED = _PRODUCTS | _CONVOLUTIONS.keys()
