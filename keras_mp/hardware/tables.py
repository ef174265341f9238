"""What is known of a device without asking it to compute anything. Initializes nothing."""

import platform
from typing import NamedTuple

import tensorflow as tf

from keras_mp.hardware import remembered

COMPUTE_CAPABILITY = {"float16": (7, 0), "bfloat16": (8, 0)}
_CPU_FLAGS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16"},
}


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
    """The GPUs that the program computes on."""
    found = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    return [
        Gpu(details.get("device_name", "a GPU of unknown name"), details.get("compute_capability"))
        for details in found
    ]


def has_tpu() -> bool:
    """Does the program see a TPU?"""
    return bool(tf.config.get_visible_devices("TPU"))


def tell() -> bool:
    """Is what is here in the tables? If not, only a clock can tell."""
    found = gpus()
    return has_tpu() or (bool(found) and all(gpu.capability is not None for gpu in found))


def cpu_name() -> str:
    """The CPU's model, as far as the operating system tells."""
    return remembered.cpu_info().get("model name") or platform.processor() or platform.machine()


def cpu_has(dtype: str) -> bool:
    """Has the CPU native instructions for a dtype, so that it could be fast?

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    # On macOS they are there from the M2 on; neither TensorFlow nor Python says which chip it is
    # without asking sysctl, and TensorFlow's CPU kernels do not use them there.
    info = remembered.cpu_info()
    found = (info.get("flags") or info.get("Features") or "").split()
    return not _CPU_FLAGS[dtype].isdisjoint(found)


def why_slow(dtype: str) -> str | None:
    """Says what a dtype needs to be fast, if that is not here. CPUs are judged by flags.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    needed = COMPUTE_CAPABILITY[dtype]
    found = gpus()
    if dtype == "bfloat16" and (has_tpu() or (not found and cpu_has("bfloat16"))):
        return None
    needs = (
        f"{dtype} needs {'an Nvidia GPU' if dtype == 'float16' else 'a GPU'} of compute capability "
        f"{needed[0]}.{needed[1]} or above"
    )
    if dtype == "bfloat16":
        needs += ", a TPU or a CPU with native bfloat16 instructions"
    if not found:
        return f"{needs}, and there is none."
    slow = [str(gpu) for gpu in found if gpu.capability is None or gpu.capability < needed]
    return f"{needs}, and there is {', '.join(slow)}." if slow else None
