"""Computes operations in float32 that TensorFlow refuses for 16-bit tensors.

TensorFlow refuses 16-bit tensors beside float32 ones, operations that it has in float32 only, and,
in graphs, a number before a 16-bit tensor, as in `tf.maximum(0.0, x)`. The first two are computed
in float32. The number gets the dtype of the tensor, as it would in eager. A number that is finite
in float32 only, such as -1e9 in float16, becomes a float32 tensor, so the sum with it is computed
in float32.

All this is only for code in the reach of keras_mp (`hooks/reach.py`), and only for what TensorFlow
refuses: any other program runs as if this module did not exist. A function that is refused has made
nothing, so it is called again, with float32 in the place of 16 bits. In graphs, that is the
function that makes an operation. Elsewhere it is the public function that was called: TensorFlow
then asks its dispatchers for other types of arguments, one of which is ours. In eager, where dtypes
are mixed or a kernel is missing, generated code falls back to a slower way, in which the inputs of
an operation get a common dtype. Branches and loops are made again with float32 in the place of 16
bits. What is written into a `tf.TensorArray` gets the dtype of the array, and what is assigned to a
float32 variable is cast. A float32 value is rounded to a 16-bit variable only if keras_mp has put
it in 16 bits.

This module needs TensorFlow only.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import hooks, variables
from keras_mp.hooks import Everywhere, Method, Replacement, When, reach
from keras_mp.hooks.once import once
from keras_mp.kernels import again_in_float32
from keras_mp.kernels import replaced as kernels_replaced
from keras_mp.op_autocast import plans, signatures
from keras_mp.op_autocast.exact_outputs import ExactOutputs
from keras_mp.support import features, large_numbers
from keras_mp.support.attributes import replaced
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import LOW_PRECISION, is_low, parse
from keras_mp.tensorflow_api import operations
from keras_mp.tensorflow_api.features import MIXTURES

_MIXED = "was expected to be a"
# The generated code of SelectV2 cannot go on: it has an argument `e`, and calls the error so, too.
_TAKES_E = "cannot compute SelectV2"
_NO_KERNEL = ("Could not find device for node", "is not in the list of allowed values")
# XLA cannot compile them in float16.
_WRONG_IN_XLA = {"LRN"}
# The errors that functions raise if dtypes do not fit.
_ERRORS = (
    AttributeError,
    TypeError,
    ValueError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
)

# The largest number of values in a constant that a graph captures; they are looked at once.
_LARGEST_CONSTANT = 2**20
# The methods of `tf.TensorArray` that take tensors of its dtype.
_WRITING = ("write", "unstack", "scatter", "split")
_ASSIGNING = {"assign", "assign_add", "assign_sub"}


class _Thread(threading.local):
    """What this thread refuses, and what it is doing about a refusal.

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
    """Returns a context manager in which float32 is rounded to 16-bit variables."""
    return replaced(_thread, "rounds", True)


@once
def install() -> None:
    """Lets keras_mp compute in float32 what TensorFlow refuses, once in a process."""
    hooks.install(_replacements())
    if features.is_on(MIXTURES):
        _dispatcher_class()().register()


def _replacements() -> Iterator[Replacement]:
    for name, make in (
        (operations.to_one_dtype, _with_a_common_dtype),
        (operations.raise_error, _falling_back),
        (operations.make_in_graph, _made_in_float32),
        (operations.to_tensor, _keeping_large_numbers),
    ):
        yield Replacement(name, make, feature=MIXTURES)
    for original, make in (
        (tf.constant, _keeping_large_numbers),
        (tf.cast, _keeping_constants),
        (tf.matmul, _of_ragged),
    ):
        yield Replacement(Everywhere(original), make, feature=MIXTURES)
    if features.is_on(MIXTURES):
        yield from signatures.replacements(_is_active, _widened)
    # The classes of variables, below one of them that is public.
    for cls in tf.experimental.dtensor.DVariable.__mro__:
        for name in vars(cls).keys() & _ASSIGNING if cls is not tf.Variable else ():
            # Weights that keras_mp keeps in 16 bits are assigned to by optimizers, too.
            yield Replacement(Method(cls, name), _in_the_dtype_of_the_variable, When.ALWAYS)
    branching: list[Any] = [tf.compat.v1.cond, tf.switch_case, tf.compat.v1.while_loop]
    for original in branching:
        yield Replacement(Everywhere(original), _made_again)
    for name in _WRITING:
        yield Replacement(Method(tf.TensorArray, name), _in_the_dtype_of_the_array)


