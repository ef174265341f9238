"""The devices of this machine, and tables of what they are fast at. Initializes nothing."""

import os
import pathlib
import platform
from typing import NamedTuple

import tensorflow as tf

from keras_mp.support import onednn

COMPUTE_CAPABILITY = {"float16": (7, 0), "bfloat16": (8, 0)}
_CPU_FLAGS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16"},
}
# Units for 16-bit floating point by flag, each with what it is called and the lowest limit of
# ONEDNN_MAX_CPU_ISA under which oneDNN uses it, if that is an x86 unit.
_UNITS = {
    "avx512_bf16": ("AVX512-BF16", "AVX512_CORE_BF16"),
    "avx512_fp16": ("AVX512-FP16", "AVX512_CORE_FP16"),
    "amx_bf16": ("AMX-BF16", "AVX512_CORE_AMX"),
    "amx_fp16": ("AMX-FP16", "AVX512_CORE_AMX_FP16"),
    "avx_ne_convert": ("AVX-NE-CONVERT", "AVX2_VNNI_2"),
    "bf16": ("Arm BF16", None),
}
_ISA_LIMITS = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"),
    *("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16"),
)
# oneDNN's newer names.
_AVX10_LIMITS = {
    "AVX10_1_512": "AVX512_CORE_FP16",
    "AVX10_1_512_AMX": "AVX512_CORE_AMX",
    "AVX10_1_512_AMX_FP16": "AVX512_CORE_AMX_FP16",
}
_REWRITE_FLAGS = {"amx_fp16", "avx_ne_convert"}
_CPU_FIELDS = ("model name", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")


class Gpu(NamedTuple):
    """A GPU that TensorFlow sees.

    Attributes:
        name: str.
        capability: two ints, or None if it has none: probably it is not of Nvidia.
    """

    name: str
    capability: tuple[int, int] | None

    def __str__(self) -> str:
        if self.capability is None:
            return f"{self.name} (no compute capability: probably not an Nvidia GPU)"
        return f"{self.name} (compute capability {'.'.join(map(str, self.capability))})"


def gpus() -> list[Gpu]:
    """Returns the GPUs that the program computes on."""
    found = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    return [
        Gpu(details.get("device_name", "a GPU of unknown name"), details.get("compute_capability"))
        for details in found
    ]


def has_tpu() -> bool:
    """Whether the program sees a TPU."""
    return bool(tf.config.get_visible_devices("TPU"))


def are_in_tables() -> bool:
    """Whether all devices here are in the tables; if not, they have to be timed."""
    found = gpus()
    return has_tpu() or (bool(found) and all(gpu.capability is not None for gpu in found))


def cpu_info() -> dict[str, str]:
    """Returns the model and the flags of the first CPU on Linux, and nothing elsewhere."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = [line.partition(":") for line in text.partition("\n\n")[0].splitlines()]
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return {name: fields[name] for name in _CPU_FIELDS if name in fields}


def cpu_name() -> str:
    """Returns the CPU's model, as far as the operating system tells."""
    return cpu_info().get("model name") or platform.processor() or platform.machine()


def cpu_has(dtype: str) -> bool:
    """Whether the CPU has native instructions for a dtype, so that it could be fast.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    # On macOS they are there from the M2 on; neither TensorFlow nor Python says which chip it is
    # without asking sysctl, and TensorFlow's CPU kernels do not use them there.
    return not _CPU_FLAGS[dtype].isdisjoint(_flags())


def cpu_units() -> tuple[list[str], list[str]]:
    """Returns the CPU's units for 16-bit floating point, and those that TensorFlow uses.

    Returns:
        tuple of two lists of names, such as "AVX512-BF16". What TensorFlow uses are those that its
        oneDNN uses, as the environment variables TF_ENABLE_ONEDNN_OPTS and ONEDNN_MAX_CPU_ISA let.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    limit = _AVX10_LIMITS.get(limit, limit)
    allowed = _ISA_LIMITS[: _ISA_LIMITS.index(limit) + 1] if limit in _ISA_LIMITS else _ISA_LIMITS
    units = [_UNITS[flag] for flag in _UNITS if flag in _flags()]
    used = [name for name, isa in units if onednn.is_on() and (isa is None or isa in allowed)]
    return [name for name, _ in units], used


def takes_float16_rewrite() -> bool:
    """Whether TensorFlow's graph rewrite goes to float16 on this CPU."""
    return onednn.is_on() and not _REWRITE_FLAGS.isdisjoint(_flags())


def _flags() -> set[str]:
    info = cpu_info()
    return set((info.get("flags") or info.get("Features") or "").split())


def why_slow(dtype: str) -> str | None:
    """Returns what a dtype needs to be fast, or None if it is here. CPUs are judged by flags.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    found = gpus()
    if dtype == "float16":
        needs = "float16 needs an Nvidia GPU of compute capability 7.0 or above"
    elif has_tpu() or (not found and cpu_has("bfloat16")):
        return None
    else:
        needs = (
            "bfloat16 needs a GPU of compute capability 8.0 or above, a TPU or a CPU with native "
            "bfloat16 instructions"
        )
    if not found:
        return f"{needs}, and there is none."
    slow = [str(gpu) for gpu in found if (gpu.capability or (0, 0)) < COMPUTE_CAPABILITY[dtype]]
    return f"{needs}, and there is {', '.join(slow)}." if slow else None
