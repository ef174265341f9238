"""The best policy here, and measured speeds.

The devices, and the flags of the CPU, tell which dtypes are fast.
"""

import copy
import threading

import tensorflow as tf

from keras_mp.hardware import devices, stopwatch
from keras_mp.hardware.stopwatch import Speeds
from keras_mp.hooks import reach

_lock = threading.Lock()
# By device and number of threads, since a program may still change that.
_known: dict[tuple[str, int], Speeds | None] = {}


def speeds(anew: bool = False) -> Speeds | None:
    """Measures the speeds of the device that computes.

    Returns None if they cannot be measured.

    Args:
        anew: bool. Measures even if this process has measured before. Defaults to False.
    """
    device = "GPU:0" if devices.gpus() else "CPU:0"
    key = device, tf.config.threading.get_intra_op_parallelism_threads()
    with _lock:  # Two measurements at once would disturb each other.
        if anew or key not in _known:
            if devices.has_tpu() or not _can_measure_now():
                return None
            _known[key] = _measure(device)
        return copy.deepcopy(_known[key])


def _can_measure_now() -> bool:
    """Whether this is no graph of TensorFlow 1, and not one of several replicas."""
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        return False
    with tf.init_scope():
        return tf.executing_eagerly()


def _measure(device: str) -> Speeds | None:
    try:
        # In a region of `keras_mp.autocast` float32 would not be float32.
        with tf.init_scope(), reach.without_region(), reach.entered(None):
            return stopwatch.measure(device)
    except tf.errors.OpError:  # No kernel, or no memory: then nothing can be said.
        return None


def verdict(dtype: str) -> str:
    """Returns a sentence on whether a dtype is fast or slow here.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    reason = devices.why_slow(dtype)
    return f"{dtype} is fast here." if reason is None else f"{dtype} is slow here: {reason}"


def best_policy() -> tuple[str, str]:
    """Returns the name of the policy that is fastest here and sound, and the reason."""
    if devices.has_tpu():
        return "mixed_bfloat16", "TPUs multiply in bfloat16."
    for dtype in ("bfloat16", "float16"):
        if devices.why_slow(dtype) is None:
            slowest = min(devices.gpus(), key=lambda gpu: gpu.capability or (0, 0), default=None)
            return f"mixed_{dtype}", f"{dtype} is fast on {slowest or 'this CPU, which has units'}."
    return "float32", str(devices.why_slow("bfloat16"))
