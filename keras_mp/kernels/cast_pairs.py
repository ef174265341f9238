"""Removes pairs of casts that cancel from a graph.

A pair goes from 16 bits to float32 and back. They stand between two 16-bit operations of a region
and, in the backward pass, between their gradients. A pair loses nothing, so without it only the
time changes. Grappler leaves the pairs in. This module needs TensorFlow only.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from keras_mp.kernels.lower_precision import NAME
from keras_mp.support.dtypes import LOW_PRECISION
from keras_mp.tensorflow_api import graphs


@contextlib.contextmanager
def left_out(graph: tf.Graph) -> Iterator[None]:
    """Context manager in which a graph lacks such pairs.

    Meanwhile a function is made of the graph. Then the pairs are put back, since gradients are
    built from the graph. With the pairs each gradient has the place, and the float32 sum, that it
    has in eager.

    Args:
        graph: FuncGraph.
    """
    replaced = []
    outputs = list(graph.outputs)
    try:
        for op in graph.get_operations():
            original = _undone_by(op)
            if original is None:
                continue
            cast = op.outputs[0]
            for consumer in cast.consumers():
                for index, value in enumerate(consumer.inputs):
                    if value is cast:
                        replaced.append((consumer, index, cast))
                        graphs.update_input(consumer, index, original)
            # The backward pass keeps it. A user's own output has another name, and stays.
            if op.name.rpartition("/")[2].startswith(NAME):
                graph.outputs[:] = [original if each is cast else each for each in graph.outputs]
        yield
    finally:
        for consumer, index, cast in reversed(replaced):
            graphs.update_input(consumer, index, cast)
        graph.outputs[:] = outputs


def _undone_by(op: tf.Operation) -> tf.Tensor | None:
    """Returns the 16-bit tensor that a cast to 16 bits gives back, or None."""
    if op.type != "Cast" or op.control_inputs or op.outputs[0].dtype not in LOW_PRECISION:
        return None
    before = op.inputs[0].op
    if before.type != "Cast" or before.outputs[0].dtype != tf.float32:
        return None
    original = before.inputs[0]
    return original if original.dtype == op.outputs[0].dtype else None
