"""What the tests of op autocast share."""

import numpy as np
import tensorflow as tf

import keras_mp

HALF = ("bfloat16", "float16")
# Half a unit in the last place, relative.
ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}


def region(dtype, **kwargs):
    """A region; None is one in which nothing is autocast."""
    return keras_mp.autocast(dtype or "bfloat16", enabled=dtype is not None, **kwargs)


def is_rounded(tensor, dtype="bfloat16"):
    """Do 16 bits hold all digits of a float32 tensor?"""
    return bool(tf.reduce_all(tf.cast(tf.cast(tensor, dtype), tf.float32) == tensor))


def normal(*shape, seed=0):
    generator = np.random.default_rng([seed, *shape])
    return tf.constant(generator.normal(size=shape).astype("float32") / 2)


def operations(graph, *types):
    """Types and dtypes of the operations in a graph and the functions that it calls."""
    if hasattr(graph, "as_graph_def"):
        graph = graph.as_graph_def()
    nodes = list(graph.node)
    for function in graph.library.function:
        nodes += function.node_def
    return [
        (node.op, tf.as_dtype(node.attr["T"].type).name)
        for node in nodes
        if node.op in types and node.attr["T"].type
    ]


def casts(function_def):
    """How often a function casts; what nothing needs does not run."""
    nodes = {node.name: node for node in function_def.node_def}
    waiting = [*function_def.ret.values(), *function_def.control_ret.values()]
    needed = set()
    while waiting:
        name = waiting.pop().lstrip("^").partition(":")[0]
        if name in nodes and name not in needed:
            needed.add(name)
            waiting.extend(nodes[name].input)
    return [nodes[name].op for name in needed].count("Cast")
