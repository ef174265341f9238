"""The functions of TensorFlow that op autocast replaces: all of them, in one table.

While a region is in force in any thread of the process, the functions of the table replace
TensorFlow's own. When the last region ends, TensorFlow's own are back, so code outside of regions
is unchanged and as fast as before. One hook stays, since functions that are made later may use
tensors that were computed in a region. Threads of replicas also go on inheriting regions.

When the first region is entered, the hooks are checked. Where TensorFlow has moved something,
regions refuse to be entered, and TensorFlow is left as it is. This module needs TensorFlow only.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp import kernels
from keras_mp.op_autocast import cast_pairs, dispatch, lower_precision
from keras_mp.support import features, reach, regions, replica_threads
from keras_mp.support.regions import Region
from keras_mp.tensorflow_api import gradients, graphs, operations
from keras_mp.tensorflow_api.features import REGIONS, VECTORIZED, Feature
from keras_mp.tensorflow_api.names import Name


class _Hook(NamedTuple):
    """A function of TensorFlow that is replaced.

    Attributes:
        name: its name.
        make: function that takes TensorFlow's function and returns ours.
        feature: what is off without it.
    """

    name: Name
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    feature: Feature = REGIONS


def _trace_per_region(own: Callable[..., Any]) -> Callable[..., object]:
    """Makes each region a part of the key of traces, as the device is."""

    def make_function_context(*args: Any, **kwargs: Any) -> object:
        key, region = own(*args, **kwargs), regions.current()
        return key if region is None else key._replace(context=(key.context, region))

    return make_function_context


def _without_region(own: Callable[..., object]) -> Callable[..., object]:
    """Runs the backward pass in the dtypes of the forward pass: nothing of it is cast anew."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> object:
        with regions.none():
            return own(*args, **kwargs)

    return call


