"""The nodes of a function's graph with their shapes, and how often a call of it runs each.

The graph is read as protos, which is what grappler takes and returns, so that both can be read in
the same way. This module needs TensorFlow only.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.grappler import report as rewrites
from keras_mp.numerics.graphs import work as works
from keras_mp.numerics.graphs.work import NodeDef, Shape, Work
from keras_mp.support import op_table
from keras_mp.tensorflow_api import operations

# Their results have the shape of what comes in; grappler makes such nodes, and gives them no shape.
_SAME_SHAPE = op_table.ops(
    *("casts", "identities", "identities without a gradient"),
    *("entries of frames", "exits of frames", "frames"),
)
_LOOPS = op_table.ops("loops")
_BRANCHES = op_table.ops("conditions")
CALLS = op_table.ops("calls")
# Grappler puts this into names where it puts functions in the place of their calls.
_INLINED = re.compile(r"/_\d+(?=/)|(?:^|(?<=/))Func/")

# The value of a tensor, or None where it is not known.
_Value = np.ndarray | int | None


class Node(NamedTuple):
    """A node of a graph, or of a function that it calls.

    Attributes:
        proto: `NodeDef`.
        path: str. The names of what calls it, and its own. It stays when grappler puts the nodes of
            a function in the place of what calls it.
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
    def work(self) -> Work | None:
        """The work of one run, or None if it is neither a product nor a convolution."""
        return works.of(self.proto, self.inputs, self.outputs)


class Walk:
    """A graph and what it calls, as one call runs them.

    Of a branch, it is the one with the most work that counts, and then the one with more nodes. The
    body of a loop counts as often as the loop is known to turn, and once if nothing tells.

    Attributes:
        nodes: list of Node.
        loops: dict. By the path of a loop, how often it turns; None if nothing tells.
        branches: list of tuples. What the paths of the nodes in the branches of each condition
            begin with.

    Args:
        graph: `GraphDef` whose nodes have the attribute `_output_shapes`, as
            `Graph.as_graph_def(add_shapes=True)` gives it.
        before: the graph that grappler has made this one of. It has shapes that are lost here, and
            tells how often loops turn and which branches there are, where they are taken apart.
    """

    def __init__(self, graph: tf.compat.v1.GraphDef, before: "Walk | None" = None) -> None:
        self.library = {function.signature.name: function for function in graph.library.function}
        self.nodes_before = {} if before is None else {node.path: node for node in before.nodes}
        self.loops_before = {} if before is None else before.loops
        self.loops: dict[str, int | None] = {}
        self.branches: list[tuple[str, ...]] = []
        nodes = list(_Body(self, graph.node, {}, {}).nodes())
        self.nodes = nodes if before is None else _without_branches(nodes, before.branches)


