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

_LOOPS, CALLS = op_table.ops("loops"), op_table.ops("calls")
_CALLING = _LOOPS | CALLS | op_table.ops("conditions")
_PRODUCTS = op_table.ops("matrix products", "matrix products into another dtype")
COUNTED = _PRODUCTS | op_table.ops(
    *("convolutions", "transposed convolutions", "gradients of kernels"),
    "transposed convolutions to the shape of a tensor",
)
# Stand for the axes of an ellipsis, the last one first.
_AXES = "9876543210"


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


# What nobody calls is in this one.
_PROGRAM = Node(cast(Any, None), "", "", 0, 1, is_least=False, is_compiled=False)


def nodes_of(graph: Any, around: Sequence[Any] = (), caller: Node = _PROGRAM) -> Iterator[Node]:
    """Yields the operations of a function's graph, and those of what they call.

    What nothing needs is left out. Of a branch, it is the one with the most work that counts, and
    then the one with more operations. A loop over the rows of a tensor counts for each of them, as
    that of a recurrent layer; another one counts once.

    Args:
        graph: that of a `ConcreteFunction`.
        around: the graphs that call it, the innermost first.
        caller: the node that calls it, with the turns of what it calls.
    """
    # The graph of a function with a gradient may have more outputs.
    outputs = graph.outputs[: caller.made and len(caller.made.outputs)]
    needed, known_by = set(), (graph, *around)
    waiting = [*(tensor.op for tensor in outputs), *graph.control_outputs]
    while waiting:
        if (made := waiting.pop()) not in needed:
            needed.add(made)
            waiting += [*(tensor.op for tensor in made.inputs), *made.control_inputs]
    for made in [each for each in graph.get_operations() if each in needed]:
        defined = made.node_def
        dtypes = rewrites.floating_dtypes(defined)
        dtype = next((each[0].name for each in (dtypes.get("T"), *dtypes.values()) if each), "")
        path = f"{caller.path}/{made.name}".lstrip("/")
        node = caller._replace(made=made, path=path, dtype=dtype, work=of(made))
        yield node
        if made.type not in _CALLING:
            continue
        rows = _rows(made) if made.type in _LOOPS else 1
        inside = node._replace(
            turns=node.turns * (rows or 1),
            is_least=node.is_least or not rows,
            is_compiled=node.is_compiled or defined.attr["_XlaMustCompile"].b,
        )
        bodies = []
        for name in _functions(defined):
            found = (graphs.function_of_name(each, name) for each in known_by)
            body = next(each for each in found if each is not None).graph
            bodies.append([*nodes_of(body, known_by, inside)])
        yield from max(bodies, key=_amount)


def _functions(calling: Any) -> list[str]:
    """Returns the names of the functions that an operation runs, or of which it runs one."""
    values = (value for name, value in calling.attr.items() if name != "cond")
    return [each.name for of in values for each in (of.func, *of.list.func) if each.name]


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


def _shapes(made: tf.Operation) -> list[Any]:
    """Returns the shapes of its inputs and outputs, each a tuple, or None if not known."""
    shapes = (each.shape for each in (*made.inputs, *made.outputs))
    return [tuple(each) if each.is_fully_defined() else None for each in shapes]


def multiplied_sizes(made: tf.Operation) -> tuple[int, ...]:
    """Returns the sizes that a tensor core divides into tiles: rows, columns, what is summed over.

    Returns:
        tuple of int; empty for unknown shapes, and for what is no plain product or convolution.
    """
    if made.type in ("MatMul", "Conv2D") and None not in (shapes := _shapes(made)):
        left, right, output = shapes
        if made.type == "Conv2D":
            return right[-2:]
        return (*output, math.prod(left) // max(output[0], 1))
    return ()


def of(made: tf.Operation) -> int | None:
    """Counts the floating-point operations of one operation, as `work` does."""
    equation = made.node_def.attr["equation"].s if made.type == "Einsum" else b""
    return work(made.type, _shapes(made), equation.decode())


def work(kind: str, shapes: Sequence[Any], equation: str = "") -> int | None:
    """Counts the floating-point operations of one operation.

    Args:
        kind: str. Its type.
        shapes: of its inputs and of what it returns, which comes last; None for an unknown one.
        equation: str. That of an Einsum.

    Returns:
        int: 0 if it is neither a product nor a convolution; None if a shape is not known.
    """
    if kind not in COUNTED:
        return 0
    *inputs, output = shapes
    try:
        if kind == "Einsum":
            return 2 * _einsum(equation, inputs)
        if kind in _PRODUCTS:
            # A batch may be that of the second input alone.
            return 2 * math.prod((*output[:-2], *inputs[0][-2:], output[-1]))
        # What a convolution makes is an input of what goes against it.
        image = output if len(inputs) == 2 else inputs[2]
        kernel = output if "Filter" in kind else inputs[1]
        # A depthwise convolution has one kernel for each channel.
        end = -2 if kind.startswith("Depthwise") else -1
        return 2 * math.prod(image) * math.prod(kernel[:end])
    except TypeError:
        return None


def _einsum(equation: str, inputs: Sequence[tuple[int, ...]]) -> int:
    terms, sizes = equation.partition("->")[0].split(","), dict[str, int]()
    if len(terms) < 2:
        return 0
    for term, shape in zip(terms, inputs, strict=True):
        hidden = len(shape) - len(term.replace("...", ""))
        labels = term.replace("...", _AXES[len(_AXES) - hidden :])
        for label, size in zip(labels, shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), size)
    return math.prod(sizes.values())
