"""Computes operations in float32 that TensorFlow refuses for 16-bit tensors.

In reach, the door (`kernels/door.py`) knows before what an operation refuses. This module is for
the rest:

- Out of reach, operations that TensorFlow refuses since a 16-bit tensor that was made in reach
  meets a float32 one (`faces.was_made_in_reach`). A program's own 16-bit tensors are refused as
  ever.
- Functions of TensorFlow that refuse dtypes in Python. TensorFlow then asks its dispatchers for
  other types of arguments, one of which is ours.
- A 16-bit tensor that is to become a float32 one: what is assigned, or written into a
  `tf.TensorArray`.
- Branches and loops, which are made again with float32 in the place of 16 bits.
- Functions that were written for float32, and get 16-bit tensors from a layer: concrete functions,
  those of SavedModels, and functions of Python that run outside of the graph say which dtypes they
  take or return. In reach they get float32 where they were written for it, and 16 bits where they
  were written for these. (A `tf.function` that refuses 16 bits is called again.)

Nothing is asked where nothing is refused. What is refused has made nothing, so it is made again.

This module needs TensorFlow only.
"""

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import hooks, kernels, variables
from keras_mp.hooks import Everywhere, Method, Replacement, When, faces, reach
from keras_mp.hooks.once import once
from keras_mp.support.attributes import replaced
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import LOW_PRECISION, is_low, parse
from keras_mp.tensorflow_api import graphs, operations, saving
from keras_mp.tensorflow_api.features import FACES, SIGNATURES
from keras_mp.variables import scope

# The errors that functions raise if dtypes do not fit.
_REFUSALS = TypeError, ValueError, tf.errors.InvalidArgumentError, tf.errors.NotFoundError
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
# The methods of `tf.TensorArray` that take tensors of its dtype.
_WRITING = ("write", "unstack", "scatter", "split")
_ASSIGNING = {"assign", "assign_add", "assign_sub"}
_CONSTANTS = (float, int, np.ndarray, np.generic, list, tuple)


