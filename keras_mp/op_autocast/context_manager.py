"""`keras_mp.autocast`, a region in which any code runs in mixed precision.

This module needs TensorFlow only.
"""

import contextlib
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp import hardware, hooks, kernels
from keras_mp.hooks import Replacement, When, reach
from keras_mp.hooks.once import once
from keras_mp.hooks.reach import Region
from keras_mp.kernels import (
    cast_pairs,
    cast_policy,
    known_operations,
    lower_precision,
    regions,
    sums,
    trials,
)
from keras_mp.support import dtypes, messages, validation
from keras_mp.tensorflow_api import graphs, operations
from keras_mp.tensorflow_api.features import FACES


class autocast(contextlib.ContextDecorator):
    """Runs products and convolutions in 16 bits, and what follows where it is sound.

    A context manager, and a decorator. The code inside is float32 code, and stays so: it sees
    float32 tensors only, so nothing that it does can meet another dtype. Weights, optimizers and
    files are float32, too. Operations cast their inputs, and their results are cast back; where one
    16-bit operation follows another, no cast is left in a graph. `docs/autocast.md` has the
    operations.

    The backward pass runs in the dtypes of the forward pass, wherever gradients are computed. A
    `tf.function` has a trace for each region that it is called in, and keeps the one for outside.
    Regions nest, and are their thread's own; replicas of `tf.distribute` inherit them. Tensors that
    are not float32 are left alone. If a 16-bit one meets float32 ones, it is cast to float32, and
    there is no dtype error.

    With float16, gradients need loss scaling: `keras_mp.LossScaleOptimizer` or another one.

    Args:
        dtype: DType or str, "bfloat16" or "float16". None (the default) takes what is fast on this
            machine, as `keras_mp.hardware.best_policy` says; if nothing is, all stays in float32,
            and a warning says so once.
        enabled: bool. False runs the code inside in float32, also within another region. Defaults
            to True.
        allow: list of str. Names of operations, as in `tf.raw_ops`, that run in 16 bits in any
            case.
        deny: list of str. Names of operations that run in float32.

    Raises:
        ValueError: the dtype is another one, TensorFlow has no such operation, or an operation is
            in both lists or cannot run in 16 bits.
        TypeError: `enabled` is no bool, `allow` or `deny` is no list, or a class is decorated.

    Example:

    >>> x, w = tf.random.normal([8, 16]), tf.Variable(tf.random.normal([16, 4]))
    >>> with tf.GradientTape() as tape, keras_mp.autocast("bfloat16"):
    ...     y = tf.nn.relu(x @ w)
    >>> y.dtype
    tf.float32
    >>> exact = tf.nn.relu(x @ w)
    >>> 0 < float(tf.reduce_max(abs(y - exact))) < 0.1
    True
    >>> tape.gradient(y, w).dtype
    tf.float32

    Source: PyTorch's `torch.autocast`; the lists of operations are TensorFlow's
    (`auto_mixed_precision_lists.h`), with the differences that `docs/autocast.md` names.
    """

    def __init__(
        self,
        dtype: str | tf.DType | None = None,
        enabled: bool = True,
        allow: Iterable[str] = (),
        deny: Iterable[str] = (),
    ) -> None:
        if inspect.isroutine(dtype):
            raise TypeError(
                "Write `@keras_mp.autocast()`, with parentheses, to decorate a function. "
                f"Received: dtype={dtype!r}"
            )
        self._is_enabled = validation.boolean("enabled", enabled)
        self._dtype = None if dtype is None else _checked(dtype)
        self._allow, self._deny = frozenset(), frozenset()
        if allow or deny:
            self._allow = _checked_names("allow", allow, self._dtype or tf.bfloat16)
            self._deny = _checked_names("deny", deny, None)
        both = sorted(self._allow & self._deny)
        if both:
            raise ValueError(
                "An operation is either allowed or denied. "
                f"Received: allow={sorted(self._allow)}, deny={sorted(self._deny)}; both: {both}"
            )

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with the region around each call of it.

        Around a `tf.function` the region does what `with` does around its calls: there is a trace
        for this region, beside those of others.
        """
        if isinstance(function, type) or not callable(function):
            raise TypeError(
                "`autocast(...)` decorates a function or a method, not a class: decorate its "
                f"methods. Received: {function!r} (of type {type(function)})"
            )
        if hasattr(function, "get_concrete_function"):
            return _FunctionInRegion(self, function)
        return super().__call__(function)

    def __enter__(self) -> "autocast":
        scope = entered(self._region())
        scope.__enter__()
        reach.thread.scopes = (*reach.thread.scopes, scope)
        return self

    def __exit__(self, *error: Any) -> None:
        *outer, scope = reach.thread.scopes
        reach.thread.scopes = tuple(outer)
        scope.__exit__(*error)

    def _region(self) -> Region | None:
        if not self._is_enabled:
            return None
        dtype = _fast_dtype() if self._dtype is None else self._dtype
        return None if dtype is None else Region(dtype, self._allow, self._deny)

    def __repr__(self) -> str:
        dtype = None if self._dtype is None else self._dtype.name
        lists = f", allow={sorted(self._allow)}, deny={sorted(self._deny)}"
        return f"autocast({dtype!r}, enabled={self._is_enabled}{lists})"


def entered(region: Region | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that puts a region in force in this thread.

    Where TensorFlow has not got a private name that it needs, the region does nothing.

    Args:
        region: Region, or None, which stops autocasting.
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
    kernels.install()
    # It always acts: functions that are made later may use tensors that were computed in a region.
    hooks.install([Replacement(graphs.function_of_graph, _without_pairs, When.ALWAYS, FACES)])


def _without_pairs(original: Callable[..., object]) -> Callable[..., object]:
    """Makes a function of a graph without the casts that cancel."""

    def from_func_graph(name: str, graph: tf.Graph, *args: Any, **kwargs: Any) -> object:
        with cast_pairs.left_out(graph):
            return original(name, graph, *args, **kwargs)

    return from_func_graph


class _FunctionInRegion:
    """A `tf.function` that is called and traced in a region.

    All other attributes are those of the function. Unlike a Python function around it, it can be a
    method: TensorFlow then makes a function for each object.

    Args:
        region: `autocast`.
        function: `tf.function`.
    """

    def __init__(self, region: autocast, function: Any) -> None:
        functools.update_wrapper(self, function.python_function, updated=())
        self._region, self._function = region, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._region:
            return self._function(*args, **kwargs)

    def get_concrete_function(
        self, *args: Any, **kwargs: Any
    ) -> tf.types.experimental.ConcreteFunction:
        with self._region:
            return self._function.get_concrete_function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> "_FunctionInRegion":
        return _FunctionInRegion(self._region, self._function.__get__(instance, owner))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._function, name)


def autocast_inputs(dtype: str | tf.DType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Pins the dtype of a function that is to choose its dtypes itself.

    A custom operation is an example. In a region of `autocast`, the function gets float32, bfloat16
    and float16 tensors in `dtype`, and nothing inside of it is autocast. What it returns in 16 bits
    is cast to float32. That holds for the gradient function of `tf.custom_gradient` as well: it
    runs as the forward pass did. Outside of a region the function is called as it is.

    Args:
        dtype: DType or str, "float32", "bfloat16" or "float16".

    Returns:
        A decorator.

    Raises:
        ValueError: `dtype` is another one.

    Example:

    >>> @keras_mp.autocast_inputs("float32")
    ... @tf.custom_gradient
    ... def cube(x):
    ...     return x * x * x, lambda upstream: upstream * 3 * x * x
    >>> with keras_mp.autocast("float16"):
    ...     cube(tf.constant([[100.0]]) @ tf.constant([[1.0]])).numpy().item()
    1000000.0

    Source: PyTorch's `torch.amp.custom_fwd(cast_inputs=)` and `custom_bwd`.
    """
    wanted = tf.float32 if dtype in ("float32", tf.float32) else _checked(dtype)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            region = reach.region()
            if region is None:
                return function(*args, **kwargs)
            cast = lower_precision.cast
            args, kwargs = tf.nest.map_structure(lambda x: cast(x, wanted), (args, kwargs))
            with reach.without_region():
                results = function(*args, **kwargs)
            return tf.nest.map_structure(lambda x: cast(x, tf.float32), results)

        return call

    return decorate