def _keeping_large_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that makes tensors, in float32 if the dtype is too narrow."""

    def make(value: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # It is the fifth argument of one of the two functions; the other one has four.
        preferred = args[2] if len(args) > 2 else kwargs.get("preferred_dtype")
        wanted = parse(preferred if dtype is None else dtype)
        if not is_low(wanted) or isinstance(value, tf.Tensor) or not _is_active():
            return original(value, dtype, *args, **kwargs)
        if large_numbers.is_beyond(value, wanted):
            return original(value, tf.float32, *args, **kwargs)
        result = original(value, dtype, *args, **kwargs)
        if isinstance(value, float):
            again_in_float32.note_number(value, result)
        return result

    return make


def _keeping_constants(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a cast that keeps constants in float32 if the dtype cannot hold them."""

    def cast(x: Any, dtype: Any, name: str | None = None) -> Any:
        wanted = parse(dtype)
        if is_low(wanted) and _is_active():
            value = _constant_value(x) if isinstance(x, tf.Tensor) else x
            # What keras_mp has computed in float32 itself is rounded as it is in graphs.
            if large_numbers.is_beyond(value, wanted) and not _is_called_by_keras_mp():
                return original(x, tf.float32, name)
        return original(x, dtype, name)

    return cast


def _constant_value(tensor: tf.Tensor) -> Any:
    """Returns the value of a tensor that is or may be a constant, or None."""
    if tf.is_symbolic_tensor(tensor):
        return tf.get_static_value(tensor) if tensor.op.type == "Const" else None
    if tensor.dtype != tf.float32:
        return None
    if tf.executing_eagerly():
        # It does not tell how it was made. Reading a number from a GPU would wait for the GPU.
        is_cheap = tensor.shape.rank == 0 and "CPU" in tensor.device
    else:
        is_cheap = tensor.shape.num_elements() <= _LARGEST_CONSTANT
    return tf.get_static_value(tensor) if is_cheap else None


def _is_called_by_keras_mp() -> bool:
    """Whether keras_mp, not the program, called the function that calls this one.

    That is a function of TensorFlow.
    """
    frame: Any = hooks.caller()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("tensorflow."):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("keras_mp.")


