"""Runs graphs that were rewritten for a GPU, on this machine's CPU."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.grappler import optimize
from keras_mp.grappler import report as reports

V1 = tf.compat.v1
_COUNT = itertools.count()


def tolerance(report: reports.RewriteReport) -> float:
    """How far the rewritten graph may be from float32, as a part of the result.

    Each operation rounds what it takes and what it gives, by half a unit at most. Such errors have
    random signs, so that their squares add up. Twice that, since a softmax or a normalization makes
    more of some.

    Args:
        report: what was rewritten.
    """
    return 2 * 2 * 2.0**-11 * sum(report.by_dtype()["float16"].values()) ** 0.5


def placed(concrete: Any) -> dict[str, str]:
    """What kind of device runs the types of operations of a concrete function, with a GPU."""
    graph = reports.of_function(concrete)
    nodes = optimize._placed(graph).graph_def.node
    assert not any(node.device for node in graph.graph_def.node)  # It stays as it is.
    return {node.op: node.device.split(":")[-2] for node in nodes}


def of_function(concrete: Any, device: str) -> Any:
    """Rewrites the graph of a concrete function.

    Args:
        concrete: the concrete function.
        device: str, such as "GPU 7.0".

    Returns:
        A function of the same arguments: the results of the rewritten graph, a flat list.
    """
    rewritten = reports.optimized(reports.of_function(concrete), "float16", device)
    arguments = {node.attr["index"].i: node.name for node in rewritten.node if node.op == "_Arg"}
    results = {node.attr["index"].i: node.name for node in rewritten.node if node.op == "_Retval"}
    definition = for_this_cpu(rewritten)
    imported = V1.wrap_function(lambda: tf.import_graph_def(definition, name=""), [])
    graph = imported.graph
    runs = imported.prune(
        [graph.get_tensor_by_name(f"{arguments[i]}:0") for i in sorted(arguments)],
        (
            [graph.get_tensor_by_name(f"{results[i]}:0") for i in sorted(results)],
            [graph.get_operation_by_name(each.name) for each in concrete.graph.control_outputs],
        ),
    )

    def call(*inputs: tf.Tensor) -> list[tf.Tensor]:
        all_inputs = [*inputs, *concrete.captured_inputs]
        return runs(*(all_inputs[i] for i in sorted(arguments)))[0]

    return call


def update(model: Any, step: Callable[..., Any], *arguments: Any) -> np.ndarray:
    """What a step adds to a model's weights, which are put back."""
    before = model.get_weights()
    step(*arguments)
    after = model.get_weights()
    model.set_weights(before)
    return np.concatenate([np.ravel(new - old) for new, old in zip(after, before, strict=True)])


def for_this_cpu(graph: Any) -> Any:
    """A graph without devices: its operations for the GPU have kernels for CPUs, too."""
    result = V1.GraphDef()
    result.CopyFrom(graph)
    functions = result.library.function
    # This process has functions of these names, as they were traced.
    names = {each.signature.name: f"{each.signature.name}_{next(_COUNT)}" for each in functions}
    for function in functions:
        function.signature.name = names[function.signature.name]
    for nodes in (result.node, *(function.node_def for function in functions)):
        for node in nodes:
            node.device = ""
            for attribute in node.attr.values():
                called = [attribute.func] if attribute.HasField("func") else attribute.list.func
                for each in called:
                    each.name = names.get(each.name, each.name)
            if node.op == "_Arg":
                node.op = "Placeholder"
                node.attr["dtype"].type = node.attr.pop("T").type
                node.attr.pop("index")
            if node.op == "_Retval":
                node.op = "Identity"
                node.attr.pop("index")
    return result
