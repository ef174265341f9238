"""Kernels of TensorFlow that may be wrong in 16 bits, and are tried out.

A kernel counts as wrong if it is wrong in any way in which the program may compute it on this
machine. TensorFlow's own kernel or oneDNN's is tried out. XLA's is known: it does not depend on the
machine, and trying it out would take a compilation for each kernel. The door (`kernels/door.py`)
asks for each operation in reach, those of gradient functions included.

This module needs TensorFlow only.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.hooks import reach
from keras_mp.support.dtypes import LOW_PRECISION
from keras_mp.tensorflow_api import operations

# From here on, float16 has every second whole number only.
_FLOAT16_COUNTS_TO = 2048


class Kernel(NamedTuple):
    """A kernel that may be wrong in 16 bits.

    Attributes:
        example: takes a dtype and a case; returns arguments of the operation for which the result
            of a wrong kernel shows.
        expected: float. The last value of the right result.
        case: takes the function's arguments by name and returns what decides whether the kernel is
            wrong; False where it cannot be wrong.
        cases: what `case` returns for the arguments for which most such kernels are wrong.
        wrong_in_xla: dtypes in which XLA is wrong, on every machine.
        terms: takes the same and returns how many numbers it adds up for each that it returns, or
            None if that is not known. Defaults to None, for no sums.
    """

    example: Callable[[tf.DType, Any], dict[str, Any]]
    expected: float
    case: Callable[..., Any] = lambda **arguments: None
    cases: tuple[Any, ...] = (None,)
    wrong_in_xla: tuple[tf.DType, ...] = ()
    terms: Callable[..., int | None] | None = None


class Table:
    """Kernels that may be wrong for one reason.

    Attributes:
        kernels: mapping of types of operations to `Kernel`s.
        enabled: bool. False gives TensorFlow's own results.

    Args:
        kernels: the mapping.
    """

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        self.kernels, self.enabled = kernels, True
        self._asks = is_result_wrong

    def is_wrong(
        self, op: str, dtype: tf.DType | str, case: Any = None, device: str | None = None
    ) -> bool:
        """Whether a kernel is wrong in some way in which this program may compute it.

        Args:
            op: str. A key of `kernels`.
            dtype: DType or str. The dtype of the inputs.
            case: the result of the kernel's `case`.
            device: str. The type of the device; by default that on which TensorFlow would compute.

        Returns:
            bool. False also where TensorFlow cannot compute it at all.
        """
        dtype = tf.as_dtype(dtype)
        return dtype in LOW_PRECISION and self._is_wrong(op, dtype, case, device or usual_device())

    def is_wrong_for(self, op: str, dtype: tf.DType, arguments: Mapping[str, Any]) -> bool:
        """Whether a kernel is wrong for the arguments of an operation.

        Args:
            op: str. A key of `kernels`.
            dtype: the 16-bit DType of its inputs.
            arguments: those of its public function by name.
        """
        if not self.enabled:
            return False
        kernel, device = self.kernels[op], device_type()
        is_wrong = self._is_wrong(op, dtype, kernel.case(**arguments), device)
        return is_wrong or _is_long(kernel, dtype, device, arguments)

    def _is_wrong(self, op: str, dtype: tf.DType, case: Any, device: str) -> bool:
        if case is False:
            return False
        kernel = self.kernels[op]
        return dtype in kernel.wrong_in_xla or self._asks(op, kernel, dtype, case, device)


def _is_long(kernel: Kernel, dtype: tf.DType, device: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a sum on a GPU may have more terms than float16 counts.

    Which part of such a sum a GPU's kernel adds up in float16 depends on its shape, and an example
    has only one.
    """
    if kernel.terms is None or dtype != tf.float16 or device == "CPU":
        return False
    terms = kernel.terms(**arguments)
    return terms is None or terms > _FLOAT16_COUNTS_TO


def in_its_module(public: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function behind a public one, which the modules of TensorFlow call."""
    return getattr(sys.modules[public.__module__], public.__name__)


def shape_of(value: object) -> tf.TensorShape:
    """Returns the static shape of an argument, which is unknown if it is not a tensor."""
    shape: Any = getattr(value, "shape", None)
    return shape if isinstance(shape, tf.TensorShape) else tf.TensorShape(shape)


def device_type() -> str:
    """Returns the type of the device that will run an operation that is made now.

    The devices of its inputs do not count: TensorFlow copies them. In a function that is traced,
    the function's own `tf.device`s are known. One around the call is not: the next call may be
    inside another one.
    """
    usual = usual_device()
    if usual == "CPU":
        return usual
    if tf.executing_eagerly():
        is_known = operations.device_name.is_there()
        name = operations.device_name() if is_known else tf.zeros([]).device
    else:
        name = tf.no_op().device
    return tf.DeviceSpec.from_string(name or "").device_type or usual


@functools.cache
def usual_device() -> str:
    """Returns the type of the device that TensorFlow uses if the program names none."""
    return "GPU" if tf.config.list_logical_devices("GPU") else "CPU"


@functools.cache
def is_result_wrong(op: str, kernel: Kernel, dtype: tf.DType, case: Any, device: str) -> bool:
    """Whether the kernel that computes an operation in eager is wrong.

    It is TensorFlow's kernel, or oneDNN's.
    """
    with tf.init_scope(), reach.without_region(), reach.entered(None):
        is_graph = not tf.executing_eagerly()
        if is_graph and device != "CPU":
            # A session would take memory in its own way, and a right result does no harm.
            return True
        try:
            with tf.Graph().as_default() if is_graph else contextlib.nullcontext() as graph:
                with tf.device(f"{device}:0"):
                    compute = getattr(tf.raw_ops, op)
                    found = last_value(compute(**kernel.example(dtype, case)))
                if is_graph:
                    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
                    with tf.compat.v1.Session(graph=graph, config=config) as session:
                        found = session.run(found)
            return not is_right(float(found), kernel.expected)
        except (tf.errors.OpError, ValueError):
            return False


def is_right(found: float, expected: float) -> bool:
    """Whether an example's result is right.

    Wrong results are off by a half or more, or NaN.
    """
    return abs(found / expected - 1) < 0.05


def last_value(result: object) -> tf.Tensor:
    """Returns the last value of a tensor, or of the first of several.

    It is compared with `Kernel.expected`.
    """
    first, *_ = tf.nest.flatten(result)
    return tf.reshape(first, [-1])[-1]
