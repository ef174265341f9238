"""What a tool needs for itself alone: random numbers, functions in eager, variables, metrics.

The program's random numbers are neither drawn nor seeded, and other threads notice nothing.
"""

import contextlib
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.hooks import wrapped
from keras_mp.models.layer_paths import variables_inside
from keras_mp.support import attributes
from keras_mp.tensorflow_api import operations

# The modules through which random operations are called, and the names of those that draw.
_WITH_STATE, _OF_GENERATORS, *_OF_SEEDS = (
    sys.modules[draw.__module__]
    for draw in (
        *(tf.raw_ops.RandomUniform, tf.raw_ops.StatefulUniform),
        *(tf.raw_ops.StatelessRandomUniform, tf.raw_ops.StatelessRandomUniformV2),
    )
)
_DISTRIBUTIONS = ("uniform", "normal")

# A kernel of these operations goes on from call to call with the same seed, for all threads. The
# others, which take the seed alone, have the same arguments.
_WITHOUT_STATE = {
    "multinomial": tf.raw_ops.StatelessMultinomial,
    "random_gamma": tf.raw_ops.StatelessRandomGammaV2,
    "random_poisson_v2": tf.raw_ops.StatelessRandomPoisson,
    "random_standard_normal": tf.raw_ops.StatelessRandomNormal,
    "random_uniform": tf.raw_ops.StatelessRandomUniform,
    "random_uniform_int": tf.raw_ops.StatelessRandomUniformInt,
    "truncated_normal": tf.raw_ops.StatelessTruncatedNormal,
}
_RENAMED = {"rate": "lam"}

# The class of what `tf.function` returns.
_FUNCTION = type(tf.function(len))

Draw = Callable[..., tf.Tensor]


# In a thread with random numbers of its own, `take` is a function that is called with the numbers
# that are drawn in eager; what it returns takes their place.
thread = threading.local()


@contextlib.contextmanager
def random_numbers(seed: int = 0) -> Iterator[None]:
    """Gives the block random numbers of its own, as if nobody had drawn any before.

    Args:
        seed: int. The same seed gives the same numbers.
    """
    if hasattr(thread, "take"):
        yield
        return
    seeds = itertools.count(1)
    # TensorFlow takes 31 bits.
    first = (seed + 0x5EED) % 2**31
    copy_of = functools.cache(lambda reference: _copy(reference.deref()))

    def get_seed(original: Callable[..., Any]) -> Callable[..., Any]:
        def get(op_seed: int | None) -> tuple[int | None, int | None]:
            return (first, next(seeds)) if tf.executing_eagerly() else original(op_seed)

        return get

    def with_copy(original: Draw) -> Draw:
        def draw(resource: Any, *args: Any, **kwargs: Any) -> Any:
            if hasattr(resource, "numpy"):
                resource = copy_of(resource.ref())
            return original(resource, *args, **kwargs)

        return draw

    def shown(original: Draw) -> Draw:
        def draw(*args: Any, **kwargs: Any) -> tf.Tensor:
            drawn = original(*args, **kwargs)
            return thread.take(drawn) if tf.executing_eagerly() else drawn

        return draw

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        public = tf.compat.v1.get_seed
        enter(wrapped.here(sys.modules[public.__module__], public.__name__, get_seed))
        for name, stateless in _WITHOUT_STATE.items():
            wrap = functools.partial(_without_state, stateless)
            enter(wrapped.here(_WITH_STATE, name, wrap))
        for name in list(vars(_OF_GENERATORS)):
            if name.startswith(("stateful_", "rng_")) and "fallback" not in name:
                enter(wrapped.here(_OF_GENERATORS, name, with_copy))
        enter(keras_api.own_seeds(seed))
        for module in (_WITH_STATE, _OF_GENERATORS, *_OF_SEEDS):
            for name in filter(_draws, list(vars(module))):
                enter(wrapped.here(module, name, shown))
        enter(attributes.replaced(thread, "take", lambda drawn: drawn))
        yield


