"""How often a loop of a graph turns, as far as its protos tell.

The loops of recurrent layers count up to the number of steps, which is that of a shape. This module
needs TensorFlow only.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf


def turns(
    loop: Any, condition: Any, body: Any, by_name: Mapping[str, Any], shape_at: Callable[[str], Any]
) -> int:
    """Returns how often a loop turns, if that is known, or else at most, or else 1.

    Args:
        loop: `NodeDef` of a While.
        condition: `FunctionDef` of its condition.
        body: `FunctionDef` of its body.
        by_name: the nodes around the loop.
        shape_at: returns the shape of an input.
    """

    def value(source: str) -> Any:
        proto = by_name.get(source.split(":")[0])
        if proto is None:
            return None
        if proto.op == "Const":
            return tf.make_ndarray(proto.attr["value"].tensor)
        if proto.op == "Shape":
            shape = shape_at(proto.input[0])
            return None if shape is None else np.array(shape)
        inputs = [value(each) for each in proto.input if not each.startswith("^")]
        if proto.op not in _FOLDED or any(each is None for each in inputs):
            return None
        return _FOLDED[proto.op](proto, *inputs)

    given = [value(source) for source in loop.input if not source.startswith("^")]
    counts = [_limit(condition, body, given), given[1]]  # The second one is the largest number.
    known = [int(count) for count in counts if count is not None and np.ndim(count) == 0]
    return min((count for count in known if count > 0), default=1)


def _limit(condition: Any, body: Any, given: list[Any]) -> Any:
    """How often a loop turns that goes on while what counts up is below a limit."""
    arguments = [arg.name for arg in condition.signature.input_arg]
    constants = {node.name: node for node in condition.node_def if node.op == "Const"}
    for node in condition.node_def:
        if node.op != "Less":
            continue
        counter, limit = (source.split(":")[0] for source in node.input[:2])
        if counter not in arguments:
            continue
        index = arguments.index(counter)
        if limit in constants:
            end = tf.make_ndarray(constants[limit].attr["value"].tensor)
        else:
            end = given[arguments.index(limit)] if limit in arguments else None
        # The loop's own counter, which is the first, is compared with its largest number.
        if index and end is not None and given[index] is not None:
            step = _step(body, index, given)
            if step is not None and np.ndim(step) == 0 and step > 0:
                return np.ceil((end - given[index]) / step)
    return None


def _step(body: Any, index: int, given: list[Any]) -> Any:
    """By how much a value of a loop is more after a turn, or None if that is not known."""
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
        is_known = nodes[step].op == "Const"
        return tf.make_ndarray(nodes[step].attr["value"].tensor) if is_known else None
    arguments = [arg.name for arg in body.signature.input_arg]
    at = arguments.index(step)
    # `tf.range` hands its step around, unchanged.
    is_same = body.ret[body.signature.output_arg[at].name] == step
    return given[at] if is_same else None


def _element(proto: Any, values: Any, begin: Any, *_: Any) -> Any:
    return values[int(begin[0])] if proto.attr["shrink_axis_mask"].i == 1 else None


# Of what the limit of a loop is made, as in the recurrent layers of both Kerases.
_FOLDED: dict[str, Callable[..., Any]] = {
    "Identity": lambda proto, value: value,
    "Cast": lambda proto, value: value,
    "StridedSlice": _element,
    "Range": lambda proto, start, limit, delta: np.arange(start, limit, delta),
    "Max": lambda proto, value, axes: np.max(value, axis=tuple(np.ravel(axes))),
    "Maximum": lambda proto, a, b: np.maximum(a, b),
    "Minimum": lambda proto, a, b: np.minimum(a, b),
}
