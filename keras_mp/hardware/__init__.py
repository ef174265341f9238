"""The speed of this machine in float16 and bfloat16, and a warning where it is slow.

RFC 293, "Dtype policies overview": a warning where "mixed_float16" or "mixed_bfloat16" meets
hardware that does not support it. For Nvidia GPUs and for TPUs there is a table. CPUs and
other GPUs have to be timed: of two CPUs with the same flags, one is twice as fast in bfloat16 as in
float32, and the other half as fast. `python -m keras_mp.hardware` prints what it finds here. This
subpackage needs TensorFlow only.
"""

import threading

from keras_mp.hardware import devices, fast_dtypes
from keras_mp.hardware.stopwatch import Speeds
from keras_mp.support import host, messages

_lock = threading.Lock()
# The dtypes of global policies that wait for a measurement, and those that need no more warning.
_waiting: set[str] = set()
_settled: set[str] = set()


def best_policy() -> str:
    """Returns the name of the policy that is fastest on this machine and sound.

    "mixed_float16" where the slowest GPU has a compute capability of 7; "mixed_bfloat16" from 8 on
    and on TPUs; elsewhere "mixed_bfloat16" if it is measured to be faster than float32, as `speeds`
    says, and else "float32".

    It is a function that returns a name, and not a policy "mixed_auto": what a model or a
    checkpoint means must not depend on the machine that loads it.

    Returns:
        "mixed_float16", "mixed_bfloat16" or "float32".

    Example:

    >>> keras_mp.set_global_policy(keras_mp.hardware.best_policy())
    """
    return fast_dtypes.best_policy()[0]


def measure_later(dtype: str) -> None:
    """Makes the next `warn_if_slow()` measure how fast a dtype is.

    `keras_mp.set_global_policy` calls it. That is often a program's first line, when devices may
    still be configured, and to measure initializes them.

    Args:
        dtype: str, "float16" or "bfloat16".

    Example:

    >>> keras_mp.hardware.measure_later("bfloat16")
    """
    with _lock:
        _waiting.update({_checked(dtype)} - _settled)


def warn_if_slow(dtype: str | None = None, measure: bool = True) -> None:
    """Warns, once per process and dtype, if computing in `dtype` is slow on this machine.

    A `keras_mp.Policy` calls it with `measure=False`. `Model.compile`, `keras_mp.GradScaler` and
    `keras_mp.LossScaleOptimizer` call it for the dtypes of global policies, when they are made.

    Args:
        dtype: str, "float16" or "bfloat16"; or None (the default) for those of global policies.
        measure: bool. Whether this machine may be measured, if it has not been. False judges by
            tables and by earlier measurements, and initializes nothing. Defaults to True.

    Raises:
        ValueError: `dtype` is another one.

    Example:

    >>> keras_mp.hardware.warn_if_slow("float16")

    Source: RFC 293, "Dtype policies overview".
    """
    with _lock:
        asked = (_waiting if dtype is None else {_checked(dtype)}) - _settled
    if not asked:
        return
    measured = None
    if fast_dtypes.needs_speeds():
        measured = fast_dtypes.speeds(measure)
        if measured is None:
            return
    for each in sorted(asked):
        reason = fast_dtypes.why_slow(each, measured)
        if reason is None and (not measure or host.in_v1_graph()):
            continue  # The program may still hide devices, or leave a graph of TensorFlow 1.
        with _lock:
            is_first = each not in _settled
            _settled.add(each)
            _waiting.discard(each)
        if reason is not None and is_first:
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
        A sentence, or None where it is fast: float16 on GPUs of compute capability 7.0 and above;
        bfloat16 on GPUs of 8.0 and above and on TPUs. On CPUs and on other GPUs, where neither
        matrix products nor convolutions are slower than 0.85 times float32's speed, as `speeds`
        says. If that says nothing, bfloat16 counts as fast on CPUs that have instructions for it.

    Raises:
        ValueError: `dtype` is another one.

    Example:

    >>> keras_mp.hardware.why_slow("float16") is None or "float16" in (
    ...     keras_mp.hardware.why_slow("float16"))
    True
    """
    _checked(dtype)
    measured = fast_dtypes.speeds() if fast_dtypes.needs_speeds() else None
    return fast_dtypes.why_slow(dtype, measured)


def speeds(anew: bool = False) -> Speeds | None:
    """Returns how fast the first GPU, or else the CPU, trains with products and convolutions.

    What is timed is the forward pass and both gradients, with those convolutions in float32 inside
    that keras_mp computes so on this CPU, since their own kernels are slower. That is measured
    once in a process, in part of a second, for this CPU, device, TensorFlow and number of threads.
    Measuring initializes TensorFlow: configure devices and threads before.
    `python -m keras_mp.hardware` remembers it for later programs in `$XDG_CACHE_HOME/keras_mp`
    (`~/.cache/keras_mp`), and so does each program for which the environment variable
    `KERAS_MP_CACHE` names a folder. Nothing else writes a file.

    With the environment variable `KERAS_MP_MEASURE=0` nothing but this function measures, and
    nothing is read or remembered.

    Args:
        anew: bool. Measures even if something is remembered, and replaces that. Defaults to False.

    Returns:
        dict of dicts: floating-point operations a second by operation, "matrix product" and
        "convolution", and dtype, "float32", "bfloat16" and "float16". None on a TPU, in a graph of
        TensorFlow 1, in a replica's thread, and where the device cannot compute one of them.

    Example:

    >>> speeds = keras_mp.hardware.speeds()
    >>> list(speeds), list(speeds["convolution"])
    (['matrix product', 'convolution'], ['float32', 'bfloat16', 'float16'])
    """
    return fast_dtypes.speeds(anew=anew)


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
    """Whether the CPU has instructions for bfloat16 (AVX512-BF16, AMX-BF16 or Arm BF16).

    That does not make it fast: see `speeds`.

    Example:

    >>> isinstance(keras_mp.hardware.cpu_has_bfloat16(), bool)
    True
    """
    return devices.cpu_has("bfloat16")


def cpu_has_float16() -> bool:
    """Whether the CPU has instructions for float16 (AVX512-FP16 or AMX-FP16).

    That does not make it fast: see `speeds`.

    Example:

    >>> isinstance(keras_mp.hardware.cpu_has_float16(), bool)
    True
    """
    return devices.cpu_has("float16")


def cpu_takes_float16_rewrite() -> bool:
    """Whether TensorFlow's graph rewrite goes to float16 on this CPU.

    It does where oneDNN is on and the CPU has AMX-FP16 or AVX-NE-CONVERT. It asks for no other
    float16 instructions, AVX512-FP16 among them.

    Example:

    >>> isinstance(keras_mp.hardware.cpu_takes_float16_rewrite(), bool)
    True

    Source: TensorFlow, `auto_mixed_precision.cc` of grappler.
    """
    return devices.takes_float16_rewrite()


def _checked(dtype: str) -> str:
    if dtype not in devices.COMPUTE_CAPABILITY:
        raise ValueError(f"Expected 'float16' or 'bfloat16'. Received: dtype={dtype!r}")
    return dtype