def random_numbers_of(model: tf.keras.Model) -> contextlib.AbstractContextManager[None]:
    """Returns `random_numbers`, unless the block will build the model.

    Weights are made as the program would make them.
    """
    return random_numbers() if model.built else contextlib.nullcontext()


def _copy(generator: tf.Tensor) -> tf.Tensor:
    """Returns the handle of a variable with the state of a `tf.random.Generator`."""
    with tf.init_scope():
        state = tf.raw_ops.ReadVariableOp(resource=generator, dtype=tf.int64)
        copy = variable(state.dtype, state.shape)
        tf.raw_ops.AssignVariableOp(resource=copy, value=state)
    return copy


def _without_state(stateless: Draw, original: Draw) -> Draw:
    signature = inspect.signature(original)

    def draw(*args: Any, **kwargs: Any) -> tf.Tensor:
        if not tf.executing_eagerly():
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {_RENAMED.get(key, key): value for key, value in bound.arguments.items()}
        seed = [arguments.pop("seed"), arguments.pop("seed2")]
        return stateless(**arguments, seed=seed)

    return draw


def _draws(name: str) -> bool:
    is_one_of_them = any(distribution in name for distribution in _DISTRIBUTIONS)
    is_plain = not name.startswith("_") and "parameterized" not in name
    return is_one_of_them and is_plain and not name.endswith("fallback")


def eager_functions() -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which this thread runs functions of `tf.function` in eager.

    Those that TensorFlow makes for itself, as `tf.vectorized_map` does, stay functions.
    """

    def runs_eagerly(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def runs(function: Any) -> bool:
            module = getattr(function.python_function, "__module__", None) or ""
            is_users = not module.startswith("tensorflow.")
            return original(function) or (is_users and tf.executing_eagerly())

        return runs

    return wrapped.here(_FUNCTION, "_run_functions_eagerly", runs_eagerly)


def variable(dtype: tf.DType, shape: tf.TensorShape | list[int]) -> tf.Tensor:
    """Returns the handle of a new variable, which lives as long as the handle.

    For a Python object, a strategy would make a variable that spans all replicas.

    Args:
        dtype: the dtype of the variable.
        shape: the shape of the variable.

    Example:

    >>> from keras_mp.numerics import own_thread
    >>> handle = own_thread.variable(tf.float32, [2])
    >>> tf.raw_ops.AssignVariableOp(resource=handle, value=tf.ones([2]))
    >>> tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).numpy().tolist()
    [1.0, 1.0]
    """
    name = operations.anonymous_name()
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)


@contextlib.contextmanager
def put_back(layer: Any, others: Iterable[Any] = ()) -> Iterator[None]:
    """Restores variables to the values from before the block, in which no metric is updated.

    Args:
        layer: a layer or model, or what else has `variables`.
        others: more variables.
    """
    is_layer = isinstance(layer, tf.keras.layers.Layer)
    own = variables_inside(layer) if is_layer else getattr(layer, "variables", ())
    variables = {id(variable): variable for variable in (*own, *others)}.values()
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        with without_metrics(layer):
            yield
    finally:
        for variable, value in before:
            if not np.array_equal(variable.numpy(), value, equal_nan=value.dtype.kind == "f"):
                variable.assign(value)


@contextlib.contextmanager
def without_metrics(model: Any) -> Iterator[None]:
    """Keeps this thread from updating the metrics of a model or layer, inside of the block.

    Computing the loss that a model is compiled with updates some metrics. If they belong to a
    strategy with several replicas, that fails outside of a replica.
    """
    metrics = list(getattr(model, "metrics", ()))
    try:
        with contextlib.ExitStack() as stack:
            for metric in metrics:
                ignored = wrapped.here(metric, "update_state", lambda _: lambda *_, **__: None)
                stack.enter_context(ignored)
            yield
    finally:
        # Metrics of a loss are made when it is first computed.
        known = {id(metric) for metric in metrics}
        for metric in getattr(model, "metrics", ()):
            if id(metric) not in known:
                metric.reset_state()
