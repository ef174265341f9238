"""What a tool needs for itself alone: random numbers, functions in eager, variables, metrics.

The program's random numbers are neither drawn nor seeded, and other threads notice nothing.
"""

import contextlib
import functools
import inspect
import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.hooks import wrapped
from keras_mp.models.layer_paths import variables_inside
from keras_mp.support import attributes, messages
from keras_mp.tensorflow_api import operations

# The modules through which random operations are called, and the functions that draw: those of
# numbers, whose distributions no tensor has a part in, and others with a state.
_UNIFORM = [of for name, of in vars(tf.raw_ops).items() if name.endswith(("Uniform", "UniformV2"))]
_MODULES = {sys.modules[draw.__module__] for draw in _UNIFORM}
_NUMBERS = r"[a-z]\w*(uniform|normal)\w*"
_DRAWS = re.compile(rf"(?!\w*(parameterized|fallback))({_NUMBERS}|(rng|stateful)_\w+)")

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

    def own_seed(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *of: (first, next(seeds)) if tf.executing_eagerly() else original(*of)

    get_seed = tf.compat.v1.get_seed
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(wrapped.here(sys.modules[get_seed.__module__], get_seed.__name__, own_seed))
        enter(keras_api.own_seeds(seed))
        for module in _MODULES:
            for name in [n for n in vars(module) if n in _WITHOUT_STATE or _DRAWS.fullmatch(n)]:
                enter(wrapped.here(module, name, functools.partial(_own, name, copy_of)))
        enter(attributes.replaced(thread, "take", lambda drawn: drawn))
        yield


def _own(name: str, copy_of: Callable[[Any], tf.Tensor], original: Draw) -> Draw:
    """Returns a function that draws what nobody else draws.

    Args:
        name: str. That of the function.
        copy_of: returns the copy of a generator, given a reference.
        original: the function.
    """
    signature = inspect.signature(original)

    def draw(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given, function, is_eager = bound.arguments, original, tf.executing_eagerly()
        if hasattr(given.get("resource"), "numpy"):  # of a function that is traced, too
            given["resource"] = copy_of(given["resource"].ref())
        if is_eager and name in _WITHOUT_STATE:
            function = _WITHOUT_STATE[name]
            given["seed"] = given["seed"], given.pop("seed2")
            given = {"lam" if key == "rate" else key: value for key, value in given.items()}
        drawn = function(**given)
        return thread.take(drawn) if is_eager and re.fullmatch(_NUMBERS, name) else drawn

    return draw


def random_numbers_of(model: tf.keras.Model) -> contextlib.AbstractContextManager[None]:
    """Returns `random_numbers`, unless the block will build the model.

    Weights are made as the program would make them.
    """
    return random_numbers() if model.built else contextlib.nullcontext()


def _copy(generator: tf.Tensor) -> tf.Tensor:
    """Returns the handle of a variable with the state of a `tf.random.Generator`."""
    with tf.init_scope():
        return variable(tf.raw_ops.ReadVariableOp(resource=generator, dtype=tf.int64))


def eager_functions() -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which this thread runs functions of `tf.function` in eager.

    Those that TensorFlow makes for itself, as `tf.vectorized_map` does, stay functions.
    """

    def own(function: Any) -> bool:
        module = getattr(function.python_function, "__module__", None) or ""
        return tf.executing_eagerly() and not module.startswith("tensorflow.")

    return wrapped.here(_FUNCTION, "_run_functions_eagerly", lambda of: lambda f: own(f) or of(f))


def without_warnings() -> contextlib.AbstractContextManager[None]:
    """Leaves out keras_mp's warnings of this thread inside of the block.

    Python's own filter, which `warnings.catch_warnings` sets, applies to all threads.
    """
    return wrapped.here(messages, "warn", lambda _: lambda *args: None)


def variable(value: tf.Tensor) -> tf.Tensor:
    """Returns the handle of a new variable, which lives as long as the handle.

    For a Python object, a strategy would make a variable that spans all replicas.

    Args:
        value: the value with which it begins, and whose dtype and shape it has.

    Example:

    >>> from keras_mp.numerics import own_thread
    >>> handle = own_thread.variable(tf.ones([2]))
    >>> tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).numpy().tolist()
    [1.0, 1.0]
    """
    name = operations.anonymous_name()
    handle = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=name)
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return handle


@contextlib.contextmanager
def put_back(layer: Any, others: Iterable[Any] = ()) -> Iterator[None]:
    """Restores variables to the values from before the block, in which no metric is updated.

    Args:
        layer: a layer or model, or what else has `variables`.
        others: more variables.
    """
    is_layer = isinstance(layer, tf.keras.layers.Layer)
    own = variables_inside(layer) if is_layer else getattr(layer, "variables", ())
    before = [(v, v.numpy()) for v in {id(v): v for v in (*own, *others)}.values()]
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
    known = list(getattr(model, "metrics", ()))
    with contextlib.ExitStack() as stack:
        for metric in known:
            ignored = wrapped.here(metric, "update_state", lambda _: lambda *_, **__: None)
            stack.enter_context(ignored)
        try:
            yield
        finally:
            # Metrics of a loss are made when it is first computed.
            for metric in getattr(model, "metrics", ()):
                if metric not in known:
                    metric.reset_state()
