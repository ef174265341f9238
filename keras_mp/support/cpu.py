"""The CPU and its units for 16-bit floating point, as TensorFlow uses them.

This module needs no TensorFlow.
"""

import functools
import os
import pathlib
import platform

# Units by flag. Each has a name and, for x86 units, the lowest limit of ONEDNN_MAX_CPU_ISA under
# which oneDNN uses it.
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
# Those that multiply. AVX-NE-CONVERT only converts.
_UNITS_OF = {
    "bfloat16": {"AVX512-BF16", "AMX-BF16", "Arm BF16"},
    "float16": {"AVX512-FP16", "AMX-FP16"},
}
# TensorFlow's `IsDataTypeSupportedByOneDNNOnThisCPU`, for x86.
_REWRITE_FLAGS = {
    "bfloat16": {"avx512f", "avx_ne_convert"},
    "float16": {"amx_fp16", "avx_ne_convert"},
}
# On Linux, TensorFlow computes with oneDNN by default on x86 CPUs that have one of these.
_ONEDNN_FLAGS = {"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}
_NEOVERSE_V1 = ("0x41", "0xd40")
_X86 = ("x86_64", "AMD64")


@functools.cache
def info() -> dict[str, str]:
    """Returns what Linux says of the first CPU; elsewhere nothing."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = [line.partition(":") for line in text.partition("\n\n")[0].splitlines()]
    return {name.strip(): value.strip() for name, _, value in pairs}


def name() -> str:
    """Returns the CPU's model, as far as the operating system tells."""
    return info().get("model name") or platform.processor() or platform.machine()


def flags() -> set[str]:
    """Returns the flags of the CPU on Linux; elsewhere none."""
    found = info()
    return set((found.get("flags") or found.get("Features") or "").split())


def uses_onednn() -> bool:
    """Whether TensorFlow computes with oneDNN, its library for CPUs, in this process.

    The environment variable TF_ENABLE_ONEDNN_OPTS decides; where it is not set, the CPU does.

    Source: TensorFlow, `IsMklEnabled` in `tsl/util/port.cc`.
    """
    given = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "").lower()
    if given in ("0", "false", "1", "true"):
        return given in ("1", "true")
    if platform.system() == "Windows":
        return platform.machine() in _X86
    found = info()
    is_v1 = (found.get("CPU implementer"), found.get("CPU part")) == _NEOVERSE_V1
    return platform.system() == "Linux" and (is_v1 or not _ONEDNN_FLAGS.isdisjoint(flags()))


def units() -> tuple[list[str], list[str]]:
    """Returns the CPU's units for 16-bit floating point, and those TensorFlow uses.

    Returns:
        tuple of two lists of names, such as "AVX512-BF16". TensorFlow uses those that its oneDNN
        uses, as far as the environment variables TF_ENABLE_ONEDNN_OPTS and ONEDNN_MAX_CPU_ISA
        allow.
    """
    allowed, of_cpu = _allowed_by_onednn(), flags()
    found = [_UNITS[flag] for flag in _UNITS if flag in of_cpu]
    used = [name for name, isa in found if uses_onednn() and (isa is None or isa in allowed)]
    return [name for name, _ in found], used


def has_instructions(dtype: str) -> bool:
    """Whether the CPU has native instructions for a dtype, so that it could be fast.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    # On macOS they are there from the M2 on; neither TensorFlow nor Python says which chip it is
    # without asking sysctl, and TensorFlow's CPU kernels do not use them there.
    return not _UNITS_OF[dtype].isdisjoint(units()[0])


@functools.cache
def has_units(dtype: str) -> bool:
    """Whether TensorFlow multiplies in units of this CPU for a dtype.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    return not _UNITS_OF[dtype].isdisjoint(units()[1])


def takes_rewrite(dtype: str) -> bool:
    """Whether TensorFlow's graph rewrite can use a dtype on this CPU.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    return uses_onednn() and not _REWRITE_FLAGS[dtype].isdisjoint(flags())


def _allowed_by_onednn() -> tuple[str, ...]:
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    limit = _AVX10_LIMITS.get(limit, limit)
    return _ISA_LIMITS[: _ISA_LIMITS.index(limit) + 1] if limit in _ISA_LIMITS else _ISA_LIMITS
