"""Puts regions in force, after a check that they work with this TensorFlow.

The door (`kernels/door.py`) hands operations in a region over to `kernels/regions.py`. When the
first region of a process is entered, a product is tried in eager and in a function. Where
TensorFlow has moved something, regions refuse to be entered. This module needs TensorFlow only.
"""

import contextlib
from collections.abc import Callable
from concurrent import futures
from typing import Any

import tensorflow as tf

from keras_mp import hooks, kernels
from keras_mp.hooks import Replacement, When, reach
from keras_mp.hooks.once import once
from keras_mp.hooks.reach import Region
from keras_mp.kernels import cast_pairs, lower_precision
from keras_mp.tensorflow_api import graphs
from keras_mp.tensorflow_api.features import FACES


def _without_pairs(original: Callable[..., object]) -> Callable[..., object]:
    """Makes a function of a graph without the casts that cancel."""

    def from_func_graph(name: str, graph: tf.Graph, *args: Any, **kwargs: Any) -> object:
        with cast_pairs.left_out(graph):
            return original(name, graph, *args, **kwargs)

    return from_func_graph


# It always acts: functions that are made later may use tensors that were computed in a region.
_PAIRS = Replacement(graphs.function_of_graph, _without_pairs, When.ALWAYS, FACES)


def entered(region: Region | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that puts a region in force in this thread.

    Where TensorFlow has not got a private name that it needs, the region does nothing.

    Args:
        region: Region, or None, which stops autocasting.

    Raises:
        RuntimeError: regions do not work with this TensorFlow.
    """
    if region is None:
        # Code of others in a region of the program is not ours, a layer's own code is.
        return reach.in_region(None, reach.current() if reach.region() is None else None)
    if not kernels.have_faces():
        return contextlib.nullcontext()
    _install()
    return reach.in_region(region)


@once
def _install() -> None:
    """Installs what regions need, and checks a product before the program's."""
    kernels.install()
    hooks.install([_PAIRS])
    # A new thread has none of the graphs and tapes that this one is in.
    with futures.ThreadPoolExecutor(1) as thread:
        found = thread.submit(_products).result()
    if not all(found.values()):
        raise RuntimeError(
            f"`keras_mp.autocast` does not know TensorFlow {tf.__version__}. The rest of keras_mp "
            "works. Expected a matrix product to run in bfloat16 inside of a region, with right "
            f"gradients, in eager and in a function. Found: {found}"
        )


def _products() -> dict[str, bool]:
    """Returns whether a product and its gradient are right, by where they run."""
    if not tf.executing_eagerly():  # as in a program of TensorFlow 1
        return {}
    x = tf.constant([[3.0]])

    def differentiate() -> tuple[bool, Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.matmul(x, x)
        is_low = lower_precision.low_precision_of(y, tf.bfloat16) is not None
        return is_low and y.dtype == tf.float32, tape.gradient(y, x)

    found = {}
    with reach.in_region(Region(tf.bfloat16)):
        for where, run in (
            ("eager", differentiate),
            ("a function", tf.function(differentiate, autograph=False)),
        ):
            is_low, gradient = run()
            is_right = gradient is not None and gradient.numpy().item() == 6.0
            found[where] = bool(is_low) and is_right
    return found