def _with_gradient_as_forward(own: Callable[..., object]) -> Callable[..., object]:
    """Runs a user's gradient function in the region of its forward pass.

    `tf.recompute_grad` computes the forward pass again in one.
    """

    def call(
        function: Callable[..., tuple[object, Callable[..., object]]],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> object:
        region = regions.current()

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> tuple[object, Callable[..., object]]:
            result, gradient = function(*args, **kwargs)

            def backward(*args: Any, **kwargs: Any) -> object:
                with entered(region):
                    return gradient(*args, **kwargs)

            # TensorFlow asks whether it has `variables`.
            backward.__signature__ = inspect.signature(gradient)  # pyright: ignore
            return result, backward

        return own(forward, args, kwargs)

    return call


def _without_pairs(own: Callable[..., object]) -> Callable[..., object]:
    """Makes a function of a graph without the casts that cancel."""

    @functools.wraps(own)
    def from_func_graph(name: str, graph: tf.Graph, *args: Any, **kwargs: Any) -> object:
        with cast_pairs.left_out(graph):
            return own(name, graph, *args, **kwargs)

    return from_func_graph


_HOOKS = (
    _Hook(operations.run_in_eager, dispatch.in_eager),
    _Hook(operations.make_in_graph, dispatch.in_graph),
    _Hook(gradients.record_in_graph, dispatch.on_tape),
    _Hook(graphs.key_of_trace, _trace_per_region),
    _Hook(gradients.of_tape, _without_region),
    _Hook(gradients.of_graph, _without_region),
    _Hook(gradients.vectorize, _without_region, VECTORIZED),
    _Hook(gradients.custom_in_eager, _with_gradient_as_forward),
    _Hook(gradients.custom_in_graph, _with_gradient_as_forward),
)
_PERMANENT = _Hook(graphs.function_of_graph, _without_pairs)


class _State:
    """Whether the hooks were checked in this process, and how many regions are in force in it."""

    is_checked = False
    open_regions = 0


_lock = threading.RLock()
# TensorFlow's functions by ours.
_own: dict[Callable[..., object], Callable[..., object]] = {}
# Where ours are, and functions that other code has put around them.
_placed: set[_Hook] = set()
_around: dict[_Hook, Callable[..., object]] = {}


@contextlib.contextmanager
def entered(region: Region | None) -> Iterator[None]:
    """Context manager that puts a region in force in this thread, and installs the hooks.

    Where TensorFlow has not got a function that is replaced, the region does nothing.

    Args:
        region: Region, or None, which stops autocasting and needs no hooks.

    Raises:
        RuntimeError: this TensorFlow is not one that the hooks know.
    """
    if region is None:
        # Code of others in a region of the program is not ours, a layer's own code is.
        dtype = reach.current() if regions.current() is None else None
        with regions.none(), reach.entered(dtype):
            yield
        return
    if not features.is_on(REGIONS):
        yield
        return
    with _lock:
        if not _State.is_checked:
            _check()
        _count_regions(1)
    try:
        with regions.in_force(region), reach.entered(region.dtype):
            yield
    finally:
        with _lock:
            _count_regions(-1)


def _count_regions(change: int) -> None:
    """Counts the regions in force, and has the hooks in place while there are any."""
    was_open = _State.open_regions > 0
    _State.open_regions += change
    is_open = _State.open_regions > 0
    if is_open != was_open:
        for hook in _HOOKS:
            if features.is_on(hook.feature):
                (_put if is_open else _take_back)(hook)


@functools.cache
def _replacement(hook: _Hook, own: Callable[..., Any]) -> Callable[..., Any]:
    replacement = hook.make(own)
    _own[replacement] = own
    return replacement


def _put(hook: _Hook) -> None:
    function = hook.name.get()
    if not _has_ours(hook, function):
        hook.name.set(_replacement(hook, function))
        _placed.add(hook)


def _take_back(hook: _Hook) -> None:
    function = hook.name.get()
    if function in _own:
        hook.name.set(_own[function])
        _placed.discard(hook)
    elif hook in _placed and function not in _own.values():
        # Other code has put a function of its own around it meanwhile, and both stay.
        _around[hook] = function


def _has_ours(hook: _Hook, function: Any) -> bool:
    """Whether a function is ours, or one of other code around ours."""
    while function is not None:
        if function in _own or function is _around.get(hook):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _check() -> None:
    """Checks a product in each mode, before one of the program's is autocast."""
    runs_eagerly = tf.config.functions_run_eagerly()
    # Below the hooks of regions, which leave when the last region ends.
    kernels.install()
    try:
        _put(_PERMANENT)
        _count_regions(1)
        tf.config.run_functions_eagerly(False)  # Functions are checked, too.
        try:
            # A new thread has none of the graphs and tapes that this one is in.
            with futures.ThreadPoolExecutor(1) as thread:
                thread.submit(_expect_all).result()
        finally:
            tf.config.run_functions_eagerly(runs_eagerly)
            _count_regions(-1)
    except Exception as error:
        _take_back(_PERMANENT)
        raise RuntimeError(
            f"`keras_mp.autocast` does not know TensorFlow {tf.__version__}, and has left it as it "
            "is. The rest of keras_mp works. Expected a matrix product to run in bfloat16 inside "
            f"of a region, with right gradients. Found: {error!r}"
        ) from error
    replica_threads.inherit(regions.current, entered)
    _State.is_checked = True


_TRIAL = Region(tf.bfloat16)
_X, _GRADIENTS = 3.0, [6.0, 1.0]


def _expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise AssertionError(what)


def _expect_all() -> None:
    if tf.executing_eagerly():
        x = tf.constant([[_X]])
        differentiate = functools.partial(_gradients, where="in a function")
        function = tf.function(differentiate, autograph=False)
        results = [function(x)]
        with regions.in_force(_TRIAL):
            results += [_gradients(x, "in eager"), function(x)]
            nodes = function.get_concrete_function(x).function_def.node_def
        values = [[gradient.numpy().item() for gradient in result] for result in results]
        _expect(values == [_GRADIENTS] * 3, "a wrong gradient")
        traces = function.experimental_get_tracing_count()
        _expect(traces == 2, f"{traces} traces of a function that was called inside and outside")
        casts = {f"{node.name}:y:0" for node in nodes if node.op == "Cast"}
        relus = [node for node in nodes if node.op == "Relu"]
        _expect(len(relus) == 1 and relus[0].input[0] not in casts, "a cast that nothing needs")
    with tf.Graph().as_default(), regions.in_force(_TRIAL):
        _gradients(tf.constant([[_X]]), "in a graph")


def _gradients(x: tf.Tensor, where: str) -> Sequence[Any]:
    """Differentiates a product, which has to be one in 16 bits if this is a region."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        product = tf.matmul(x, x)
        result = tf.nn.relu(product)
    differentiate = tf.gradients if where == "in a graph" else tape.gradient
    found = differentiate(result, [x, product])
    if regions.current() is not None:
        _expect(product.dtype == tf.float32, f"a result other than float32, {where}")
        for each, op in ((product, "product"), (result, "Relu of it")):
            computed = lower_precision.low_precision_of(each, tf.bfloat16)
            _expect(computed is not None, f"a float32 {op}, {where}")
        _expect(all(each is not None for each in found), f"no gradient, {where}")
    return found
