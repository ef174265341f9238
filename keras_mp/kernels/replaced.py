"""Python functions of TensorFlow that are replaced where the kernel behind them is wrong.

All code that needs an operation, gradient functions included, calls the Python function that
TensorFlow generates for it. So a replaced function reaches forward and backward passes, eager code
and graphs. A kernel counts as wrong if any way is wrong in which the program may compute it on this
machine: TensorFlow's own kernel or oneDNN's, which is asked, or XLA's. What XLA does is known: it
does not depend on the machine, and to ask it would take a compilation for each kernel.

This module needs TensorFlow only.
"""

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.support import messages, regions
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import LOW_PRECISION


class Kernel(NamedTuple):
    """A kernel that may be wrong in 16 bits.

    Attributes:
        module: of `tensorflow.python.ops`, where its Python function is generated.
        names: of that function. The first is the one in `module`, others are exported names.
        example: takes a dtype and a case; returns arguments of the operation for which a wrong
            kernel shows, and the last value of the right result.
        case: takes the function's arguments and returns what decides whether the kernel is wrong;
            False where it cannot be wrong.
        cases: what `case` returns for the arguments for which most such kernels are wrong.
        correct: takes the function and its arguments, and computes the right result. Defaults to
            computing in float32 and rounding once.
        wrong_in_xla: dtypes in which XLA is wrong, on every machine.
        autocasts: whether a region of `autocast` runs it in 16 bits.
    """

    module: str
    names: tuple[str, ...]
    example: Callable[[tf.DType, Any], tuple[dict[str, Any], float]]
    case: Callable[..., Any] = lambda *args, **kwargs: None
    cases: tuple[Any, ...] = (None,)
    correct: Callable[..., Any] | None = None
    wrong_in_xla: tuple[tf.DType, ...] = ()
    autocasts: bool = False

    def function(self) -> Callable[..., Any] | None:
        """Returns its Python function, replaced or not; None where TensorFlow has none."""
        module = importlib.import_module(f"tensorflow.python.ops.{self.module}")
        return vars(module).get(self.names[0])


class Table:
    """Kernels that are replaced together.

    Attributes:
        kernels: mapping of types of operations to `Kernel`s.
        enabled: bool. False gives TensorFlow's own results.

    Args:
        kernels: the mapping.
        harm: str. What may happen where TensorFlow has no such function; ends a warning.
        asks: takes an operation, its example, a dtype, a case and a type of device, and tells
            whether the kernel is to be replaced. Defaults to whether its result is wrong.
    """

    def __init__(
        self,
        kernels: Mapping[str, Kernel],
        harm: str,
        asks: Callable[..., bool] | None = None,
    ) -> None:
        self.kernels, self.enabled = kernels, True
        self._harm, self._installed, self._lock = harm, False, threading.Lock()
        self._asks = asks

    def install(self) -> None:
        """Replaces TensorFlow's functions, once in a process. Computes nothing."""
        if self._installed:
            return
        with self._lock:
            if self._installed:
                return
            for op, kernel in self.kernels.items():
                own = kernel.function()
                if own is None:
                    messages.warn(
                        f"TensorFlow {tf.__version__} has no `{kernel.module}.{kernel.names[0]}`, "
                        f"so its kernel {op!r} is left as it is, {self._harm}."
                    )
                    continue
                _replace(own, kernel.names, self._corrected(op, own))
            self._installed = True

    def is_wrong(self, op: str, dtype: Any, case: Any = None, device: str | None = None) -> bool:
        """Whether a kernel is wrong in one of the ways in which this program may compute it.

        Args:
            op: str. A key of `kernels`.
            dtype: DType or str. Of what it is given.
            case: what the kernel's `case` returned.
            device: str. The type of the device; by default that on which TensorFlow would compute.

        Returns:
            bool. False also where TensorFlow cannot compute it at all.
        """
        dtype = tf.as_dtype(dtype)
        if dtype not in LOW_PRECISION or case is False:
            return False
        kernel = self.kernels[op]
        if dtype in kernel.wrong_in_xla:
            return True
        asks = self._asks or _ask
        return asks(op, kernel.example, dtype, case, device or _usual_device())

    def _corrected(self, op: str, own: Callable[..., Any]) -> Callable[..., Any]:
        kernel = self.kernels[op]
        correct = kernel.correct or in_float32

        @functools.wraps(own)
        @do_not_convert
        def call(*args: Any, **kwargs: Any) -> Any:
            first = _first_in_low_precision(args, kwargs)
            dtype, region = getattr(first, "dtype", None), regions.current()
            if dtype is None and kernel.autocasts and region is not None:
                dtype = region.dtype
            if dtype is None or not self.enabled:
                return own(*args, **kwargs)
            case = kernel.case(*args, **kwargs)
            if not self.is_wrong(op, dtype, case, device_type()):
                return own(*args, **kwargs)
            return correct(own, *args, **kwargs)

        return call


