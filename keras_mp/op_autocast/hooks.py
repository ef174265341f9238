"""Where op autocast takes hold of TensorFlow: all of it, in one table.

While a region is in force anywhere in the process, the functions of the table stand in the place of
TensorFlow's own; when the last region ends, TensorFlow's own are back. So code outside of a region
is what it was, and as quick. One hook stays: functions that are made later may have to do with what
was computed in a region.

The first time, each hook is tried out. Where TensorFlow has moved something, regions refuse to be
entered, and TensorFlow is left as it is. This module needs TensorFlow only.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python import pywrap_tfe as _pywrap_tfe
from tensorflow.python.eager import execute as _execute
from tensorflow.python.eager import imperative_grad as _imperative_grad
from tensorflow.python.eager.polymorphic_function import atomic_function as _atomic_function
from tensorflow.python.eager.polymorphic_function import function_context as _function_context
from tensorflow.python.framework import op_def_library as _op_def_library
from tensorflow.python.ops import custom_gradient as _custom_gradient
from tensorflow.python.ops import gradients_util as _gradients_util
from tensorflow.python.ops.parallel_for import pfor as _pfor

from keras_mp import kernels
from keras_mp.op_autocast import cast_pairs, operations, visible
from keras_mp.support import regions
from keras_mp.support.regions import Region
from keras_mp.support.replica_threads import ReplicaThread


class _Hook(NamedTuple):
    """Something of TensorFlow's that is replaced.

    Attributes:
        owner: module or class.
        name: of the function in it.
        make: takes TensorFlow's function and returns what stands in its place.
    """

    owner: Any
    name: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]


def _key(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function is traced for each region, as it is for each device."""

    def make_function_context(*args: Any, **kwargs: Any) -> Any:
        key, region = own(*args, **kwargs), regions.current()
        return key if region is None else key._replace(context=(key.context, region))

    return make_function_context


