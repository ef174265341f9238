"""The graphs of functions: which is that of a trace, and which that of a branch or a loop.

This module needs TensorFlow only.
"""

import functools
from concurrent import futures

import tensorflow as tf


def is_of_function(graph: object) -> bool:
    """Whether a graph is that of a function, a branch or a loop.

    Args:
        graph: any graph, or None.
    """
    return hasattr(graph, "outer_graph")


def is_trace(graph: object) -> bool:
    """Whether a graph is the trace of a `tf.function` or of a dataset: no branch and no loop.

    Args:
        graph: any graph, or None.
    """
    return type(graph) is _classes()[0]


def is_branch(graph: object) -> bool:
    """Whether a graph is a branch, which runs once where it is built; a loop runs more often.

    Args:
        graph: any graph, or None.
    """
    return isinstance(graph, _classes()[1])


@functools.cache
def _classes() -> tuple[type, type]:
    """Returns the classes of the graphs of a trace and of a branch, which a trial shows."""
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