def _replace(own: Any, names: tuple[str, ...], corrected: Any) -> None:
    """Replaces a function wherever TensorFlow has it: modules import it from one another."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "tensorflow":
            for name in names:
                if vars(module).get(name) is own:
                    setattr(module, name, corrected)


def _is_low_precision(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and (tf.bfloat16 == dtype or tf.float16 == dtype)


def _first_in_low_precision(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for value in (*args, *kwargs.values()):
        # `tf.einsum` takes a list.
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if _is_low_precision(each):
                return each
    return None


def in_float32(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Computes with float32 in the place of what is 16-bit, and rounds the result.

    Of several results it is the first: batch normalization has statistics, in float32 anyway.
    """
    dtype = tf.as_dtype(_first_in_low_precision(args, kwargs).dtype)

    def as_float32(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [as_float32(each) for each in value]
        return tf.cast(value, tf.float32) if _is_low_precision(value) else value

    result = own(*map(as_float32, args), **{name: as_float32(x) for name, x in kwargs.items()})
    if not isinstance(result, tuple):
        return tf.cast(result, dtype)
    return type(result)(tf.cast(result[0], dtype), *result[1:])


def device_type() -> str:
    """The type of the device that will run an operation that is made now.

    Where its inputs are does not count: TensorFlow copies them. Of a function that is traced, its
    own `tf.device`s are known, and not that around a call, as it may be another in the next one.
    """
    usual = _usual_device()
    if usual == "CPU":
        return usual
    if tf.executing_eagerly():
        name = tf.__internal__.eager_context.get_device_name()
    else:
        name = tf.no_op().device
    return tf.DeviceSpec.from_string(name or "").device_type or usual


@functools.cache
def _usual_device() -> str:
    """The type of the device on which TensorFlow computes where the program names none."""
    return "GPU" if tf.config.list_logical_devices("GPU") else "CPU"


@functools.cache
def _ask(op: str, example: Callable[..., Any], dtype: tf.DType, case: Any, device: str) -> bool:
    """Whether the kernel is wrong that computes an operation in eager, TensorFlow's or oneDNN's."""
    with tf.init_scope(), regions.none():
        is_graph = not tf.executing_eagerly()
        if is_graph and device != "CPU":
            # A session would take memory in its own way, and a right result does no harm.
            return True
        try:
            with tf.Graph().as_default() if is_graph else contextlib.nullcontext() as graph:
                with tf.device(f"{device}:0"):
                    arguments, expected = example(dtype, case)
                    found = last_value(getattr(tf.raw_ops, op)(**arguments))
                if is_graph:
                    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
                    with tf.compat.v1.Session(graph=graph, config=config) as session:
                        found = session.run(found)
            return not is_right(float(found), expected)
        except (tf.errors.OpError, ValueError):
            return False


def is_right(found: float, expected: float) -> bool:
    """Whether an example's result is right. Wrong ones are off by a half or more, or NaN."""
    return abs(found / expected - 1) < 0.05


def last_value(result: Any) -> tf.Tensor:
    """The last value of a tensor, or of the first of several: what `Kernel.example` tells."""
    first, *_ = tf.nest.flatten(result)
    return tf.reshape(first, [-1])[-1]