def refused() -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which mixtures are errors, as without keras_mp."""
    return replaced(reach.thread, "is_strict", True)


@once
def install() -> None:
    """Lets keras_mp compute in float32 what TensorFlow refuses, once in a process."""
    hooks.install(_replacements())
    if kernels.have_faces():
        _dispatcher_class()().register()


def _replacements() -> Iterator[Replacement]:
    for name, make, when in (
        (operations.run_in_eager, _running_elsewhere, When.OUT_OF_REACH),
        (operations.run_in_slower_way, _following, When.OUT_OF_REACH),
        (operations.make_in_graph, _made_elsewhere, When.OUT_OF_REACH),
        (operations.to_tensor, _keeping_numbers, When.IN_REACH),
    ):
        yield Replacement(name, make, when, FACES)
    for original, make in (
        (tf.constant, functools.partial(_keeping_numbers, keeps_scalars=False)),
        (tf.matmul, _of_ragged),
    ):
        yield Replacement(Everywhere(original), make, feature=FACES)
    if kernels.have_faces():
        yield Replacement(graphs.call_flat, _calling_concrete, feature=SIGNATURES)
        yield Replacement(saving.is_callable_with, _callable_in_16_bits, feature=SIGNATURES)
        yield Replacement(graphs.run_in_numpy, _calling_python, feature=SIGNATURES)
        yield Replacement(Everywhere(tf.py_function, ("py_function",)), _calling_python)
    # The classes of variables, below one of them that is public.
    for cls in tf.experimental.dtensor.DVariable.__mro__:
        for name in vars(cls).keys() & _ASSIGNING if cls is not tf.Variable else ():
            assigning = functools.partial(_called_again, refusals=(TypeError, ValueError))
            yield Replacement(Method(cls, name), assigning, When.ALWAYS)
    for original in (tf.compat.v1.cond, tf.switch_case):
        yield Replacement(Everywhere(original), _with_faces_of_branches, When.ALWAYS)
    yield Replacement(Everywhere(tf.compat.v1.while_loop), _made_again, When.ALWAYS)
    yield Replacement(Method(type(tf.function(scope.read)), "__call__"), _called_again, When.ALWAYS)
    for name in _WRITING:
        yield Replacement(Method(tf.TensorArray, name), _in_the_dtype_of_the_array, When.ALWAYS)


def _keeping_numbers(
    original: Callable[..., Any], keeps_scalars: bool = True
) -> Callable[..., Any]:
    """Returns a function that makes tensors; a constant in 16 bits keeps its number."""

    def make(value: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # It is the fifth argument of one of the two functions; the other one has four.
        preferred = args[2] if len(args) > 2 else kwargs.get("preferred_dtype")
        is_constant = isinstance(value, _CONSTANTS) and not isinstance(value, bool)
        wanted = parse(preferred if dtype is None else dtype) if is_constant else None
        if wanted is None or not is_low(wanted) or reach.thread.is_decided or not _is_active():
            return original(value, dtype, *args, **kwargs)
        return faces.constant(
            lambda value, dtype: original(value, dtype, *args, **kwargs),
            value,
            wanted,
            keeps_scalars,
        )

    return make


def _of_ragged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that first refuses mixtures with ragged tensors."""

    def multiply(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        is_ragged = isinstance(a, tf.RaggedTensor) or isinstance(b, tf.RaggedTensor)
        if is_ragged and _is_active() and _is_mixed([_dtype_of(a), _dtype_of(b)]):
            a, b = _widened(a), _widened(b)
        return original(a, b, *args, **kwargs)

    return multiply


def _dispatcher_class() -> type:
    """Returns a class of TensorFlow's dispatchers."""
    base = operations.GlobalOpDispatcher.get()

    class _Dispatcher(base):
        """Calls functions of TensorFlow again that have refused to mix dtypes."""

        def handle(self, op: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
            """Returns a function's result, or `NOT_SUPPORTED` if dtypes are not the reason."""
            call = list(args), kwargs
            if not _is_own_fault(sys.exc_info()[1]) and _may_be_made_again(call):
                for args_again, kwargs_again in _in_other_dtypes(call):
                    with contextlib.suppress(*_REFUSALS):
                        return op(*args_again, **kwargs_again)
            return self.NOT_SUPPORTED  # TensorFlow's error about the user's own call is raised.

    return _Dispatcher


class _Refused(TypeError):
    """TensorFlow has refused an operation. Dispatchers hear of this error."""


def _is_own_fault(error: BaseException | None) -> bool:
    """Whether an error comes from a line of keras_mp, and refuses nothing."""
    if error is None or isinstance(error, _Refused):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_PACKAGE)


def _may_be_made_again(call: Any) -> bool:
    """Whether a call that TensorFlow has refused may be made in other dtypes.

    In reach it may; elsewhere, if it has a 16-bit tensor that was made in reach.
    """
    if not _is_active():
        return False
    values = tf.nest.flatten(call)
    return reach.current() is not None or any(
        faces.is_low_tensor(each) and faces.was_made_in_reach(each) for each in values
    )


def _running_elsewhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that runs an operation in eager, out of reach."""
    thread = reach.thread

    def execute(context: Any, op: str, name: Any, *args: Any) -> Any:
        try:
            results = original(context, op, name, *args)
        except operations.QuickWayFailed.get():
            is_mixed = _is_mixed([*map(_dtype_of, tf.nest.flatten(args))])
            if not is_mixed or not _may_be_made_again(args):
                raise
            return original(context, op, name, *tf.nest.map_structure(_widened, args))
        if thread.has_left:
            faces.follow(args, results)
        return results

    return execute


def _following(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that runs operations in the slower way, out of reach."""
    thread = reach.thread

    def execute(handle: Any, device: Any, op: Any, inputs: Any, *args: Any) -> Any:
        try:
            results = original(handle, device, op, inputs, *args)
        except tf.errors.InvalidArgumentError as error:
            if not _is_mixed([*map(_dtype_of, inputs)]) or not _may_be_made_again(inputs):
                raise
            raise _Refused(str(error)) from None
        if thread.has_left:
            faces.follow(inputs, results)
        return results

    return execute


def _made_elsewhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that makes an operation in a graph, out of reach."""

    def apply_op_helper(op_type_name: str, name: str | None = None, **inputs: Any) -> Any:
        try:
            return original(op_type_name, name, **inputs)
        except TypeError as error:
            if not _may_be_made_again(inputs):
                raise
            for again in _in_other_dtypes(inputs):
                with contextlib.suppress(TypeError):
                    return original(op_type_name, name, **again)
            raise error from None

    return apply_op_helper


def _with_faces_of_branches(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that makes branches, whose results in reach keep faces."""
    made_again = _made_again(original)

    def choose(*args: Any, **kwargs: Any) -> Any:
        is_plain = reach.current() is None or reach.region() is not None or not _is_active()
        if is_plain or tf.executing_eagerly():
            return made_again(*args, **kwargs)
        branches = [each for each in tf.nest.flatten((args, kwargs)) if callable(each)]
        kinds: list[list[int | None]] = []
        low: Any = reach.current()

        def widening(branch: Any) -> Any:
            @do_not_convert
            def call() -> Any:
                results = tf.nest.map_structure(scope.read, branch(), expand_composites=True)
                flat = tf.nest.flatten(results, expand_composites=True)
                kinds.append([_kind_of(each) for each in flat])
                return tf.nest.map_structure(_widened, results, expand_composites=True)

            return call if callable(branch) else branch

        def rounded(result: Any, of_branches: tuple[int | None, ...]) -> Any:
            known = [each for each in of_branches if each is not None]
            if len(known) < len(of_branches):  # One of them has float32.
                return result
            return faces.rounded(result, low, max(faces.MADE, min(known)))

        args, kwargs = tf.nest.map_structure(widening, (args, kwargs))
        results = original(*args, **kwargs)
        flat = tf.nest.flatten(results, expand_composites=True)
        if len(kinds) < len(branches) or any(len(each) != len(flat) for each in kinds):
            return results
        flat = [rounded(*each) for each in zip(flat, zip(*kinds))]
        return tf.nest.pack_sequence_as(results, flat, expand_composites=True)

    return choose


def _kind_of(value: Any) -> int | None:
    """Returns the kind of a 16-bit tensor's face, 0 without one; else None."""
    return faces.kind_of(value) if faces.is_low_tensor(value) else None


def _made_again(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that makes a loop, or branches with several dtypes."""

    def make(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except TypeError as error:
            # In eager, a branch has already run.
            if tf.executing_eagerly() or not _is_active():
                raise
            return _again(original, _widening, args, kwargs, error)

    return make


def _again(
    original: Callable[..., Any], change: Callable[[Any], Any], args: Any, kwargs: Any, error: Any
) -> Any:
    """Calls a function with changed arguments; if they are refused, raises the error."""
    args, kwargs = tf.nest.map_structure(change, (args, kwargs))
    try:
        return original(*args, **kwargs)
    except (TypeError, ValueError):
        raise error from None  # TensorFlow's error about the user's own call.


def _widening(value: Any) -> Any:
    """Returns a tensor in float32, or a function that returns its result in float32."""
    if not callable(value):
        return _widened_if_allowed(value)

    @do_not_convert
    def call(*args: Any) -> Any:
        return tf.nest.map_structure(_widened_if_allowed, value(*args))

    return call


def _widened_if_allowed(value: Any) -> Any:
    return _widened(value) if _is_allowed(value) else value


def _called_again(
    original: Callable[..., Any], refusals: tuple[type[Exception], ...] = (TypeError,)
) -> Callable[..., Any]:
    """Returns the method of a `tf.function` or a variable, called again with float32.

    A variable in 16 bits takes no float32, and refuses again.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except refusals as error:
            if not any(map(_is_allowed, tf.nest.flatten((args, kwargs)))):
                raise
            method = functools.partial(original, self)
            return _again(method, _widened_if_allowed, args, kwargs, error)

    return call


def _in_the_dtype_of_the_array(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `tf.TensorArray` method that casts 16 bits to float32, or the reverse."""

    def write(array: tf.TensorArray, *args: Any, **kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            is_mixed = _is_mixed([_dtype_of(value), array.dtype])
            may_cast = is_mixed and _may_be_made_again(value)
            return tf.cast(value, array.dtype) if may_cast else value

        args, kwargs = tf.nest.map_structure(cast, (args, kwargs))
        return original(array, *args, **kwargs)

    return write


def _calling_concrete(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method that calls a concrete function, in the dtypes that it takes."""

    def cast(value: Any, dtype: tf.DType) -> Any:
        if dtype in LOW_PRECISION:
            # Layers that a SavedModel has in 16 bits may be the last ones of a model.
            return _narrowed(value, dtype)
        return _widened(value) if dtype is tf.float32 else value

    def call_flat(self: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
        if _is_active():
            wanted = [each.dtype for each in self.graph.inputs]
            tensor_inputs = [*map(cast, tensor_inputs, wanted[: len(tensor_inputs)])]
        return original(self, tensor_inputs, captured_inputs)

    return call_flat


def _callable_in_16_bits(original: Callable[..., bool]) -> Callable[..., bool]:
    """Returns what tells whether a function of a SavedModel takes inputs, or casts."""

    def is_callable_with(function: Any, inputs: Any, allow_conversion: bool) -> bool:
        if original(function, inputs, allow_conversion):
            return True
        if not (allow_conversion and _is_active()):
            return False
        # It casts them when it is called.
        narrow = functools.partial(_narrowed, dtype=reach.current())
        return any(
            original(function, tf.nest.map_structure(change, inputs), allow_conversion)
            for change in (_widened, narrow)
        )

    return is_callable_with


def _calling_python(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what calls a Python function, in float32 unless it asks for 16 bits."""

    def call(func: Any = None, inp: Any = None, Tout: Any = None, *args: Any, **kwargs: Any) -> Any:
        dtypes = [getattr(each, "dtype", each) for each in tf.nest.flatten(Tout)]
        if inp is not None and _is_active() and not any(each in LOW_PRECISION for each in dtypes):
            inp = tf.nest.map_structure(_widened, inp)
        return original(func, inp, Tout, *args, **kwargs)

    return call


def _narrowed(value: Any, dtype: tf.DType | None) -> Any:
    is_wide = isinstance(value, tf.Tensor) and value.dtype == tf.float32
    return value if dtype is None or not is_wide else tf.cast(value, dtype)


def _is_active() -> bool:
    """Whether mixtures are allowed, in reach."""
    return not reach.thread.is_strict


def _is_mixed(dtypes: Sequence[tf.DType | None]) -> bool:
    return any(map(is_low, dtypes)) and tf.float32 in dtypes


def _dtype_of(value: Any) -> tf.DType | None:
    """Returns the dtype of a tensor or variable."""
    if isinstance(value, tf.Tensor):
        return value.dtype
    # The quickest check comes first: most other values are numbers.
    dtype = getattr(value, "dtype", None)
    is_tensor = dtype is not None and (tf.is_tensor(value) or hasattr(value, "__tf_tensor__"))
    return parse(dtype) if is_tensor else None


def _is_allowed(value: Any) -> bool:
    """Whether a value is a 16-bit tensor that may become a float32 one."""
    return is_low(_dtype_of(value)) and _may_be_made_again(value)


def _in_other_dtypes(inputs: Any) -> Iterator[Any]:
    """Yields a refused call's arguments in the dtypes to try next, the nearest first."""
    values = tf.nest.flatten(inputs)
    dtypes = [_dtype_of(each) for each in values]
    is_mixed, low = _is_mixed(dtypes), [dtype for dtype in dtypes if is_low(dtype)]
    numbers = [each for each in values if _is_number(each)]
    if low and numbers and not is_mixed:
        yield tf.nest.map_structure(
            lambda value: tf.constant(value, low[0]) if _is_number(value) else value, inputs
        )
    if low or is_mixed or any(isinstance(each, tf.DType) and is_low(each) for each in values):
        yield tf.nest.map_structure(_widened, inputs)


def _is_number(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray | np.generic)
    return isinstance(value, float) or (is_array and value.dtype.kind == "f")


def _widened(value: Any) -> Any:
    if isinstance(value, tf.DType):
        return tf.float32 if value in LOW_PRECISION else value
    if _dtype_of(value) not in LOW_PRECISION:
        return value
    if isinstance(value, tf.Tensor):
        return faces.widened(value)
    if not hasattr(value, "assign"):
        return tf.cast(value, tf.float32)
    with variables.autocast_scope(None):  # A variable has all digits of float32.
        return tf.cast(value, tf.float32)
