"""Operations that TensorFlow refuses for 16-bit tensors, and not for float32 ones.

It refuses 16-bit beside float32 tensors, operations that it has in float32 only, and in graphs a
number before a 16-bit tensor, as in `tf.maximum(0.0, x)`. The first two are computed in float32;
the number gets the dtype of the tensor, as it does in eager.

Only in code that is in the reach of keras_mp (`support/reach.py`), and only what TensorFlow
refuses: a program that it accepts runs as if this module did not exist. A function that is
refused has made nothing, so it is called again, with float32 in the place of 16 bits: in graphs the
one that makes an operation; elsewhere the public function that was called, since its dispatcher for
other types of arguments is asked, and is ours. Where dtypes are mixed or a kernel is missing in
eager, generated code falls back to a slower way, in which the inputs of an operation get a common
dtype. Branches and
loops are made again with float32 in the place of 16 bits; what is written into a `tf.TensorArray`
gets its dtype, and what is assigned to a float32 variable is cast. A float32 value is rounded to a
variable in 16 bits only where keras_mp has made it one.

This module needs TensorFlow only.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.kernels import replaced as kernels_replaced
from keras_mp.op_autocast import plans
from keras_mp.support import features, reach
from keras_mp.support.attributes import replaced
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import LOW_PRECISION, is_low, parse
from keras_mp.tensorflow_api import operations
from keras_mp.tensorflow_api.features import MIXTURES

_MIXED = "was expected to be a"
# Its generated code cannot go on: it has an argument `e`, and names the error so.
_TAKES_E = "cannot compute SelectV2"
_NO_KERNEL = ("Could not find device for node", "is not in the list of allowed values")
# What a function raises whose dtypes do not fit.
_ERRORS = (TypeError, ValueError, tf.errors.InvalidArgumentError, tf.errors.NotFoundError)

# The methods of `tf.TensorArray` that take tensors of its dtype.
_WRITING = ("write", "unstack", "scatter", "split")
_ASSIGNING = {"assign", "assign_add", "assign_sub"}


class _Thread(threading.local):
    """What this thread refuses, and has been refused.

    Attributes:
        is_strict: whether mixtures are refused.
        is_retrying: whether a function is called again.
        rounds: whether float32 values are rounded that are assigned to variables in 16 bits.
    """

    is_strict = False
    is_retrying = False
    rounds = False


_thread = _Thread()


def refused() -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which mixtures are errors, as without keras_mp."""
    return replaced(_thread, "is_strict", True)


