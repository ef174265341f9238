"""Is this machine fast with float16 or bfloat16? If not, say so once.

RFC 293, "Dtype policies overview": a warning where "mixed_float16" or "mixed_bfloat16" meets
hardware that does not support it. This module needs TensorFlow only.
"""

import pathlib
import platform
import threading

import tensorflow as tf

from keras_mp import messages

_COMPUTE_CAPABILITY = {"float16": (7, 0), "bfloat16": (8, 0)}
_CPU_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}

_warned: set[str] = set()
_lock = threading.Lock()


def warn_if_slow(dtype: str) -> None:
    """Warns, once per process and dtype, where computing in `dtype` brings no speed here.

    Args:
        dtype: str, "float16" or "bfloat16".

    Example:

    >>> keras_mp.hardware.warn_if_slow("float16")

    Source: RFC 293, "Dtype policies overview".
    """
    with _lock:
        if dtype in _warned:
            return
        _warned.add(dtype)
    reason = why_slow(dtype)
    if reason is not None:
        messages.warn(
            f"mixed_{dtype} may run slower than float32 on this machine: {reason} Results are "
            "right all the same. Ignore this if the computation runs on devices that are not "
            "attached to this machine."
        )


def why_slow(dtype: str) -> str | None:
    """Says why computing in `dtype` is not fast on this machine.

    Devices are listed, not initialized, so a program may still configure them afterwards.

    Args:
        dtype: str, "float16" or "bfloat16".

    Returns:
        A sentence, or None where it is fast: float16 on GPUs of compute capability 7.0 and above;
        bfloat16 on GPUs of 8.0 and above, on TPUs and on CPUs with native bfloat16 instructions.

    Example:

    >>> keras_mp.hardware.why_slow("float16") is None or "float16 needs" in (
    ...     keras_mp.hardware.why_slow("float16"))
    True
    """
    needed = _COMPUTE_CAPABILITY[dtype]
    if dtype == "bfloat16" and tf.config.list_physical_devices("TPU"):
        return None
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus and dtype == "bfloat16" and cpu_has_bfloat16():
        return None
    needs = (
        f"{dtype} needs {'an Nvidia GPU' if dtype == 'float16' else 'a GPU'} of compute capability"
    )
    needs += f" {needed[0]}.{needed[1]} or above"
    if dtype == "bfloat16":
        needs += ", a TPU or a CPU with native bfloat16 instructions"
    if not gpus:
        return f"{needs}, and there is none."
    slow = [
        description
        for capability, description in map(_describe, gpus)
        if capability is None or capability < needed
    ]
    return f"{needs}, and there is {', '.join(slow)}." if slow else None


def cpu_has_bfloat16() -> bool:
    """Tells whether the CPU multiplies bfloat16 natively (AVX512-BF16, AMX-BF16 or Arm BF16).

    Example:

    >>> isinstance(keras_mp.hardware.cpu_has_bfloat16(), bool)
    True
    """
    if platform.system() == "Darwin":
        # From the M2 on; neither TensorFlow nor Python says which chip it is without asking sysctl,
        # and TensorFlow's CPU kernels do not use the instructions there.
        return False
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    for line in text.splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _CPU_FLAGS.isdisjoint(values.split())
    return False


def _describe(gpu: tf.config.PhysicalDevice) -> tuple[tuple[int, int] | None, str]:
    details = tf.config.experimental.get_device_details(gpu)
    name = details.get("device_name", "a GPU of unknown name")
    capability = details.get("compute_capability")
    if capability is None:
        return None, f"{name} (no compute capability: probably not an Nvidia GPU)"
    return capability, f"{name} (compute capability {capability[0]}.{capability[1]})"
