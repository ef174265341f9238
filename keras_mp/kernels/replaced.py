"""Python functions of TensorFlow that are replaced where the kernel behind them is wrong.

Whoever needs an operation, gradient functions included, calls the Python function that TensorFlow
generates for it. So a replaced function reaches forward and backward passes, eager code and graphs.
Each replacement asks the running TensorFlow whether its kernel is wrong, and steps aside where it
is right or has not been given 16-bit numbers.

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
        probe: takes a dtype and what `pattern` returned; returns a result and what it should be.
        pattern: takes the function's arguments and returns what the answer depends on; False where
            the kernel cannot be wrong.
        right: takes the function and its arguments, and computes what is right. By default with
            float32 in the place of what is 16-bit, rounded once.
        autocasts: Does a region of `autocast` run it in 16 bits?
    """

    module: str
    names: tuple[str, ...]
    probe: Callable[[tf.DType, Any], tuple[tf.Tensor, float]]
    pattern: Callable[..., Any] = lambda *args, **kwargs: None
    right: Callable[..., Any] | None = None
    autocasts: bool = False


class Table:
    """Kernels that are replaced together.

    Attributes:
        kernels: mapping of types of operations to `Kernel`s.
        enabled: bool. False gives TensorFlow's own results.

    Args:
        kernels: the mapping.
        harm: str. What may happen where TensorFlow has no such function; ends a warning.
    """

    def __init__(self, kernels: Mapping[str, Kernel], harm: str) -> None:
        self.kernels, self.enabled = kernels, True
        self._harm, self._installed, self._lock = harm, False, threading.Lock()

    def install(self) -> None:
        """Replaces TensorFlow's functions, once in a process. Computes nothing."""
        if self._installed:
            return
        with self._lock:
            if self._installed:
                return
            for op, kernel in self.kernels.items():
                module = importlib.import_module(f"tensorflow.python.ops.{kernel.module}")
                stock = vars(module).get(kernel.names[0])
                if stock is None:
                    messages.warn(
                        f"TensorFlow {tf.__version__} has no `{kernel.module}.{kernel.names[0]}`, "
                        f"so its kernel {op!r} is left as it is, {self._harm}."
                    )
                    continue
                _replace(stock, kernel.names, self._mended(op, stock))
            self._installed = True

    def is_wrong(self, op: str, dtype: Any, pattern: Any = None, device: str | None = None) -> bool:
        """Asks the running TensorFlow whether a kernel is wrong.

        Args:
            op: str. A key of `kernels`.
            dtype: DType or str. Of what it is given.
            pattern: what the kernel's `pattern` returned.
            device: str. The type of the device; by default that on which TensorFlow would compute.

        Returns:
            bool. False also where TensorFlow cannot compute it at all.
        """
        dtype = tf.as_dtype(dtype)
        if dtype not in LOW_PRECISION or pattern is False:
            return False
        return _ask(self.kernels[op].probe, dtype, pattern, device or _usual_device())

    def _mended(self, op: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        kernel = self.kernels[op]
        right = kernel.right or in_float32

        @functools.wraps(stock)
        @do_not_convert
        def call(*args: Any, **kwargs: Any) -> Any:
            half = _first_half(args, kwargs)
            dtype, region = getattr(half, "dtype", None), regions.current()
            if dtype is None and kernel.autocasts and region is not None:
                dtype = region.dtype
            if dtype is None or not self.enabled:
                return stock(*args, **kwargs)
            pattern = kernel.pattern(*args, **kwargs)
            if not self.is_wrong(op, dtype, pattern, _device_type(half)):
                return stock(*args, **kwargs)
            return right(stock, *args, **kwargs)

        return call


def _replace(stock: Any, names: tuple[str, ...], mended: Any) -> None:
    """Wherever TensorFlow has put the function: modules import it from one another by name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "tensorflow":
            for name in names:
                if vars(module).get(name) is stock:
                    setattr(module, name, mended)


def _is_half(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and (tf.bfloat16 == dtype or tf.float16 == dtype)


def _first_half(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next((x for x in (*args, *kwargs.values()) if _is_half(x)), None)


def in_float32(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Computes with float32 in the place of what is 16-bit, and rounds the result."""
    dtype = tf.as_dtype(_first_half(args, kwargs).dtype)

    def widen(value: Any) -> Any:
        return tf.cast(value, tf.float32) if _is_half(value) else value

    result = stock(*map(widen, args), **{name: widen(x) for name, x in kwargs.items()})
    return tf.cast(result, dtype)


def _device_type(tensor: Any) -> str | None:
    device = getattr(tensor, "device", None)
    return tf.DeviceSpec.from_string(device).device_type if isinstance(device, str) else None


@functools.cache
def _usual_device() -> str:
    return "GPU" if tf.config.list_logical_devices("GPU") else "CPU"


@functools.cache
def _ask(probe: Callable[..., Any], dtype: tf.DType, pattern: Any, device: str) -> bool:
    with tf.init_scope(), regions.none():
        is_graph = not tf.executing_eagerly()
        if is_graph and device != "CPU":
            return (
                True  # A session would take memory in its own way, and a right result harms nobody.
            )
        try:
            with tf.Graph().as_default() if is_graph else contextlib.nullcontext() as graph:
                with tf.device(f"{device}:0"):
                    found, expected = probe(dtype, pattern)
                if is_graph:
                    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
                    with tf.compat.v1.Session(graph=graph, config=config) as session:
                        found = session.run(found)
            # Wrong ones are off by a half or more, and NaN is not right.
            return not abs(float(found) / expected - 1) < 0.05
        except (tf.errors.OpError, ValueError):
            return False
