"""The operations of a traced function with their work, and how often a call runs each.

Work is the floating-point operations of matrix products and convolutions. A multiplication and the
addition of its result count as two, as in TensorFlow's profiler. Other operations (activations,
sums, casts) are not counted: their time depends on the bytes that they move, not on what they
compute. This module needs TensorFlow only.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf

from keras_mp.grappler import report as rewrites
from keras_mp.support import op_table
from keras_mp.tensorflow_api import graphs

_Known = Sequence[tuple[int, ...]]

_LOOPS = op_table.ops("loops")
_BRANCHES = op_table.ops("conditions")
CALLS = op_table.ops("calls")
# The attributes that name the functions which an operation runs, or of which it runs one.
_FUNCTIONS = {
    **dict.fromkeys(_LOOPS, ("body",)),
    **dict.fromkeys(CALLS, ("f",)),
    **dict.fromkeys(_BRANCHES, ("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
}

# The value of a tensor, or None where it is not known.
_Value = np.ndarray | int | None


class Node(NamedTuple):
    """An operation of a graph, or of a function that it calls.

    Attributes:
        made: `tf.Operation`.
        path: str. The names of what calls it, and its own.
        dtypes: dict. Its floating-point dtypes by attribute, such as {"T": "float32"}.
        sources: the paths of the operations that its inputs come from.
        turns: int. How often it runs in one call.
        is_least: bool. Whether it is in a loop of unknown length. It is counted once then.
        is_compiled: bool. Whether it is in a function that XLA compiles.
        work: int. The work of one run; None if a shape of a product is not known.
    """

    made: tf.Operation
    path: str
    dtypes: dict[str, str]
    sources: tuple[str, ...]
    turns: int
    is_least: bool
    is_compiled: bool
    work: int | None

    @property
    def dtype(self) -> str:
        """The dtype that it computes in; "" if it has no floating-point one."""
        return self.dtypes.get("T") or next(iter(self.dtypes.values()), "")


def nodes_of(graph: Any) -> list[Node]:
    """Returns the operations of a function's graph and of what it calls, as one call runs them.

    What nothing needs is left out. Of a branch, it is the one with the most work that counts, and
    then the one with more operations. The body of a loop counts as often as the loop is known to
    turn, and once if nothing tells.

    Args:
        graph: that of a `ConcreteFunction`.
    """
    return list(_Body(graph, {}, graph.outputs).nodes())


@dataclasses.dataclass
class _Body:
    """The operations of a function's graph, where it is called.

    Args:
        graph: the graph.
        values: of its tensors by name, as far as they are known: those of its arguments.
        outputs: tensors that it is run for.
        around: the body that calls it, or None.
        prefix: str. What the paths of its nodes begin with.
        turns: int. How often it runs.
        is_least: bool. As in Node.
        is_compiled: bool. As in Node.
    """

    graph: Any
    values: dict[str, _Value]
    outputs: Sequence[tf.Tensor]
    around: "_Body | None" = None
    prefix: str = ""
    turns: int = 1
    is_least: bool = False
    is_compiled: bool = False

    def nodes(self) -> Iterator[Node]:
        """Yields them, and those of what they call."""
        needed = set()
        waiting = [*(tensor.op for tensor in self.outputs), *self.graph.control_outputs]
        while waiting and self.turns:
            made = waiting.pop()
            if made not in needed:
                needed.add(made)
                waiting += [*(tensor.op for tensor in made.inputs), *made.control_inputs]
        for made in self.graph.get_operations():
            if made not in needed:
                continue
            dtypes = rewrites.floating_dtypes(made.node_def)
            yield Node(
                made,
                self.prefix + made.name,
                {name: each[0].name for name, each in dtypes.items()},
                tuple(self.prefix + tensor.op.name for tensor in made.inputs),
                self.turns,
                self.is_least,
                self.is_compiled,
                of(made),
            )
            bodies = [list(body.nodes()) for body in self._inside(made)]
            yield from max(bodies, key=_amount, default=())

    def _functions(self, made: tf.Operation, *attributes: str) -> list[Any]:
        """Returns the graphs of the functions that attributes of an operation name."""
        graphs_of = []
        for found in (cast(Any, made.get_attr(each)) for each in attributes):
            for function in found if isinstance(found, list) else [found]:
                body = self
                while (known := graphs.function_of_name(body.graph, function.name)) is None:
                    assert body.around is not None
                    body = body.around
                graphs_of.append(known.graph)
        return graphs_of

    def _inside(self, made: tf.Operation) -> Iterator["_Body"]:
        """Yields the functions that an operation runs, or of which it runs one."""
        for i, graph in enumerate(self._functions(made, *_FUNCTIONS.get(made.type, ()))):
            times, values = 1, {}
            if made.type in _LOOPS:  # What it hands around changes with each turn.
                times = self._times(made)
            else:
                given = made.inputs[1 if made.type in _BRANCHES else 0 :]
                values = {to.name: self._value(each) for to, each in zip(graph.inputs, given)}
            yield _Body(
                graph,
                values,
                # The graph of a function with a gradient may have more of them.
                graph.outputs[: len(made.outputs)],
                self,
                f"{self.prefix}{made.name}/{f'{i}/' if i else ''}",
                self.turns * (1 if times is None else times),
                self.is_least or times is None,
                self.is_compiled or made.node_def.attr["_XlaMustCompile"].b,
            )

    def _times(self, loop: tf.Operation) -> int | None:
        """Returns how often a loop turns, if that is known, or else at most, or else None."""
        return min((max(0, int(count)) for count in self._limits(loop)), default=None)

    def _limits(self, loop: tf.Operation) -> Iterator[np.ndarray]:
        """Yields how often a loop turns that goes on while what counts up is below a limit.

        With `maximum_iterations`, TensorFlow counts the turns.
        """
        inputs = [self._value(tensor) for tensor in loop.inputs]
        condition, body = self._functions(loop, "cond", "body")
        names = [tensor.name for tensor in condition.inputs]
        before = _Body(condition, dict(zip(names, inputs)), condition.outputs, self)
        # `tf.range` hands its step around, unchanged.
        same = zip(body.inputs, body.outputs, inputs)
        values = {to.name: value for to, result, value in same if to is result}
        after = _Body(body, values, body.outputs, self)
        for test in _all_of(condition.outputs[0].op):
            if test.type != "Less" or test.inputs[0].name not in names:
                continue
            index = names.index(test.inputs[0].name)
            begin, end, step = inputs[index], before._value(test.inputs[1]), after._step(index)
            if begin is None or end is None or step is None:
                continue
            if np.ndim(end) == np.ndim(step) == 0 and step > 0:
                yield np.ceil((end - begin) / step)

    def _step(self, index: int) -> _Value:
        """Returns what a turn adds to a value of a loop, or None if that is not known."""
        made = self.outputs[index].op
        while made.type == "Identity":
            made = made.inputs[0].op
        if made.type not in ("Add", "AddV2"):
            return None
        added = [each for each in made.inputs if each is not self.graph.inputs[index]]
        return self._value(added[0]) if len(added) == 1 else None

    def _value(self, tensor: tf.Tensor) -> _Value:
        """Returns the value of a tensor, if it is known and may tell how often a loop turns."""
        if tensor.name not in self.values:
            self.values[tensor.name] = None  # where a loop comes back
            self.values[tensor.name] = self._find_value(tensor.op, tensor.value_index)
        return self.values[tensor.name]

    def _find_value(self, made: tf.Operation, index: int) -> _Value:
        if made.type in _LOOPS:  # Its first result counts its turns.
            return self._times(made) if index == 0 else None
        if made.type in CALLS:
            [body] = self._inside(made)
            return body._value(body.outputs[index])
        if made.type == "Shape":
            shape = made.inputs[0].shape
            return np.array(shape) if shape.is_fully_defined() else None
        if made.type == "Const":
            return tf.get_static_value(made.outputs[0])
        if made.type not in _FOLDED:
            return None
        values = [self._value(tensor) for tensor in made.inputs]
        return None if any(each is None for each in values) else _FOLDED[made.type](made, *values)


def _all_of(made: tf.Operation) -> Iterator[tf.Operation]:
    """Yields the operations that have to be true, all of them, for a condition to be."""
    if made.type in ("Identity", "LogicalAnd"):
        for tensor in made.inputs:
            yield from _all_of(tensor.op)
    elif len(made.inputs) > 1:
        yield made


def _element(made: tf.Operation, values: np.ndarray, begin: np.ndarray, *_: _Value) -> _Value:
    return values[int(begin[0])] if made.get_attr("shrink_axis_mask") == 1 else None


# What the limit of a loop may depend on, as in the recurrent layers of both Kerases.
_FOLDED: dict[str, Callable[..., Any]] = {
    "Identity": lambda made, value: value,
    "Cast": lambda made, value: value,
    "StridedSlice": _element,
    "Range": lambda made, start, limit, delta: np.arange(start, limit, delta),
    "Max": lambda made, value, axes: np.max(value, axis=tuple(np.ravel(axes))),
    "Maximum": lambda made, a, b: np.maximum(a, b),
    "Minimum": lambda made, a, b: np.minimum(a, b),
}


def _amount(nodes: Sequence[Node]) -> tuple[int, int]:
    amounts = ((node.work or 0) * node.turns for node in nodes)
    return sum(amounts), len(nodes)


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
            return (*outputs[0], _summed_over(made, inputs))
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
        return math.prod(outputs[0]) * _summed_over(made, inputs)
    shapes = (*inputs, outputs[0])
    image, kernel = (shapes[place] for place in _CONVOLUTIONS[made.type])
    # A depthwise convolution has one kernel for each channel.
    return math.prod(image) * math.prod(kernel[: -2 if made.type.startswith("Depthwise") else -1])


def _summed_over(made: tf.Operation, inputs: _Known) -> int:
    transposed = "transpose_a" if made.type == "MatMul" else "adj_x"
    return inputs[0][-2 if made.get_attr(transposed) else -1]


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