class AutocastState(NamedTuple):
    """The dtype and the lists of `autocast` that are in force.

    Attributes:
        dtype: DType in which operations run; None outside of a region.
        allow: sorted names of operations that do so in any case.
        deny: sorted names of operations that do not.
    """

    dtype: tf.DType | None = None
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


def autocast_state() -> AutocastState:
    """Returns the dtype and the lists of `autocast` in force in this thread.

    Returns:
        A named tuple of `dtype`, `allow` and `deny`. Its dtype is None where nothing is autocast.

    Example:

    >>> with keras_mp.autocast("bfloat16", deny=["Einsum"]):
    ...     keras_mp.autocast_state()
    AutocastState(dtype=tf.bfloat16, allow=(), deny=('Einsum',))
    >>> keras_mp.autocast_state().dtype is None
    True
    """
    region = reach.region()
    if region is None:
        return AutocastState()
    return AutocastState(region.dtype, tuple(sorted(region.allow)), tuple(sorted(region.deny)))


def autocast_ops(
    dtype: str | tf.DType | None = None, device: str | None = None
) -> dict[str, cast_policy.OpPolicy]:
    """Returns a table of operations, with a region's policy for each and the reason.

    Args:
        dtype: DType or str, "bfloat16" or "float16". With it, or a device, operations for which
            TensorFlow has no kernel, or a slow one, are counted among those that run in float32.
            Defaults to bfloat16 if a device is given.
        device: str, "CPU" or "GPU". Defaults to that on which TensorFlow computes, if a dtype is
            given.

    Returns:
        dict by name of the operation, sorted, of named tuples of `policy`, which is "allow",
        "infer", "clear", "promote", "deny" or "none", and `why`. Operations that are not in it are
        left alone.

    Raises:
        ValueError: `dtype` or `device` is another one.

    Example:

    >>> keras_mp.autocast_ops()["MatMul"].policy
    'allow'
    >>> keras_mp.autocast_ops("bfloat16", "CPU")["Tanh"]
    OpPolicy(policy='deny', why='on CPUs its 16-bit kernel is slower than the float32 one')
    """
    if dtype is None and device is None:
        return dict(sorted(cast_policy.ROWS.items()))
    if device not in (None, "CPU", "GPU"):
        raise ValueError(f"Expected 'CPU' or 'GPU'. Received: device={device!r}")
    region = Region(tf.bfloat16 if dtype is None else _checked(dtype))
    where = device or trials.usual_device()
    return {op: regions.policy_for(op, region, where) for op in sorted(cast_policy.ROWS)}


