"""The dtypes that are fast here, the best policy, and measured speeds.

Tables of devices tell which dtypes are fast.
"""

import copy
import math
import threading

import tensorflow as tf

from keras_mp.hardware import devices, stopwatch
from keras_mp.hardware.stopwatch import Speeds
from keras_mp.hooks import reach
from keras_mp.kernels import tables
from keras_mp.kernels.measured import CONVOLUTION, MATRIX_PRODUCT

# Measured speeds vary a little, and in a model there are casts, which take time too.
_SLOW, _FAST = 1 / 0.85, 0.85
# At less than 1.1 times the speed of float32, another dtype is not worth its errors.
_GAIN = 1 / 1.1

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


def why_slow(dtype: str) -> str | None:
    """Returns the reason why a dtype is slow here, or None.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    times = _times(dtype)
    if times is None:
        return devices.why_slow(dtype)
    return _sentence(dtype, times) if max(times) > _SLOW else None


def verdict(dtype: str) -> str:
    """Returns a sentence on whether a dtype is fast here, brings no gain or is slow.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    reason = why_slow(dtype)
    if reason is not None:
        return f"{dtype} is slow here: {reason}"
    times = _times(dtype)
    if times is not None:
        speed = "is fast" if _mean(times) <= _GAIN else "brings no gain"
        return f"{dtype} {speed} here: {_sentence(dtype, times)}"
    if devices.are_in_tables():
        return f"{dtype} is fast here."
    return (
        f"{dtype} may be fast here: the CPU has instructions for it, but no CPU of this kind was "
        "measured."
    )


def best_policy() -> tuple[str, str]:
    """Returns the name of the policy that is fastest here and sound, and the reason."""
    if devices.has_tpu():
        return "mixed_bfloat16", "TPUs multiply in bfloat16."
    if devices.are_in_tables():
        capability, gpu = min((gpu.capability or (0, 0), str(gpu)) for gpu in devices.gpus())
        for dtype in ("bfloat16", "float16"):
            if capability >= devices.COMPUTE_CAPABILITY[dtype]:
                return f"mixed_{dtype}", f"{dtype} is fast on {gpu}."
        return "float32", str(devices.why_slow("float16"))
    times = _times("bfloat16")
    if times is None:
        return "float32", "no device like this one was measured for keras_mp's tables."
    is_faster = max(times) <= _SLOW and _mean(times) <= _FAST
    return "mixed_bfloat16" if is_faster else "float32", _sentence("bfloat16", times)


def _times(dtype: str) -> tuple[float, float] | None:
    """Returns how products and convolutions compare with float32 on the CPU.

    The numbers tell how many times as long they take. Returns None where it is not the CPU that
    computes, and where no table tells.
    """
    if devices.has_tpu() or devices.gpus():
        return None
    table = tables.current()
    times = table.time(MATRIX_PRODUCT, dtype), table.time(CONVOLUTION, dtype)
    return times if all(times) else None


def _mean(times: tuple[float, float]) -> float:
    return math.prod(times) ** 0.5


def _sentence(dtype: str, times: tuple[float, float]) -> str:
    product, convolution = (f"{time:.{1 if time > 1 else 2}f} times" for time in times)
    return (
        f"{dtype} matrix products take {product} as long as float32 ones on this CPU, and "
        f"convolutions {convolution} as long, says {tables.current().source}."
    )
