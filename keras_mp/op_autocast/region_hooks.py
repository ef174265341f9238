"""All functions of TensorFlow that op autocast replaces, in one table.

They act in the threads in which a region is in force, and are TensorFlow's own everywhere else. One
of them always acts, since functions that are made later may use tensors that were computed in a
region.

When the first region is entered, they are checked. Where TensorFlow has moved something, regions
refuse to be entered, and TensorFlow is left as it is. This module needs TensorFlow only.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import tensorflow as tf

from keras_mp import hooks, kernels
from keras_mp.hooks import Replacement, When, reach, replica_threads
from keras_mp.hooks.reach import Region
from keras_mp.op_autocast import cast_pairs, dispatch, lower_precision, promotion
from keras_mp.support import features
from keras_mp.tensorflow_api import gradients, graphs, operations
from keras_mp.tensorflow_api.features import REGIONS, VECTORIZED


def _trace_per_region(original: Callable[..., Any]) -> Callable[..., object]:
    """Makes each region a part of the key of traces, as the device is."""

    def make_function_context(*args: Any, **kwargs: Any) -> object:
        key = original(*args, **kwargs)
        return key._replace(context=(key.context, reach.region()))

    return make_function_context


def _without_region(original: Callable[..., object]) -> Callable[..., object]:
    """Runs the backward pass in the dtypes of the forward pass.

    Nothing of it is cast anew.
    """

    def call(*args: Any, **kwargs: Any) -> object:
        with reach.without_region():
            return original(*args, **kwargs)

    return call


def _with_gradient_as_forward(original: Callable[..., object]) -> Callable[..., object]:
    """Runs a user's gradient function in the region of its forward pass.

    `tf.recompute_grad` computes the forward pass again in one.
    """

    def call(
        function: Callable[..., tuple[object, Callable[..., object]]],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> object:
        region = reach.region()

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> tuple[object, Callable[..., object]]:
            result, gradient = function(*args, **kwargs)

            def backward(*args: Any, **kwargs: Any) -> object:
                with entered(region):
                    return gradient(*args, **kwargs)

            # TensorFlow asks whether it has `variables`.
            backward.__signature__ = inspect.signature(gradient)  # pyright: ignore
            return result, backward

        return original(forward, args, kwargs)

    return call


def _without_pairs(original: Callable[..., object]) -> Callable[..., object]:
    """Makes a function of a graph without the casts that cancel."""

    def from_func_graph(name: str, graph: tf.Graph, *args: Any, **kwargs: Any) -> object:
        with cast_pairs.left_out(graph):
            return original(name, graph, *args, **kwargs)

    return from_func_graph


def _rows() -> Iterator[Replacement]:
    for name, make, feature in (
        (operations.run_in_eager, dispatch.in_eager, REGIONS),
        (operations.make_in_graph, dispatch.in_graph, REGIONS),
        (gradients.record_in_graph, dispatch.on_tape, REGIONS),
        (graphs.key_of_trace, _trace_per_region, REGIONS),
        (gradients.of_tape, _without_region, REGIONS),
        (gradients.of_graph, _without_region, REGIONS),
        (gradients.vectorize, _without_region, VECTORIZED),
        (gradients.custom_in_eager, _with_gradient_as_forward, REGIONS),
        (gradients.custom_in_graph, _with_gradient_as_forward, REGIONS),
    ):
        yield Replacement(name, make, When.IN_A_REGION, feature)
    yield Replacement(graphs.function_of_graph, _without_pairs, When.ALWAYS, REGIONS)


REPLACEMENTS = tuple(_rows())


class _State:
    """Whether the functions were checked in this process."""

    is_checked = False


# The check runs in another thread, which must not wait for the lock of `hooks`.
_lock = threading.Lock()


def entered(region: Region | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that puts a region in force in this thread.

    Where TensorFlow has not got a function that is replaced, the region does nothing.

    Args:
        region: Region, or None, which stops autocasting and replaces nothing.

    Raises:
        RuntimeError: this TensorFlow is not one that the functions know.
    """
    if region is None:
        # Code of others in a region of the program is not ours, a layer's own code is.
        return reach.in_region(None, reach.current() if reach.region() is None else None)
    if not features.is_on(REGIONS):
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
        hooks.install([*REPLACEMENTS, replica_threads.REACH])
        tf.config.run_functions_eagerly(False)  # Functions are checked, too.
        try:
            # A new thread has none of the graphs and tapes that this one is in.
            with futures.ThreadPoolExecutor(1) as thread:
                thread.submit(_expect_all_unmended).result()
        finally:
            tf.config.run_functions_eagerly(runs_eagerly)
    except Exception as error:
        hooks.uninstall(REPLACEMENTS)
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