def _checked(dtype: str | tf.DType) -> tf.DType:
    parsed = dtypes.parse(dtype)
    if parsed in dtypes.LOW_PRECISION:
        return parsed
    nearest = difflib.get_close_matches(str(dtype), dtypes.LOW_PRECISION_NAMES, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(
        "Operations run in 'bfloat16' or 'float16'; None chooses the dtype that is fast on this "
        f"machine.{hint} Received: dtype={dtype!r}"
    )


def _checked_names(argument: str, ops: Iterable[str], dtype: tf.DType | None) -> frozenset[str]:
    """Returns names of operations that the user passed, if TensorFlow has them."""
    if isinstance(ops, str) or not hasattr(ops, "__iter__"):
        raise TypeError(
            f"`{argument}` must be a list of names of operations, such as ['Tanh']. "
            f"Received: {argument}={ops!r}"
        )
    names = frozenset(ops)
    if not kernels.have_faces():
        return names
    for op in sorted(names, key=str):
        if not isinstance(op, str) or operations.definition(op) is None:
            by_lower_case = {name.lower(): name for name in dir(tf.raw_ops)}
            wanted = str(op).replace("_", "").lower()
            nearest = difflib.get_close_matches(wanted, by_lower_case, n=1, cutoff=0.5)
            hint = f" Did you mean {by_lower_case[nearest[0]]!r}?" if nearest else ""
            raise ValueError(
                f"TensorFlow has no operation {op!r}; `tf.raw_ops` has their names.{hint} "
                f"Received: {argument}={sorted(map(str, names))}"
            )
        if dtype is None:
            continue
        if op in sums.KERNELS:
            raise ValueError(
                f"The operation {op!r} adds up in the dtype of its inputs, and some of "
                "TensorFlow's kernels lose terms of a sum in 16 bits. Expected other operations. "
                f"Received: {argument}={sorted(names)}"
            )
        if known_operations.attribute_of(op, dtype) is None:
            raise ValueError(
                f"The operation {op!r} does not take tensors of {dtype.name}. Expected one that "
                f"takes float32 and {dtype.name}. Received: {argument}={sorted(names)}"
            )
    return names


def _fast_dtype() -> tf.DType | None:
    policy = hardware.best_policy()
    if policy != "float32":
        return tf.as_dtype(policy.removeprefix("mixed_"))
    _warn_once()
    return None


@functools.cache
def _warn_once() -> None:
    messages.warn(
        "`keras_mp.autocast()` leaves everything in float32: neither float16 nor bfloat16 is known "
        "to be faster on this machine. `python -m keras_mp.hardware` says more. "
        "`keras_mp.autocast('bfloat16')` runs operations in 16 bits all the same."
    )