@dataclasses.dataclass
class _Body:
    """The nodes of a graph, or of a function in it.

    Args:
        walk: what it is part of.
        protos: the nodes.
        shapes: of its arguments, by name.
        values: the same, as far as they are known.
        prefix: str. What the paths of its nodes begin with.
        turns: int. How often it runs.
        is_least: bool. As in Node.
        is_compiled: bool. As in Node.
    """

    walk: Walk
    protos: Sequence[NodeDef]
    shapes: Mapping[str, Shape]
    values: Mapping[str, _Value]
    prefix: str = ""
    turns: int = 1
    is_least: bool = False
    is_compiled: bool = False

    def __post_init__(self) -> None:
        self._by_name = {proto.name: proto for proto in self.protos}
        self._shapes: dict[str, tuple[Shape, ...]] = {n: (s,) for n, s in self.shapes.items()}
        self._values = {(name, 0): value for name, value in self.values.items()}

    def nodes(self) -> Iterator[Node]:
        """Yields them, and those of what they call."""
        for proto in self.protos:
            turns, is_least = self._turns_of(proto)
            if not turns:
                continue
            sources = _data(proto)
            inputs, before = map(self._shape_at, sources), self._before(proto)
            if before is not None and len(before.inputs) == len(sources):
                inputs = (mine or other for mine, other in zip(inputs, before.inputs))
            yield Node(
                proto,
                self._path(proto.name),
                {name: each[0].name for name, each in rewrites.floating_dtypes(proto).items()},
                tuple(inputs),
                self._shapes_of(proto.name),
                tuple(self._path(self._node_of(source)) for source in sources),
                turns,
                is_least,
                self.is_compiled,
            )
            yield from self._called(proto)

    def _called(self, proto: NodeDef) -> Iterator[Node]:
        functions = {name: each.func.name for name, each in proto.attr.items() if each.func.name}
        if proto.op in _LOOPS:
            times = self.walk.loops[self._path(proto.name)] = self._times(proto)
            yield from self._inside(proto, functions["body"], "body/", times).nodes()
        elif proto.op in CALLS:
            yield from self._inside(proto, functions["f"]).nodes()
        elif proto.op in _BRANCHES:
            if "branches" in proto.attr:  # Reading a missing attribute would add it.
                several = enumerate(proto.attr["branches"].list.func)
                named = {f"branch{i}": each.name for i, each in several}
            else:
                named = {"then": functions["then_branch"], "else": functions["else_branch"]}
            bodies = [self._inside(proto, each, f"{name}/") for name, each in named.items()]
            self.walk.branches.append(tuple(body.prefix for body in bodies))
            yield from max((list(body.nodes()) for body in bodies), key=_amount)

    def _inside(
        self, proto: NodeDef, name: str, prefix: str = "", times: int | None = 1
    ) -> "_Body":
        """Returns the function that a node calls.

        Args:
            proto: the node.
            name: str. That of the function.
            prefix: str. What grappler puts before the names of its nodes, beside that of the node.
            times: int. How often the node calls it; None if that is not known.
        """
        function = self.walk.library.get(name)
        arguments = [] if function is None else [arg.name for arg in function.signature.input_arg]
        sources = _data(proto)[1 if proto.op in _BRANCHES else 0 :]
        turns, is_least = self._turns_of(proto)
        return _Body(
            self.walk,
            () if function is None else function.node_def,
            dict(zip(arguments, map(self._shape_at, sources))),
            # In a loop they change with each turn.
            {} if proto.op in _LOOPS else dict(zip(arguments, map(self._value_at, sources))),
            f"{self._path(proto.name)}/{prefix}",
            turns * (1 if times is None else times),
            is_least or times is None,
            self.is_compiled
            or ("_XlaMustCompile" in proto.attr and proto.attr["_XlaMustCompile"].b),
        )

    def _turns_of(self, proto: NodeDef) -> tuple[int, bool]:
        """Returns how often a node runs, and whether that is only known to be the least."""
        turns, is_least, path = self.turns, self.is_least, self._path(proto.name)
        for loop, times in self.walk.loops_before.items():
            # Where grappler takes a loop apart, the names of its nodes stay.
            is_inside = path.startswith((f"{loop}/body/", f"{loop}/cond/"))
            if is_inside and loop not in self.walk.loops:
                turns, is_least = turns * (1 if times is None else times), is_least or times is None
        return turns, is_least

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
        condition, body = (
            self.walk.library[loop.attr[each].func.name] for each in ("cond", "body")
        )
        names = [arg.name for arg in condition.signature.input_arg]
        before = _Body(self.walk, condition.node_def, {}, dict(zip(names, inputs)))
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
        after = _Body(self.walk, body.node_def, {}, same)
        node = after._by_name.get(after._node_of(results[index]))
        while node is not None and node.op == "Identity":
            node = after._by_name.get(after._node_of(node.input[0]))
        if node is None or node.op not in ("Add", "AddV2"):
            return None
        added = {after._node_of(source): source for source in node.input[:2]}
        if added.pop(names[index], None) is None:
            return None
        return after._value_at(*added.values()) if added else None

    def _path(self, name: str) -> str:
        return _INLINED.sub("", self.prefix + name)

    def _before(self, proto: NodeDef) -> Node | None:
        found = self.walk.nodes_before.get(self._path(proto.name))
        return found if found is not None and found.proto.op == proto.op else None

    def _node_of(self, source: str) -> str:
        return _parse(source, self._by_name)[0]

    def _shapes_of(self, name: str) -> tuple[Shape, ...]:
        if name not in self._shapes:
            self._shapes[name] = ()  # where a loop comes back
            self._shapes[name] = self._find_shapes(self._by_name[name])
        return self._shapes[name]

    def _shape_at(self, source: str) -> Shape:
        name, index = _parse(source, self._by_name)
        found = self._shapes_of(name) if name in self._by_name or name in self._shapes else ()
        return found[index] if index < len(found) else None

    def _find_shapes(self, proto: NodeDef) -> tuple[Shape, ...]:
        if proto.op == "Const":
            return (_known(tf.TensorShape(proto.attr["value"].tensor.tensor_shape)),)
        known = self._before(proto)
        if "_output_shapes" in proto.attr:
            shapes = map(tf.TensorShape, proto.attr["_output_shapes"].list.shape)
            found = tuple(map(_known, shapes))
            if known is None or len(known.outputs) != len(found):
                return found
            return tuple(mine or other for mine, other in zip(found, known.outputs))
        if known is not None:
            return known.outputs
        if proto.op in _SAME_SHAPE:
            return (self._shape_at(proto.input[0]),) * 2
        return ()

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
        if proto.op in CALLS and (function := self.walk.library.get(proto.attr["f"].func.name)):
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


def _without_branches(nodes: list[Node], branches: Sequence[tuple[str, ...]]) -> list[Node]:
    """Leaves out the branches with less work, of conditions that grappler has taken apart."""
    for prefixes in sorted(branches, key=lambda each: -len(each[0])):  # the innermost first
        sides = [[node for node in nodes if node.path.startswith(each)] for each in prefixes]
        most = max(sides, key=_amount)
        others = {id(node) for side in sides if side is not most for node in side}
        nodes = [node for node in nodes if id(node) not in others]
    return nodes


def _amount(nodes: Sequence[Node]) -> tuple[int, int]:
    amounts = (node.work.count * node.turns for node in nodes if node.work is not None)
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


def _known(shape: tf.TensorShape) -> Shape:
    return tuple(shape) if shape.is_fully_defined() else None