def _of_ragged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that first refuses mixtures with ragged tensors."""

    def multiply(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        is_ragged = isinstance(a, tf.RaggedTensor) or isinstance(b, tf.RaggedTensor)
        if is_ragged and _is_active() and _is_mixed([_dtype_of(a), _dtype_of(b)]):
            a, b = _widened(a), _widened(b)
        return original(a, b, *args, **kwargs)

    return multiply


class _Refused(tf.errors.InvalidArgumentError, TypeError):
    """A refusal in eager as in a graph, for which TensorFlow asks its dispatchers."""


def _dispatcher_class() -> type:
    """Returns a class of TensorFlow's dispatchers."""
    base = operations.GlobalOpDispatcher.get()

    class _Dispatcher(base):
        """Calls functions of TensorFlow again that have refused to mix dtypes."""

        def handle(self, op: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
            """Returns a function's result, or `NOT_SUPPORTED` if dtypes are not the reason."""
            if not _is_active_in_reach() or _thread.is_retrying:
                return self.NOT_SUPPORTED
            for args_again, kwargs_again in _in_other_dtypes((list(args), kwargs)):
                with contextlib.suppress(*_ERRORS), replaced(_thread, "is_retrying", True):
                    return op(*args_again, **kwargs_again)
            return self.NOT_SUPPORTED  # TensorFlow's error about the user's own call is raised.

    return _Dispatcher


def _with_a_common_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    def args_to_matching_eager(
        inputs: Sequence[Any], ctx: Any, allowed: Sequence[tf.DType], *args: Any, **kwargs: Any
    ) -> Any:
        if _is_active():
            dtypes = [_dtype_of(each) for each in inputs]
            low = [each for each in dtypes if is_low(each)]
            lacks_kernel = low and _lacks_kernel(hooks.caller().f_code.co_name, low[0])
            is_beyond = low and any(large_numbers.is_beyond(each, low[0]) for each in inputs)
            if (
                lacks_kernel
                or is_beyond
                or (not _are_among(allowed, low) and tf.float32 in allowed)
            ):
                inputs = [_widened(each) for each in inputs]
            elif _is_mixed(dtypes):
                # A variable may appear in another dtype than it says.
                inputs = [_read(each) for each in inputs]
                if _is_mixed([_dtype_of(each) for each in inputs]):
                    inputs = [*map(_widen_for(inputs), inputs)]
        return original(inputs, ctx, allowed, *args, **kwargs)

    return args_to_matching_eager


def _falling_back(original: Callable[..., Any]) -> Callable[..., Any]:
    def raise_from_not_ok_status(error: Any, name: str | None) -> None:
        message = str(error.message)
        lacks_kernel = any(each in message for each in _NO_KERNEL)
        if not (_is_active() and (lacks_kernel or _MIXED in message)):
            original(error, name)
        if _TAKES_E in message:
            raise _Refused(None, None, message)
        # Generated code goes on with `args_to_matching_eager`, and then runs the kernel once more.

    return raise_from_not_ok_status


def _made_in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that makes an operation in a graph."""

    def apply_op_helper(op_type_name: str, name: str | None = None, **inputs: Any) -> Any:
        if not _is_active():
            return original(op_type_name, name, **inputs)
        missing = _dtypes_without_kernel(op_type_name, kernels_replaced.usual_device())
        if missing and any(_dtype_of(each) in missing for each in tf.nest.flatten(inputs)):
            inputs = tf.nest.map_structure(_widened, inputs)
        try:
            return original(op_type_name, name, **inputs)
        except TypeError as error:
            for again in _in_other_dtypes(inputs):
                with contextlib.suppress(TypeError, ValueError):
                    return original(op_type_name, name, **again)
            raise error from None

    return apply_op_helper


def _lacks_kernel(function: str, dtype: tf.DType | None) -> bool:
    """Whether a function that is run the slower way has a kernel for float32 only."""
    op = _ops_by_slow_way().get(function)
    return op is not None and dtype in _dtypes_without_kernel(op, kernels_replaced.device_type())


@functools.cache
def _ops_by_slow_way() -> dict[str, str]:
    """Returns operations by the names of the functions that run them the slower way."""
    functions = ((name, getattr(tf.raw_ops, name)) for name in dir(tf.raw_ops) if name[0] != "_")
    return {f"{function.__name__}_eager_fallback": name for name, function in functions}


@functools.cache
def _dtypes_without_kernel(op: str, device: str) -> frozenset[tf.DType]:
    """Returns the 16-bit dtypes that an operation takes, but computes in float32."""
    if not plans.has_kernel(op, tf.float32, device):
        return frozenset()
    taken = [dtype for dtype in LOW_PRECISION if plans.dtype_attr(op, dtype)]
    if op in _WRONG_IN_XLA:
        return frozenset(taken)
    return frozenset(dtype for dtype in taken if not plans.has_kernel(op, dtype, device))


def _in_the_dtype_of_the_variable(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of variables that assigns."""

    def assign(variable: tf.Variable, value: Any, *args: Any, **kwargs: Any) -> Any:
        is_mixed = _is_mixed([_dtype_of(value), variable.dtype])
        if is_mixed and (
            _thread.rounds or (variable.dtype == tf.float32 and _is_active_in_reach())
        ):
            value = tf.cast(value, variable.dtype)
        return original(variable, value, *args, **kwargs)

    return assign


def _made_again(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that makes a loop, or branches with several dtypes."""

    def make(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except TypeError as error:
            # In eager, a branch has already run.
            if tf.executing_eagerly() or not _is_active():
                raise
            args, kwargs = tf.nest.map_structure(_widening, (args, kwargs))
            try:
                return original(*args, **kwargs)
            except (TypeError, ValueError):
                raise error from None  # TensorFlow's error about the user's own call.

    return make


def _widening(value: Any) -> Any:
    """Returns a tensor in float32, or a function that returns its result in float32."""
    if not callable(value):
        return _widened(value)

    @do_not_convert
    def call(*args: Any) -> Any:
        return tf.nest.map_structure(_widened, value(*args))

    return call


def _in_the_dtype_of_the_array(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `tf.TensorArray` method that casts 16 bits to float32, or the reverse."""

    def write(array: tf.TensorArray, *args: Any, **kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            is_mixed = _is_mixed([_dtype_of(value), array.dtype])
            return tf.cast(value, array.dtype) if is_mixed else value

        if _is_active():
            args, kwargs = tf.nest.map_structure(cast, (args, kwargs))
        return original(array, *args, **kwargs)

    return write


def _is_active() -> bool:
    """Whether mixtures are allowed, in reach."""
    return not _thread.is_strict


def _is_active_in_reach() -> bool:
    return reach.current() is not None and _is_active()


def _is_mixed(dtypes: Sequence[tf.DType | None]) -> bool:
    return any(map(is_low, dtypes)) and tf.float32 in dtypes


def _are_among(allowed: Sequence[tf.DType], dtypes: Sequence[tf.DType | None]) -> bool:
    """Whether all dtypes are allowed; they are unique, and comparing takes long."""
    return all(any(each is one for one in allowed) for each in dtypes)


def _dtype_of(value: Any) -> tf.DType | None:
    """Returns the dtype of a tensor or variable."""
    if isinstance(value, tf.Tensor):
        return value.dtype
    # The quickest check comes first: most other values are numbers.
    dtype = getattr(value, "dtype", None)
    is_tensor = dtype is not None and (tf.is_tensor(value) or hasattr(value, "__tf_tensor__"))
    return parse(dtype) if is_tensor else None


def _in_other_dtypes(inputs: Any) -> Iterator[Any]:
    """Yields a refused call's arguments in the dtypes to try next, the nearest first."""
    values = tf.nest.flatten(inputs)
    dtypes = [_dtype_of(each) for each in values]
    is_mixed, low = _is_mixed(dtypes), [dtype for dtype in dtypes if is_low(dtype)]
    numbers = [each for each in values if _is_number(each)]
    if low and numbers and not is_mixed and not large_numbers.is_beyond(numbers, low[0]):
        yield tf.nest.map_structure(
            lambda value: tf.constant(value, low[0]) if _is_number(value) else value, inputs
        )
    if low or is_mixed or any(isinstance(each, tf.DType) and is_low(each) for each in values):
        yield tf.nest.map_structure(_widen_for(values), inputs)


def _widen_for(values: Sequence[Any]) -> Callable[[Any], Any]:
    """Returns a function that widens one of some values that meet.

    A product of many terms that is divided by their number afterwards overflows in float16 first.
    So beside a float32 scalar, the product is made again in float32.
    """
    scalars = [each for each in values if isinstance(each, tf.Tensor) and each.shape.rank == 0]
    return _widened_exactly if tf.float32 in map(_dtype_of, scalars) else _widened


def _widened_exactly(value: Any) -> Any:
    exact = ExactOutputs().of(value) if _dtype_of(value) is tf.float16 else None
    return _widened(value) if exact is None else exact


def _is_number(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray | np.generic)
    return isinstance(value, float) or (is_array and value.dtype.kind == "f")


def _read(value: Any) -> Any:
    is_variable = not isinstance(value, tf.Tensor) and _dtype_of(value) is not None
    return tf.convert_to_tensor(value) if is_variable else value


def _widened(value: Any) -> Any:
    if isinstance(value, tf.DType):
        return tf.float32 if value in LOW_PRECISION else value
    if _dtype_of(value) not in LOW_PRECISION:
        return value
    if isinstance(value, tf.Tensor) or not hasattr(value, "assign"):
        return tf.cast(value, tf.float32)
    with variables.autocast_scope(None):  # A variable has all digits of float32.
        return tf.cast(value, tf.float32)