def _without_region(own: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass runs in the dtypes of the forward pass; nothing of it is cast anew."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        with regions.none():
            return own(*args, **kwargs)

    return call


def _with_gradient_as_forward(own: Callable[..., Any]) -> Callable[..., Any]:
    """A gradient function of the user's runs in the region of its forward pass.

    `tf.recompute_grad` computes the forward pass again in one.
    """

    def call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        region = regions.current()

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            result, gradient = function(*args, **kwargs)

            def backward(*args: Any, **kwargs: Any) -> Any:
                with entered(region):
                    return gradient(*args, **kwargs)

            # TensorFlow looks whether the signature has `variables`, and looks through this.
            return result, tf.__internal__.decorator.make_decorator(gradient, backward)

        return own(forward, args, kwargs)

    return call


def _in_threads_region(own: Callable[..., Any]) -> Callable[..., Any]:
    """A replica's thread runs in the region in which the thread was made."""

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        run, region = self.run, regions.current()

        def run_in_region() -> None:
            with entered(region):
                run()

        self.run = run_in_region

    return init


def _without_pairs(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function is made of a graph without the casts that cancel."""

    @functools.wraps(own)
    def from_func_graph(name: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        with cast_pairs.left_out(graph):
            return own(name, graph, *args, **kwargs)

    return from_func_graph


_HOOKS = (
    _Hook(_pywrap_tfe, "TFE_Py_FastPathExecute", operations.in_eager),
    _Hook(_op_def_library, "_apply_op_helper", operations.in_graph),
    _Hook(_execute, "record_gradient", operations.on_tape),
    _Hook(_function_context, "make_function_context", _key),
    _Hook(_imperative_grad, "imperative_grad", _without_region),
    _Hook(_gradients_util, "_GradientsHelper", _without_region),
    _Hook(_pfor.PFor, "convert", _without_region),
    _Hook(_custom_gradient, "_eager_mode_decorator", _with_gradient_as_forward),
    _Hook(_custom_gradient, "_graph_mode_decorator", _with_gradient_as_forward),
    _Hook(ReplicaThread, "__init__", _in_threads_region),
)
_LASTING = _Hook(_atomic_function, "from_func_graph", _without_pairs)


class _State:
    """Of this process."""

    is_tried_out = False
    open_regions = 0


_lock = threading.RLock()
# What stands in the place of what, so that it is made once.
_made: dict[_Hook, tuple[Any, Any]] = {}


@contextlib.contextmanager
def entered(region: Region | None) -> Iterator[None]:
    """Puts a region in force in this thread, and the hooks with it.

    Args:
        region: Region, or None, which stops autocasting and needs no hooks.

    Raises:
        RuntimeError: this TensorFlow is not one that the hooks know.
    """
    if region is None:
        with regions.none():
            yield
        return
    with _lock:
        if not _State.is_tried_out:
            _try_out()
        _open()
    try:
        with regions.entered(region):
            yield
    finally:
        with _lock:
            _close()


def _open() -> None:
    _State.open_regions += 1
    if _State.open_regions == 1:
        for hook in _HOOKS:
            _put(hook)


def _close() -> None:
    _State.open_regions -= 1
    if _State.open_regions == 0:
        for hook in _HOOKS:
            _take_back(hook)


def _put(hook: _Hook) -> None:
    own = getattr(hook.owner, hook.name)
    known, ours = _made.get(hook, (None, None))
    if own is ours:
        return
    if own is not known:
        ours = hook.make(own)
        _made[hook] = own, ours
    setattr(hook.owner, hook.name, ours)


def _take_back(hook: _Hook) -> None:
    own, ours = _made.get(hook, (None, None))
    # Somebody may have put a function of theirs around it meanwhile.
    if ours is not None and getattr(hook.owner, hook.name) is ours:
        setattr(hook.owner, hook.name, own)


def _try_out() -> None:
    """Looks at one product in each mode, before a user's is autocast."""
    runs_eagerly = tf.config.functions_run_eagerly()
    try:
        _put(_LASTING)
        _open()
        tf.config.run_functions_eagerly(False)  # Functions are what is tried, too.
        try:
            # In a thread there is nothing of what the user is in the middle of: graphs, tapes.
            with futures.ThreadPoolExecutor(1) as thread:
                thread.submit(_expect_all).result()
        finally:
            tf.config.run_functions_eagerly(runs_eagerly)
            _close()
    except Exception as error:
        _take_back(_LASTING)
        raise RuntimeError(
            f"`keras_mp.autocast` does not know TensorFlow {tf.__version__}, and has left it as it "
            "is. The rest of keras_mp works. Expected a matrix product to run in bfloat16 inside "
            f"of a region, with right gradients. Found: {error!r}"
        ) from error
    kernels.install()
    _State.is_tried_out = True


_TRIAL = Region(tf.bfloat16)


def _expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise AssertionError(what)


def _expect_all() -> None:
    if tf.executing_eagerly():
        _expect_in_eager()
        _expect_in_functions()
    _expect_in_graphs()


def _expect_in_eager() -> None:
    x = tf.constant([[3.0]])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        with regions.entered(_TRIAL):
            product = tf.matmul(x, x)
            result = tf.nn.relu(product)
    narrow = visible.origin(product).narrow
    _expect(product.dtype == tf.float32, "a visible dtype other than float32, in eager")
    _expect(narrow is not None and narrow.dtype == tf.bfloat16, "a float32 product, in eager")
    _expect(visible.origin(result).narrow is not None, "a float32 Relu of it, in eager")
    for source, expected in ((x, 6.0), (product, 1.0)):
        gradient = tape.gradient(result, source)
        _expect(
            gradient is not None and gradient.numpy().item() == expected,
            "a wrong gradient, in eager",
        )


def _expect_in_functions() -> None:
    @tf.function(autograph=False)
    def function(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = tf.nn.relu(tf.matmul(x, x))
        return tape.gradient(result, x)

    x = tf.constant([[3.0]])
    outside = function(x)
    with regions.entered(_TRIAL):
        inside = function(x)
        concrete = function.get_concrete_function(x)
    _expect(
        outside.numpy().item() == inside.numpy().item() == 6.0, "a wrong gradient, in a function"
    )
    traces = function.experimental_get_tracing_count()
    _expect(traces == 2, f"{traces} traces of a function that was called inside and outside")
    nodes = concrete.function_def.node_def
    products = [node for node in nodes if node.op == "MatMul"]
    half = tf.bfloat16.as_datatype_enum
    _expect(
        all(node.attr["T"].type == half for node in products), "a float32 product, in a function"
    )
    casts = {f"{node.name}:y:0" for node in nodes if node.op == "Cast"}
    relus = [node for node in nodes if node.op == "Relu"]
    _expect(len(relus) == 1 and relus[0].input[0] not in casts, "a cast that nothing needs")


def _expect_in_graphs() -> None:
    with tf.Graph().as_default(), regions.entered(_TRIAL):
        x = tf.constant([[3.0]])
        product = tf.matmul(x, x)
        source = product.op.inputs[0]
        (gradient,) = tf.gradients(tf.nn.relu(product), [product])
    _expect(product.dtype == tf.float32, "a visible dtype other than float32, in a graph")
    _expect(source.dtype == tf.bfloat16, "a float32 product, in a graph")
    _expect(gradient is not None, "no gradient, in a graph")