def rounding_assignments() -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which float32 values may be assigned to variables in 16 bits."""
    return replaced(_thread, "rounds", True)


@functools.cache
def install() -> None:
    """Lets operations that TensorFlow refuses be computed in float32, once in a process."""
    if features.is_on(MIXTURES):
        _dispatcher_class()().register()
        for name, make in (
            (operations.to_one_dtype, _with_a_common_dtype),
            (operations.raise_error, _falling_back),
            (operations.make_in_graph, _made_in_float32),
        ):
            name.set(make(name.get()))
    # The classes of variables, below one of them that is public.
    for cls in tf.experimental.dtensor.DVariable.__mro__:
        for name in vars(cls).keys() & _ASSIGNING if cls is not tf.Variable else ():
            setattr(cls, name, _in_the_dtype_of_the_variable(getattr(cls, name)))
    branching: list[Any] = [tf.compat.v1.cond, tf.switch_case, tf.compat.v1.while_loop]
    kernels_replaced.replace(
        kernels_replaced.Replacement(own, (own.__name__,), _made_again(own)) for own in branching
    )
    for name in _WRITING:
        setattr(tf.TensorArray, name, _in_the_dtype_of_the_array(getattr(tf.TensorArray, name)))


class _Refused(tf.errors.InvalidArgumentError, TypeError):
    """A refusal in eager as one in a graph, for which TensorFlow asks its dispatchers."""


def _dispatcher_class() -> type:
    """Returns a class of TensorFlow's dispatchers."""
    base = operations.GlobalOpDispatcher.get()

    class _Dispatcher(base):
        """Calls functions of TensorFlow again that have refused a mixture of dtypes."""

        def handle(self, op: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
            """Returns the result of a function, or `NOT_SUPPORTED` if dtypes are not the reason."""
            if not _is_active() or _thread.is_retrying:
                return self.NOT_SUPPORTED
            for args_again, kwargs_again in _in_other_dtypes((list(args), kwargs)):
                with contextlib.suppress(*_ERRORS), replaced(_thread, "is_retrying", True):
                    return op(*args_again, **kwargs_again)
            return self.NOT_SUPPORTED  # What TensorFlow said of the user's own call is raised.

    return _Dispatcher


def _with_a_common_dtype(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def args_to_matching_eager(
        inputs: Sequence[Any], ctx: Any, allowed: Sequence[tf.DType], *args: Any, **kwargs: Any
    ) -> Any:
        if _is_active():
            dtypes = [_dtype_of(each) for each in inputs]
            low = [each for each in dtypes if is_low(each)]
            caller: Any = inspect.currentframe()
            lacks_kernel = low and _lacks_kernel(caller.f_back.f_code.co_name, low[0])
            if lacks_kernel or (not _are_among(allowed, low) and tf.float32 in allowed):
                inputs = [_widened(each) for each in inputs]
            elif _is_mixed(dtypes):
                # A variable may appear in another dtype than it says.
                inputs = [_read(each) for each in inputs]
                if _is_mixed([_dtype_of(each) for each in inputs]):
                    inputs = [_widened(each) for each in inputs]
        return own(inputs, ctx, allowed, *args, **kwargs)

    return args_to_matching_eager


def _falling_back(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def raise_from_not_ok_status(error: Any, name: str | None) -> None:
        message = str(error.message)
        lacks_kernel = any(each in message for each in _NO_KERNEL)
        if not (_is_active() and (lacks_kernel or _MIXED in message)):
            own(error, name)
        if _TAKES_E in message:
            raise _Refused(None, None, message)
        # Generated code goes on with `args_to_matching_eager`, and with the kernel once more.

    return raise_from_not_ok_status


def _made_in_float32(own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that makes an operation in a graph."""

    @functools.wraps(own)
    def apply_op_helper(op_type_name: str, name: str | None = None, **inputs: Any) -> Any:
        if not _is_active():
            return own(op_type_name, name, **inputs)
        missing = _dtypes_without_kernel(op_type_name, kernels_replaced.usual_device())
        if missing and any(_dtype_of(each) in missing for each in tf.nest.flatten(inputs)):
            inputs = tf.nest.map_structure(_widened, inputs)
        try:
            return own(op_type_name, name, **inputs)
        except TypeError as error:
            for again in _in_other_dtypes(inputs):
                with contextlib.suppress(TypeError, ValueError):
                    return own(op_type_name, name, **again)
            raise error from None

    return apply_op_helper


def _lacks_kernel(function: str, dtype: tf.DType | None) -> bool:
    """Whether what a function computes in a slower way has a kernel for float32 only."""
    op = _ops_by_slow_way().get(function)
    return op is not None and dtype in _dtypes_without_kernel(op, kernels_replaced.device_type())


@functools.cache
def _ops_by_slow_way() -> dict[str, str]:
    """Returns the operations by the names of the functions that compute them in a slower way."""
    functions = ((name, getattr(tf.raw_ops, name)) for name in dir(tf.raw_ops) if name[0] != "_")
    return {f"{function.__name__}_eager_fallback": name for name, function in functions}


@functools.cache
def _dtypes_without_kernel(op: str, device: str) -> frozenset[tf.DType]:
    """Returns the 16-bit dtypes that an operation takes, and computes only in float32."""
    if not plans.has_kernel(op, tf.float32, device):
        return frozenset()
    taken = [dtype for dtype in LOW_PRECISION if plans.dtype_attr(op, dtype)]
    return frozenset(dtype for dtype in taken if not plans.has_kernel(op, dtype, device))


def _in_the_dtype_of_the_variable(own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of variables that assigns."""

    @functools.wraps(own)
    def assign(variable: tf.Variable, value: Any, *args: Any, **kwargs: Any) -> Any:
        is_mixed = _is_mixed([_dtype_of(value), variable.dtype])
        if is_mixed and (_thread.rounds or (variable.dtype == tf.float32 and _is_active())):
            value = tf.cast(value, variable.dtype)
        return own(variable, value, *args, **kwargs)

    return assign


def _made_again(own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that makes branches, which may return several dtypes, or a loop."""

    @functools.wraps(own)
    def make(*args: Any, **kwargs: Any) -> Any:
        try:
            return own(*args, **kwargs)
        except TypeError as error:
            # In eager a branch has run.
            if tf.executing_eagerly() or not _is_active():
                raise
            args, kwargs = tf.nest.map_structure(_widening, (args, kwargs))
            try:
                return own(*args, **kwargs)
            except (TypeError, ValueError):
                raise error from None  # What TensorFlow said of the user's own call.

    return make


def _widening(value: Any) -> Any:
    """Returns a tensor in float32, and a function as one that returns it."""
    if not callable(value):
        return _widened(value)

    @do_not_convert
    def call(*args: Any) -> Any:
        return tf.nest.map_structure(_widened, value(*args))

    return call


def _in_the_dtype_of_the_array(own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of `tf.TensorArray` that takes 16 bits for float32, and the reverse."""

    @functools.wraps(own)
    def write(array: tf.TensorArray, *args: Any, **kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            is_mixed = _is_mixed([_dtype_of(value), array.dtype])
            return tf.cast(value, array.dtype) if is_mixed else value

        if _is_active():
            args, kwargs = tf.nest.map_structure(cast, (args, kwargs))
        return own(array, *args, **kwargs)

    return write


def _is_active() -> bool:
    return reach.current() is not None and not _thread.is_strict


def _is_mixed(dtypes: Sequence[tf.DType | None]) -> bool:
    return any(map(is_low, dtypes)) and tf.float32 in dtypes


def _are_among(allowed: Sequence[tf.DType], dtypes: Sequence[tf.DType | None]) -> bool:
    """Whether all dtypes are allowed. Dtypes are unique, and comparing them takes long."""
    return all(any(each is one for one in allowed) for each in dtypes)


def _dtype_of(value: Any) -> tf.DType | None:
    """Returns the dtype of a tensor or variable."""
    if isinstance(value, tf.Tensor):
        return value.dtype
    # The quickest question comes first: most others are numbers.
    dtype = getattr(value, "dtype", None)
    is_tensor = dtype is not None and (tf.is_tensor(value) or hasattr(value, "__tf_tensor__"))
    return parse(dtype) if is_tensor else None


def _in_other_dtypes(inputs: Any) -> Iterator[Any]:
    """Yields the arguments of a refused call in the dtypes to try instead, the nearest first."""
    values = tf.nest.flatten(inputs)
    is_mixed = _is_mixed([_dtype_of(each) for each in values])
    # A variable that appears in 16 bits has the digits of float32, and widened would lose them.
    low = [each.dtype for each in values if isinstance(each, tf.Tensor)]
    low = [dtype for dtype in low if dtype in LOW_PRECISION]
    numbers = [each for each in values if _is_number(each)]
    if low and numbers and not is_mixed and all(_is_finite_in(low[0], each) for each in numbers):
        yield tf.nest.map_structure(
            lambda value: tf.constant(value, low[0]) if _is_number(value) else value, inputs
        )
    if low or is_mixed:
        yield tf.nest.map_structure(_widened, inputs)


def _is_number(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray | np.generic)
    return isinstance(value, float) or (is_array and value.dtype.kind == "f")


def _is_finite_in(dtype: tf.DType, value: Any) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.all(np.isfinite(np.asarray(value).astype(dtype.as_numpy_dtype))))


def _read(value: Any) -> Any:
    is_variable = not isinstance(value, tf.Tensor) and _dtype_of(value) is not None
    return tf.convert_to_tensor(value) if is_variable else value


def _widened(value: Any) -> Any:
    if isinstance(value, tf.DType):
        return tf.float32 if value in LOW_PRECISION else value
    return tf.cast(value, tf.float32) if _dtype_of(value) in LOW_PRECISION else value
