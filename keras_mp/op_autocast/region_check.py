"""Puts regions in force, after a check that they work with this TensorFlow.

The door (`kernels/door.py`) hands operations in a region over to `kernels/regions.py`. When the
first region of a process is entered, a product is tried in each mode. Where TensorFlow has moved
something, regions refuse to be entered. This module needs TensorFlow only.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import tensorflow as tf

from keras_mp import hooks, kernels
from keras_mp.hooks import Replacement, When, reach
from keras_mp.hooks.reach import Region
from keras_mp.kernels import cast_pairs, lower_precision
from keras_mp.op_autocast import promotion
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


class _State:
    """Whether regions were checked in this process."""

    is_checked = False


# The check runs in another thread, which must not wait for the lock of `hooks`.
_lock = threading.Lock()


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
    if not _State.is_checked:
        with _lock:
            if not _State.is_checked:
                _check()
    return reach.in_region(region)


def _check() -> None:
    """Checks a product in each mode, before one of the program's is autocast."""
    runs_eagerly = tf.config.functions_run_eagerly()
    kernels.install()
    try:
        hooks.install([_PAIRS])
        tf.config.run_functions_eagerly(False)  # Functions are checked, too.
        try:
            # A new thread has none of the graphs and tapes that this one is in.
            with futures.ThreadPoolExecutor(1) as thread:
                thread.submit(_expect_all_unmended).result()
        finally:
            tf.config.run_functions_eagerly(runs_eagerly)
    except Exception as error:
        hooks.uninstall([_PAIRS])
        raise RuntimeError(
            f"`keras_mp.autocast` does not know TensorFlow {tf.__version__}, and has left it as it "
            "is. The rest of keras_mp works. Expected a matrix product to run in bfloat16 inside "
            f"of a region, with right gradients. Found: {error!r}"
        ) from error
    _State.is_checked = True


_TRIAL = Region(tf.bfloat16)
_X, _GRADIENTS = 3.0, [6.0, 1.0]


def _expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise AssertionError(what)


def _expect_all_unmended() -> None:
    with promotion.refused():
        _expect_all()


def _expect_all() -> None:
    if tf.executing_eagerly():
        x = tf.constant([[_X]])
        differentiate = functools.partial(_gradients, where="in a function")
        function = tf.function(differentiate, autograph=False)
        # In the reach of a region, and without one.
        with reach.entered(_TRIAL.dtype):
            results = [function(x)]
        with reach.in_region(_TRIAL):
            results += [_gradients(x, "in eager"), function(x)]
            nodes = function.get_concrete_function(x).function_def.node_def
        values = [[gradient.numpy().item() for gradient in result] for result in results]
        _expect(values == [_GRADIENTS] * 3, "a wrong gradient")
        traces = function.experimental_get_tracing_count()
        _expect(traces == 2, f"{traces} traces of a function that was called inside and outside")
        # A product that is slow in 16 bits is in float32 with a cast of its own.
        casts = {f"{node.name}:y:0": node.input[0] for node in nodes if node.op == "Cast"}
        relus = [node for node in nodes if node.op == "Relu"]
        is_pair = len(relus) != 1 or casts.get(relus[0].input[0]) in casts
        _expect(not is_pair, "a cast that nothing needs")
    with tf.Graph().as_default(), reach.in_region(_TRIAL):
        _gradients(tf.constant([[_X]]), "in a graph")


def _gradients(x: tf.Tensor, where: str) -> Sequence[Any]:
    """Differentiates a product, which has to be one in 16 bits if this is a region."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        product = tf.matmul(x, x)
        result = tf.nn.relu(product)
    differentiate = tf.gradients if where == "in a graph" else tape.gradient
    found = differentiate(result, [x, product])
    if reach.region() is not None:
        _expect(product.dtype == tf.float32, f"a result other than float32, {where}")
        for each, op in ((product, "product"), (result, "Relu of it")):
            computed = lower_precision.low_precision_of(each, tf.bfloat16)
            _expect(computed is not None, f"a float32 {op}, {where}")
        _expect(all(each is not None for each in found), f"no gradient, {where}")
    return found
