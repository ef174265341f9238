"""Tells the graphs of traces, branches and loops from one another.

This module needs TensorFlow only.
"""

import functools
from concurrent import futures
from typing import Any

import tensorflow as tf


def is_of_function(graph: object) -> bool:
    """Whether a graph is that of a function, a branch or a loop.

    Args:
        graph: any graph, or None.
    """
    return hasattr(graph, "outer_graph")


def is_trace(graph: object) -> bool:
    """Whether a graph is the trace of a `tf.function` or of a dataset.

    Branches and loops are no traces.

    Args:
        graph: any graph, or None.
    """
    return type(graph) is _classes()[0]


def is_branch(graph: object) -> bool:
    """Whether a graph is a branch, which runs once where it is built.

    A loop runs more often.

    Args:
        graph: any graph, or None.
    """
    return isinstance(graph, _classes()[1])


def graphs_of_branches(graph: tf.Graph) -> list[tf.Graph]:
    """Returns a graph, preceded by the graphs around it if it is a branch.

    The outermost graph comes first. A graph that is no branch of a condition comes alone. Each of
    them runs once where the others do.
    """
    graphs: list[Any] = [graph]
    while is_branch(graphs[0]):
        graphs.insert(0, graphs[0].outer_graph)
    return graphs


@functools.cache
def _classes() -> tuple[type, type]:
    """Finds the classes of the graphs of a trace and of a branch, by tracing once."""
    found = []

    def note(x: tf.Tensor) -> tf.Tensor:
        found.append(type(tf.compat.v1.get_default_graph()))
        return x

    def call(x: tf.Tensor) -> tf.Tensor:
        return tf.cond(note(x), lambda: note(x), lambda: note(x))

    trial = tf.function(call, autograph=False)
    # A new thread is in no graph, strategy or tape.
    with futures.ThreadPoolExecutor(1) as thread:
        thread.submit(trial.get_concrete_function, tf.TensorSpec([], tf.bool)).result()
    return found[0], found[1]
