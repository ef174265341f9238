"""The dtypes that are fast on this machine, and a warning where one is slow.

RFC 293, "Dtype policies overview": a warning where "mixed_float16" or "mixed_bfloat16" meets
hardware that does not support it. The compute capabilities of GPUs and the flags of the CPU tell.
Nothing is measured, so two runs of a program, on machines of one kind, are the same. This
subpackage needs TensorFlow only.
"""

import copy
import functools
import threading
from concurrent import futures

import tensorflow as tf

from keras_mp.hardware import devices, stopwatch
from keras_mp.support import cpu, messages

_lock = threading.Lock()
# The dtypes of policies that were fast so far, and those that need no more warning.
_waiting: set[str] = set()
_settled: set[str] = set()


def best_policy() -> str:
    """Returns the name of the policy that is fastest on this machine and sound.

    "mixed_float16" where the slowest GPU has a compute capability of 7; "mixed_bfloat16" from 8 on
    and on TPUs; on CPUs "mixed_bfloat16" if TensorFlow uses bfloat16 units of the CPU; and else
    "float32".

    It is a function that returns a name, and not a policy "mixed_auto": what a model or a
    checkpoint means must not depend on the machine that loads it.

    Returns:
        "mixed_float16", "mixed_bfloat16" or "float32".

    Example:

    >>> keras_mp.set_global_policy(keras_mp.hardware.best_policy())
    """
    return devices.best_policy()[0]


def warn_if_slow(dtype: str | None = None) -> None:
    """Warns if computing in a dtype is slow here, once per process and dtype.

    A `keras_mp.Policy` calls it. `Model.compile`, `keras_mp.GradScaler` and
    `keras_mp.LossScaleOptimizer` call it again for the dtypes of all policies, when they are made:
    a program may hide a device after its first line.

    Args:
        dtype: str, "float16" or "bfloat16"; or None (the default) for those of all policies.

    Raises:
        ValueError: `dtype` is another one.

    Example:

    >>> keras_mp.hardware.warn_if_slow("float16")

    Source: RFC 293, "Dtype policies overview".
    """
    with _lock:
        asked = ({*_waiting} if dtype is None else {_checked(dtype)}) - _settled
        _waiting.update(asked)
        slow = {each: why for each in sorted(asked) if (why := devices.why_slow(each))}
        _settled.update(slow)
    for each, reason in slow.items():
        messages.warn(
            f"mixed_{each} may run slower than float32 on this machine: {reason} Results are "
            "right either way. Ignore this if the computation runs on devices that are not "
            "attached to this machine."
        )


def why_slow(dtype: str) -> str | None:
    """Returns the reason why computing in `dtype` is slow on this machine, or None.

    Args:
        dtype: str, "float16" or "bfloat16".

    Returns:
        A sentence, or None where it is not slow: float16 on GPUs of compute capability 7.0 and
        above; bfloat16 on GPUs of 8.0 and above, on TPUs, and on CPUs with units for it that
        TensorFlow uses.

    Raises:
        ValueError: `dtype` is another one.

    Example:

    >>> keras_mp.hardware.why_slow("float16") is None or "float16" in (
    ...     keras_mp.hardware.why_slow("float16"))
    True
    """
    return devices.why_slow(_checked(dtype))


def speeds(anew: bool = False) -> stopwatch.Speeds | None:
    """Measures how fast the first GPU, or else the CPU, trains.

    It trains with products and convolutions. What is timed is the forward pass and both gradients,
    with those in float32 inside that keras_mp computes so on this CPU, since their own kernels are
    slower. That takes part of a second, once in a process. Measuring initializes
    TensorFlow: configure devices and threads before. It is for people who want to know, as
    `keras_mp.numerics.profile` does for them; nothing that computes depends on it.

    Args:
        anew: bool. Measures even if this process has measured before. Defaults to False.

    Returns:
        dict of dicts: floating-point operations a second by operation, "matrix product" and
        "convolution", and dtype, "float32", "bfloat16" and "float16". None on a TPU, in a graph of
        TensorFlow 1, in a replica's thread, and where the device cannot compute one of them.

    Example:

    >>> speeds = keras_mp.hardware.speeds()
    >>> list(speeds), list(speeds["convolution"])
    (['matrix product', 'convolution'], ['float32', 'bfloat16', 'float16'])
    """
    if devices.has_tpu() or not _can_measure_now():
        return None
    with _measuring:  # Two measurements at once would disturb each other.
        if anew:
            _measured.cache_clear()
        return copy.deepcopy(_measured("GPU:0" if devices.gpus() else "CPU:0"))


_measuring = threading.Lock()


def _can_measure_now() -> bool:
    """Whether this is no graph of TensorFlow 1, and not one of several replicas."""
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        return False
    with tf.init_scope():
        return tf.executing_eagerly()


@functools.cache
def _measured(device: str) -> stopwatch.Speeds | None:
    try:
        # A thread of its own is in eager, and in no region, layer or tape of the program.
        with futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(stopwatch.measure, device).result()
    except tf.errors.OpError:  # No kernel, or no memory: then nothing can be said.
        return None


def has_tensor_cores(dtype: str) -> bool:
    """Whether a GPU of this machine multiplies matrices of `dtype` in tensor cores.

    Devices are listed, not initialized.

    Args:
        dtype: str, "float16" or "bfloat16".

    Raises:
        ValueError: `dtype` is another one.

    Example:

    >>> keras_mp.hardware.has_tensor_cores("float16") == (
    ...     bool(tf.config.list_physical_devices("GPU"))
    ...     and keras_mp.hardware.why_slow("float16") is None)
    True
    """
    needed = devices.COMPUTE_CAPABILITY[_checked(dtype)]
    return any((gpu.capability or (0, 0)) >= needed for gpu in devices.gpus())


def cpu_has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16.

    These are AVX512-BF16, AMX-BF16 or Arm BF16. That does not make it fast: see `speeds`.

    Example:

    >>> isinstance(keras_mp.hardware.cpu_has_bfloat16(), bool)
    True
    """
    return cpu.has_instructions("bfloat16")


def cpu_has_float16() -> bool:
    """Whether the CPU has instructions for float16 (AVX512-FP16 or AMX-FP16).

    That does not make it fast: see `speeds`.

    Example:

    >>> isinstance(keras_mp.hardware.cpu_has_float16(), bool)
    True
    """
    return cpu.has_instructions("float16")


def cpu_takes_float16_rewrite() -> bool:
    """Whether TensorFlow's graph rewrite goes to float16 on this CPU.

    It does where oneDNN is on and the CPU has AMX-FP16 or AVX-NE-CONVERT. It asks for no other
    float16 instructions, AVX512-FP16 among them.

    Example:

    >>> isinstance(keras_mp.hardware.cpu_takes_float16_rewrite(), bool)
    True

    Source: TensorFlow, `auto_mixed_precision.cc` of grappler.
    """
    return cpu.takes_rewrite("float16")


def _checked(dtype: str) -> str:
    if dtype not in devices.COMPUTE_CAPABILITY:
        raise ValueError(f"Expected 'float16' or 'bfloat16'. Received: dtype={dtype!r}")
    return dtype
