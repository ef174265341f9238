"""The devices of this machine, and tables of what they are fast at.

Nothing here initializes the devices.
"""

from typing import NamedTuple

import tensorflow as tf

from keras_mp.support import cpu

COMPUTE_CAPABILITY = {"float16": (7, 0), "bfloat16": (8, 0)}
_NEEDS = {
    "float16": "an Nvidia GPU of compute capability 7.0 or above",
    "bfloat16": "a GPU of compute capability 8.0 or above, a TPU or a CPU with bfloat16 units that "
    "TensorFlow uses",
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
    """Returns the GPUs that the program computes on."""
    found = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    return [
        Gpu(details.get("device_name", "a GPU of unknown name"), details.get("compute_capability"))
        for details in found
    ]


def has_tpu() -> bool:
    """Whether the program sees a TPU."""
    return bool(tf.config.get_visible_devices("TPU"))


def why_slow(dtype: str) -> str | None:
    """Returns what a dtype needs to be fast, or None if it is here.

    On no CPU float16 gains: it computes the gradients of convolutions in float32.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    found = gpus()
    if dtype == "bfloat16" and (has_tpu() or (not found and cpu.has_units(dtype))):
        return None
    slow = [str(gpu) for gpu in found if (gpu.capability or (0, 0)) < COMPUTE_CAPABILITY[dtype]]
    if found and not slow:
        return None
    return f"{dtype} needs {_NEEDS[dtype]}, and there is {', '.join(slow) or 'none'}."


def verdict(dtype: str) -> str:
    """Returns a sentence on whether a dtype is fast or slow here.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    reason = why_slow(dtype)
    return f"{dtype} is fast here." if reason is None else f"{dtype} is slow here: {reason}"


def best_policy() -> tuple[str, str]:
    """Returns the name of the policy that is fastest here and sound, and the reason."""
    if has_tpu():
        return "mixed_bfloat16", "TPUs multiply in bfloat16."
    for dtype in ("bfloat16", "float16"):
        if why_slow(dtype) is None:
            slowest = min(gpus(), key=lambda gpu: gpu.capability or (0, 0), default=None)
            return f"mixed_{dtype}", f"{dtype} is fast on {slowest or 'this CPU, which has units'}."
    return "float32", str(why_slow("bfloat16"))
