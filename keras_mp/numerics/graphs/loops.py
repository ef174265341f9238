"""How often a loop of a graph turns, as far as its protos tell.

The loops of recurrent layers count up to the number of steps, which is that of a shape. This module
needs TensorFlow only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.numerics.graphs.work import NodeDef

# The value of a tensor, or None where it is not known.
Value = np.ndarray | int | None


def turns(condition: Any, body: Any, inputs: Sequence[Value]) -> int | None:
    """Returns how often a loop turns, if that is known, or else at most, or else None.

    Args:
        condition: `FunctionDef` of its condition.
        body: `FunctionDef` of its body.
        inputs: the values that it begins with, as far as they are known; None for the others.
    """
    counts = [max(0, int(count)) for count in _limits(condition, body, inputs)]
    most = inputs[1]  # -1 if the program gave none
    if most is not None and most >= 0:
        counts.append(int(most))
    return min(counts, default=None)


def _limits(condition: Any, body: Any, inputs: Sequence[Value]) -> Iterator[np.ndarray]:
    """Yields how often a loop turns that goes on while what counts up is below a limit."""
    arguments = [arg.name for arg in condition.signature.input_arg]
    nodes = {node.name: node for node in condition.node_def}
    for node in _all_of(condition.ret[condition.signature.output_arg[0].name], nodes):
        counter, limit = (source.split(":")[0] for source in node.input[:2])
        if node.op != "Less" or counter not in arguments:
            continue
        index = arguments.index(counter)
        if limit in nodes:
            end = folded(nodes[limit]) if nodes[limit].op == "Const" else None
        else:
            end = inputs[arguments.index(limit)]
        begin, step = inputs[index], _step(body, index, inputs)
        if begin is None or end is None or step is None:
            continue
        if np.ndim(end) == np.ndim(step) == 0 and step > 0:
            yield np.ceil((end - begin) / step)


def _all_of(source: str, nodes: Mapping[str, NodeDef]) -> Iterator[NodeDef]:
    """Yields the nodes that have to be true, all of them, for a condition to be."""
    node = nodes.get(source.split(":")[0])
    if node is not None and node.op in ("Identity", "LogicalAnd"):
        for each in node.input:
            if not each.startswith("^"):
                yield from _all_of(each, nodes)
    elif node is not None and len(node.input) > 1:
        yield node


def _step(body: Any, index: int, inputs: Sequence[Value]) -> Value:
    """Returns what a turn adds to a value of a loop, or None if that is not known."""
    nodes = {node.name: node for node in body.node_def}
    argument = body.signature.input_arg[index].name
    source = body.ret[body.signature.output_arg[index].name].split(":")[0]
    while source in nodes and nodes[source].op == "Identity":
        source = nodes[source].input[0].split(":")[0]
    if source not in nodes or nodes[source].op not in ("Add", "AddV2"):
        return None
    added = [each.split(":")[0] for each in nodes[source].input[:2]]
    if argument not in added:
        return None
    step = added[1 - added.index(argument)]
    if step in nodes:
        return folded(nodes[step]) if nodes[step].op == "Const" else None
    arguments = [arg.name for arg in body.signature.input_arg]
    at = arguments.index(step)
    # `tf.range` hands its step around, unchanged.
    is_same = body.ret[body.signature.output_arg[at].name] == step
    return inputs[at] if is_same else None


def is_folded(proto: NodeDef) -> bool:
    """Whether `folded` knows what a node computes."""
    return proto.op == "Const" or proto.op in _FOLDED


def folded(proto: NodeDef, *inputs: Value) -> Value:
    """Returns the value of a node that the limit of a loop may depend on; None for other nodes.

    Args:
        proto: `NodeDef`.
        *inputs: the values of its inputs, None for those that are not known.
    """
    if proto.op == "Const":
        return tf.make_ndarray(proto.attr["value"].tensor)
    if proto.op not in _FOLDED or any(each is None for each in inputs):
        return None
    return _FOLDED[proto.op](proto, *inputs)


def _element(proto: NodeDef, values: np.ndarray, begin: np.ndarray, *_: Value) -> Value:
    return values[int(begin[0])] if proto.attr["shrink_axis_mask"].i == 1 else None


# As in the recurrent layers of both Kerases.
_FOLDED: dict[str, Callable[..., Any]] = {
    "Identity": lambda proto, value: value,
    "Cast": lambda proto, value: value,
    "StridedSlice": _element,
    "Range": lambda proto, start, limit, delta: np.arange(start, limit, delta),
    "Max": lambda proto, value, axes: np.max(value, axis=tuple(np.ravel(axes))),
    "Maximum": lambda proto, a, b: np.maximum(a, b),
    "Minimum": lambda proto, a, b: np.minimum(a, b),
}
