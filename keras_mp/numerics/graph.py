"""The nodes of a traced function with their shapes and work, and how often a call runs each.

Work is the floating-point operations of matrix products and convolutions. A multiplication and the
addition of its result count as two, as in TensorFlow's profiler. Other operations (activations,
sums, casts) are not counted: their time depends on the bytes that they move, not on what they
compute. This module needs TensorFlow only.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import tensorflow as tf

from keras_mp.grappler import report as rewrites
from keras_mp.support import op_table
from keras_mp.tensorflow_api import operations

NodeDef: TypeAlias = tf.compat.v1.NodeDef
# The sizes of a tensor; None where one of them is not known.
Shape = tuple[int, ...] | None
_Known = Sequence[tuple[int, ...]]

_LOOPS = op_table.ops("loops")
_BRANCHES = op_table.ops("conditions")
CALLS = op_table.ops("calls")

# The value of a tensor, or None where it is not known.
_Value = np.ndarray | int | None


class Node(NamedTuple):
    """A node of a graph, or of a function that it calls.

    Attributes:
        proto: `NodeDef`.
        path: str. The names of what calls it, and its own.
        dtypes: dict. Its floating-point dtypes by attribute, such as {"T": "float32"}.
        inputs: shapes of its inputs.
        outputs: shapes of its outputs.
        sources: the paths of the nodes, or arguments, that its inputs come from.
        turns: int. How often it runs in one call.
        is_least: bool. Whether it is in a loop of unknown length. It is counted once then.
        is_compiled: bool. Whether it is in a function that XLA compiles.
    """

    proto: NodeDef
    path: str
    dtypes: dict[str, str]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    sources: tuple[str, ...]
    turns: int
    is_least: bool
    is_compiled: bool

    @property
    def work(self) -> int | None:
        """The work of one run; None if a shape of a product is not known."""
        return of(self.proto, self.inputs, self.outputs)


def nodes_of(graph: Any) -> list[Node]:
    """Returns the nodes of a function's graph and of what it calls, as one call runs them.

    What nothing needs is left out. Of a branch, it is the one with the most work that counts, and
    then the one with more nodes. The body of a loop counts as often as the loop is known to turn,
    and once if nothing tells.

    Args:
        graph: that of a `ConcreteFunction`.
    """
    definition = graph.as_graph_def(add_shapes=True)
    library = {function.signature.name: function for function in definition.library.function}
    ends = [each.name for each in (*graph.outputs, *graph.control_outputs)]
    return list(_Body(library, definition.node, {}, {}, ends).nodes())


@dataclasses.dataclass
class _Body:
    """The nodes of a graph, or of a function in it.

    Args:
        library: the functions of the graph, by name.
        protos: the nodes.
        shapes: of its arguments, by name.
        values: the same, as far as they are known.
        ends: names of nodes and tensors that it is run for.
        prefix: str. What the paths of its nodes begin with.
        turns: int. How often it runs.
        is_least: bool. As in Node.
        is_compiled: bool. As in Node.
    """

    library: Mapping[str, Any]
    protos: Sequence[NodeDef]
    shapes: Mapping[str, Shape]
    values: Mapping[str, _Value]
    ends: Iterable[str] = ()
    prefix: str = ""
    turns: int = 1
    is_least: bool = False
    is_compiled: bool = False

    def __post_init__(self) -> None:
        self._by_name = {proto.name: proto for proto in self.protos}
        self._values = {(name, 0): value for name, value in self.values.items()}

    def nodes(self) -> Iterator[Node]:
        """Yields them, and those of what they call."""
        needed, waiting = set(), list(self.ends)
        while waiting and self.turns:
            name = self._node_of(waiting.pop())
            if name in self._by_name and name not in needed:
                needed.add(name)
                waiting += self._by_name[name].input
        for proto in self.protos:
            if proto.name not in needed:
                continue
            sources = _data(proto)
            yield Node(
                proto,
                self.prefix + proto.name,
                {name: each[0].name for name, each in rewrites.floating_dtypes(proto).items()},
                tuple(map(self._shape_at, sources)),
                self._shapes_of(proto.name),
                tuple(self.prefix + self._node_of(source) for source in sources),
                self.turns,
                self.is_least,
                self.is_compiled,
            )
            yield from self._called(proto)

    def _called(self, proto: NodeDef) -> Iterator[Node]:
        functions = {name: each.func.name for name, each in proto.attr.items() if each.func.name}
        if proto.op in _LOOPS:
            yield from self._inside(proto, functions["body"], "body/", self._times(proto)).nodes()
        elif proto.op in CALLS:
            yield from self._inside(proto, functions["f"]).nodes()
        elif proto.op in _BRANCHES:
            if "branches" in proto.attr:  # Reading a missing attribute would add it.
                several = enumerate(proto.attr["branches"].list.func)
                named = {f"branch{i}": each.name for i, each in several}
            else:
                named = {"then": functions["then_branch"], "else": functions["else_branch"]}
            bodies = [self._inside(proto, each, f"{name}/") for name, each in named.items()]
            yield from max((list(body.nodes()) for body in bodies), key=_amount)

    def _inside(
        self, proto: NodeDef, name: str, prefix: str = "", times: int | None = 1
    ) -> "_Body":
        """Returns the function that a node calls.

        Args:
            proto: the node.
            name: str. That of the function.
            prefix: str. What tells it from the node's other functions.
            times: int. How often the node calls it; None if that is not known.
        """
        function = self.library.get(name)
        arguments = [] if function is None else [arg.name for arg in function.signature.input_arg]
        sources = _data(proto)[1 if proto.op in _BRANCHES else 0 :]
        ends = () if function is None else (*function.ret.values(), *function.control_ret.values())
        return _Body(
            self.library,
            () if function is None else function.node_def,
            dict(zip(arguments, map(self._shape_at, sources))),
            # In a loop they change with each turn.
            {} if proto.op in _LOOPS else dict(zip(arguments, map(self._value_at, sources))),
            ends,
            f"{self.prefix}{proto.name}/{prefix}",
            self.turns * (1 if times is None else times),
            self.is_least or times is None,
            self.is_compiled
            or ("_XlaMustCompile" in proto.attr and proto.attr["_XlaMustCompile"].b),
        )

    def _times(self, loop: NodeDef) -> int | None:
        """Returns how often a loop turns, if that is known, or else at most, or else None."""
        inputs = [self._value_at(source) for source in _data(loop)]
        counts = [max(0, int(count)) for count in self._limits(loop, inputs)]
        most = inputs[1]  # -1 if the program gave none
        if most is not None and most >= 0:
            counts.append(int(most))
        return min(counts, default=None)

    def _limits(self, loop: NodeDef, inputs: Sequence[_Value]) -> Iterator[np.ndarray]:
        """Yields how often a loop turns that goes on while what counts up is below a limit."""
        condition, body = (self.library[loop.attr[each].func.name] for each in ("cond", "body"))
        names = [arg.name for arg in condition.signature.input_arg]
        before = _Body(self.library, condition.node_def, {}, dict(zip(names, inputs)))
        for test in before._all_of(condition.ret[condition.signature.output_arg[0].name]):
            counter = before._node_of(test.input[0])
            if test.op != "Less" or counter not in names:
                continue
            index = names.index(counter)
            begin, end = inputs[index], before._value_at(test.input[1])
            step = self._step(body, index, inputs)
            if begin is None or end is None or step is None:
                continue
            if np.ndim(end) == np.ndim(step) == 0 and step > 0:
                yield np.ceil((end - begin) / step)

    def _all_of(self, source: str) -> Iterator[NodeDef]:
        """Yields the nodes that have to be true, all of them, for a condition to be."""
        node = self._by_name.get(self._node_of(source))
        if node is not None and node.op in ("Identity", "LogicalAnd"):
            for each in _data(node):
                yield from self._all_of(each)
        elif node is not None and len(node.input) > 1:
            yield node

    def _step(self, body: Any, index: int, inputs: Sequence[_Value]) -> _Value:
        """Returns what a turn adds to a value of a loop, or None if that is not known."""
        names = [arg.name for arg in body.signature.input_arg]
        results = [body.ret[arg.name] for arg in body.signature.output_arg]
        # `tf.range` hands its step around, unchanged.
        same = {n: value for n, result, value in zip(names, results, inputs) if n == result}
        after = _Body(self.library, body.node_def, {}, same)
        node = after._by_name.get(after._node_of(results[index]))
        while node is not None and node.op == "Identity":
            node = after._by_name.get(after._node_of(node.input[0]))
        if node is None or node.op not in ("Add", "AddV2"):
            return None
        added = {after._node_of(source): source for source in node.input[:2]}
        if added.pop(names[index], None) is None:
            return None
        return after._value_at(*added.values()) if added else None

    def _node_of(self, source: str) -> str:
        return _parse(source, self._by_name)[0]

    def _shapes_of(self, name: str) -> tuple[Shape, ...]:
        if name not in self._by_name:
            return (self.shapes.get(name),)
        proto = self._by_name[name]
        if proto.op == "Const":
            return (known(tf.TensorShape(proto.attr["value"].tensor.tensor_shape)),)
        if "_output_shapes" not in proto.attr:
            return ()
        return tuple(map(known, map(tf.TensorShape, proto.attr["_output_shapes"].list.shape)))

    def _shape_at(self, source: str) -> Shape:
        name, index = _parse(source, self._by_name)
        found = self._shapes_of(name)
        return found[index] if index < len(found) else None

    def _value_at(self, source: str) -> _Value:
        """Returns the value of an input, if it is known and may tell how often a loop turns."""
        output = _parse(source, self._by_name)
        if output not in self._values:
            self._values[output] = None  # where a loop comes back
            self._values[output] = self._find_value(*output)
        return self._values[output]

    def _find_value(self, name: str, index: int) -> _Value:
        if name not in self._by_name:
            return None
        proto = self._by_name[name]
        if proto.op in _LOOPS:  # Its first result counts its turns.
            return self._times(proto) if index == 0 else None
        if proto.op in CALLS and (function := self.library.get(proto.attr["f"].func.name)):
            result = function.signature.output_arg[index].name
            return self._inside(proto, function.signature.name)._value_at(function.ret[result])
        if proto.op == "Shape":
            shape = self._shape_at(proto.input[0])
            return None if shape is None else np.array(shape)
        if proto.op == "Const":
            return tf.make_ndarray(proto.attr["value"].tensor)
        if proto.op not in _FOLDED:
            return None
        values = [self._value_at(source) for source in _data(proto)]
        return None if any(each is None for each in values) else _FOLDED[proto.op](proto, *values)


def _element(proto: NodeDef, values: np.ndarray, begin: np.ndarray, *_: _Value) -> _Value:
    return values[int(begin[0])] if proto.attr["shrink_axis_mask"].i == 1 else None


# What the limit of a loop may depend on, as in the recurrent layers of both Kerases.
_FOLDED: dict[str, Callable[..., Any]] = {
    "Identity": lambda proto, value: value,
    "Cast": lambda proto, value: value,
    "StridedSlice": _element,
    "Range": lambda proto, start, limit, delta: np.arange(start, limit, delta),
    "Max": lambda proto, value, axes: np.max(value, axis=tuple(np.ravel(axes))),
    "Maximum": lambda proto, a, b: np.maximum(a, b),
    "Minimum": lambda proto, a, b: np.minimum(a, b),
}


def _amount(nodes: Sequence[Node]) -> tuple[int, int]:
    amounts = ((node.work or 0) * node.turns for node in nodes)
    return sum(amounts), len(nodes)


def _data(proto: NodeDef) -> list[str]:
    return [source for source in proto.input if not source.startswith("^")]


def _parse(source: str, by_name: Mapping[str, NodeDef]) -> tuple[str, int]:
    """Returns the name of the node that an input comes from, and the index of its output."""
    name, *rest = source.removeprefix("^").split(":")
    if len(rest) < 2:  # of a graph, or an argument of a function
        return name, int(rest[0]) if rest else 0
    output, index = rest
    definition = operations.definition(by_name[name].op) if name in by_name else None
    outputs = [arg.name for arg in definition.output_arg] if definition is not None else []
    return name, int(index) + (outputs.index(output) if output in outputs else 0)


def known(shape: tf.TensorShape) -> Shape:
    """Returns a shape as a tuple, or None."""
    return cast(tuple[int, ...], tuple(shape)) if shape.is_fully_defined() else None


def of(node: NodeDef, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int | None:
    """Counts the floating-point operations of one operation.

    Args:
        node: `NodeDef`.
        inputs: the shapes of its inputs.
        outputs: the shapes of its outputs.

    Returns:
        int: 0 if it is neither a product nor a convolution; None if a shape is not known.
    """
    if node.op not in COUNTED:
        return 0
    try:
        return 2 * COUNTED[node.op](node, inputs, outputs)
    except (TypeError, IndexError):
        return None


def multiplied_sizes(
    node: NodeDef, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> tuple[int, ...]:
    """Returns the sizes that a tensor core divides into tiles: rows, columns, what is summed over.

    Args:
        node: `NodeDef`.
        inputs: the shapes of its inputs.
        outputs: the shapes of its outputs.

    Returns:
        tuple of int; empty for unknown shapes, and for what is no plain product or convolution.
    """
    try:
        if node.op == "MatMul":
            return (*cast(_Known, outputs)[0], _summed_over(node, cast(_Known, inputs)))
        if node.op == "Conv2D":
            return cast(_Known, inputs)[1][-2:]
    except (TypeError, IndexError):
        return ()
    return ()


def _summed_over(node: NodeDef, inputs: _Known) -> int:
    transposed = "transpose_a" if node.op == "MatMul" else "adj_x"
    return inputs[0][-2 if node.attr[transposed].b else -1]


def _matrix_product(node: NodeDef, inputs: _Known, outputs: _Known) -> int:
    return math.prod(outputs[0]) * _summed_over(node, inputs)


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


# By operation, a function that counts half of its floating-point operations.
COUNTED: dict[str, Callable[..., int]] = {
    **dict.fromkeys(
        op_table.ops("matrix products", "matrix products into another dtype"), _matrix_product
    ),
    "Einsum": _einsum,
    **{
        op: _convolution(image, kernel, op.startswith("Depthwise"))
        for kind, image, kernel in (
            ("convolutions", -1, 1),
            ("transposed convolutions", 2, 1),
            ("transposed convolutions to the shape of a tensor", 2, 1),
            ("gradients of kernels", 2, -1),
        )
        for op in op_table.BY_KIND[kind]
    },
}
