"""The nodes of a function's graph with their shapes, and how often a call of it runs each.

The graph is read as protos, which is what grappler takes and returns, so that both can be read in
the same way. This module needs TensorFlow only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import op_def_registry as _op_defs

from keras_mp.numerics import loops
from keras_mp.numerics import work as works
from keras_mp.numerics.work import Shape, Work

FLOATS = {
    dtype.as_datatype_enum: dtype.name
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64)
}
# Their result has the shape of what comes in; grappler makes such nodes, and gives them no shape.
_SAME_SHAPE = frozenset(("Cast", "Identity", "Snapshot", "StopGradient", "PreventGradient"))
_LOOPS = ("While", "StatelessWhile")
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")


class Node(NamedTuple):
    """A node of a graph, or of a function that it calls.

    Attributes:
        proto: `NodeDef`.
        dtypes: dict. Its floating-point dtypes by attribute, such as {"T": "float32"}.
        inputs: shapes of its inputs.
        outputs: shapes of its outputs.
        sources: the nodes that its inputs come from; None for an argument of a function.
        turns: int. How often it runs in one call.
        is_in_main: bool. Is it in the graph itself, and not in a function that this calls?
    """

    proto: Any
    dtypes: dict[str, str]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    sources: tuple[Any, ...]
    turns: int
    is_in_main: bool

    @property
    def work(self) -> Work | None:
        """What it computes each time, or None if it is neither a product nor a convolution."""
        return works.of(self.proto, self.inputs, self.outputs)


def floats_of(proto: Any) -> dict[str, str]:
    """The floating-point dtypes of a node by attribute.

    Args:
        proto: `NodeDef`.
    """
    found = {}
    for name, value in proto.attr.items():
        if not name.startswith("_"):
            types = [value.type] if value.WhichOneof("value") == "type" else value.list.type
            floats = [FLOATS[each] for each in types if each in FLOATS]
            if floats:
                found[name] = floats[0]
    return found


def walk(
    graph: tf.compat.v1.GraphDef, before: Mapping[str, tuple[Shape, ...]] | None = None
) -> list[Node]:
    """Lists the nodes of a graph and of what it calls, as one call runs them.

    Of a branch, it is the one with the most work that counts, and then the one with more nodes. The
    body of a loop counts as often as the loop is known to turn, and once if nothing tells.

    Args:
        graph: `GraphDef` whose nodes have the attribute `_output_shapes`, as
            `Graph.as_graph_def(add_shapes=True)` gives it.
        before: shapes by name, for nodes that have none: of the graph that this one was made of.
    """
    library = {function.signature.name: function for function in graph.library.function}
    return list(_Walk(library, before or {}).body(graph.node, {}, 1, True))


class _Walk:
    """Goes through a graph.

    Args:
        library: `FunctionDef`s by name.
        before: shapes by name.
    """

    def __init__(self, library: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        self._library, self._before = library, before

    def body(
        self,
        protos: Sequence[Any],
        shapes: dict[str, tuple[Shape, ...]],
        turns: int,
        is_in_main: bool,
    ) -> Iterator[Node]:
        by_name = {proto.name: proto for proto in protos}
        shapes = dict(shapes)

        def shapes_of(name: str) -> tuple[Shape, ...]:
            if name not in shapes:
                shapes[name] = ()  # where a loop of TensorFlow 1 comes back
                shapes[name] = self._shapes(by_name[name], shape_at)
            return shapes[name]

        def shape_at(source: str) -> Shape:
            name, index = _parse(source, by_name)
            found = shapes_of(name) if name in by_name or name in shapes else ()
            return found[index] if index < len(found) else None

        for proto in protos:
            sources = [source for source in proto.input if not source.startswith("^")]
            yield Node(
                proto,
                floats_of(proto),
                tuple(map(shape_at, sources)),
                shapes_of(proto.name),
                tuple(by_name.get(_parse(source, by_name)[0]) for source in sources),
                turns,
                is_in_main,
            )
            yield from self._called(proto, by_name, shape_at, sources, turns)

    def _shapes(self, proto: Any, shape_at: Callable[[str], Shape]) -> tuple[Shape, ...]:
        if "_output_shapes" in proto.attr:
            found = proto.attr["_output_shapes"].list.shape
            return tuple(_dimensions(shape) for shape in found)
        if proto.name in self._before:
            return self._before[proto.name]
        if proto.op in _SAME_SHAPE:
            return (shape_at(proto.input[0]),)
        return ()

    def _called(
        self,
        proto: Any,
        by_name: Mapping[str, Any],
        shape_at: Callable[[str], Shape],
        sources: Sequence[str],
        turns: int,
    ) -> Iterator[Node]:
        """The nodes of the functions that a node calls."""
        names = {name: value.func.name for name, value in proto.attr.items() if value.func.name}
        lists = [value.list.func for value in proto.attr.values()]
        given = tuple(map(shape_at, sources))

        def inside(function: str, times: int, given: Sequence[Shape]) -> list[Node]:
            if function not in self._library:
                return []
            definition = self._library[function]
            arguments = [arg.name for arg in definition.signature.input_arg]
            shapes = {name: (shape,) for name, shape in zip(arguments, given)}
            return list(self.body(definition.node_def, shapes, turns * times, False))

        if proto.op in _LOOPS:
            condition, body = (self._library[names[each]] for each in ("cond", "body"))
            times = loops.turns(proto, condition, body, by_name, shape_at)
            yield from inside(names["body"], times, given)
        elif proto.op in _BRANCHES:
            functions = [*names.values(), *(func.name for group in lists for func in group)]
            branches = [inside(function, 1, given[1:]) for function in functions]
            yield from max(branches, key=_amount, default=[])
        elif proto.op in ("PartitionedCall", "StatefulPartitionedCall"):
            yield from inside(names["f"], 1, given)


def _amount(nodes: Sequence[Node]) -> tuple[int, int]:
    works_of = (node.work for node in nodes)
    return sum(each.count for each in works_of if each is not None), len(nodes)


def _parse(source: str, by_name: Mapping[str, Any]) -> tuple[str, int]:
    """The node, and which of its outputs, that an input comes from."""
    name, *rest = source.removeprefix("^").split(":")
    if len(rest) < 2:  # of a graph, or an argument of a function
        return name, int(rest[0]) if rest else 0
    output, index = rest
    definition = _op_defs.get(by_name[name].op) if name in by_name else None
    outputs = [arg.name for arg in definition.output_arg] if definition is not None else []
    return name, int(index) + (outputs.index(output) if output in outputs else 0)


def _dimensions(shape: Any) -> Shape:
    sizes = tuple(dim.size for dim in shape.dim)
    return None if shape.unknown_rank or -1 in sizes else sizes
