"""The dtypes that are fast here, by tables of devices and measured speeds; the best policy."""

import copy
import math
import os
import threading

import tensorflow as tf

from keras_mp.hardware import cache, devices, stopwatch
from keras_mp.hardware.stopwatch import OPERATIONS, Speeds
from keras_mp.kernels import slow
from keras_mp.support import host, regions

# Measured speeds vary a little, and in a model there are casts, which take time too.
_SLOW, _FAST = 0.85, 1 / 0.85

_lock = threading.Lock()
# By what the speeds depend on, since a program may still change that.
_known: dict[str, Speeds | None] = {}


def needs_speeds() -> bool:
    """Whether speeds decide what is fast here, and this program may measure them."""
    return not devices.are_in_tables() and _may_measure() and not host.in_v1_graph()


def _may_measure() -> bool:
    return os.environ.get("KERAS_MP_MEASURE") != "0"


def speeds(measure: bool = True, anew: bool = False, keep: bool = False) -> Speeds | None:
    """Returns the speeds of the device that computes, or None if they are not known.

    Args:
        measure: bool. Whether it may be measured, if it is not known yet. Defaults to True.
        anew: bool. Measures in any case. Defaults to False.
        keep: bool. Writes a file for later programs. Defaults to False, which does so only where
            KERAS_MP_CACHE names a folder for it.
    """
    gpus = devices.gpus()
    machine = cache.describe(str(gpus[0]) if gpus else "CPU")
    key = str(machine)
    with _lock:  # Two measurements at once would disturb each other.
        if anew or key not in _known:
            kept = cache.read(machine) if _may_measure() and not anew else None
            if kept is not None:
                _known[key], kernels = kept
                slow.learn(kernels)
            elif devices.has_tpu() or not measure or not _can_measure_now():
                return None
            else:
                if anew:
                    slow.forget()
                found = _known[key] = _measure("GPU:0" if gpus else "CPU:0")
                if found is not None and (keep or os.environ.get("KERAS_MP_CACHE")):
                    with tf.init_scope():
                        cache.write(machine, found, {} if gpus else slow.ratios())
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
        with tf.init_scope(), regions.none():
            return stopwatch.measure(device)
    except tf.errors.OpError:  # No kernel, or no memory: then nothing can be said.
        return None


def why_slow(dtype: str, measured: Speeds | None) -> str | None:
    """Returns the reason why a dtype is slow here, or None.

    Args:
        dtype: str, "float16" or "bfloat16".
        measured: the speeds; None leaves it to the tables.
    """
    if measured is None:
        return devices.why_slow(dtype)
    is_slow = min(_ratios(dtype, measured)) < _SLOW
    return f"{_compare(dtype, measured)}." if is_slow else None


def best_policy() -> tuple[str, str]:
    """Returns the name of the policy that is fastest here and sound, and the reason."""
    if devices.has_tpu():
        return "mixed_bfloat16", "bfloat16 is what a TPU multiplies."
    if devices.are_in_tables():
        capability, gpu = min((gpu.capability or (0, 0), str(gpu)) for gpu in devices.gpus())
        for dtype in ("bfloat16", "float16"):
            if capability >= devices.COMPUTE_CAPABILITY[dtype]:
                return f"mixed_{dtype}", f"{dtype} is fast on {gpu}."
        return "float32", str(devices.why_slow("float16"))
    measured = speeds() if needs_speeds() else None
    if measured is None:
        return "float32", "nothing was measured, and nothing else tells what is fast here."
    ratios = _ratios("bfloat16", measured)
    is_faster = min(ratios) >= _SLOW and math.prod(ratios) ** (1 / len(ratios)) >= _FAST
    return "mixed_bfloat16" if is_faster else "float32", f"{_compare('bfloat16', measured)}."


def _compare(dtype: str, measured: Speeds) -> str:
    """Returns in words how long a dtype takes as a multiple of float32, with the speeds."""
    device = "GPU" if devices.gpus() else "CPU"
    (first, second), ratios = OPERATIONS, _ratios(dtype, measured)
    return (
        f"{dtype} {first}s take {_times(ratios[0])} as long as float32 ones on this {device} "
        f"({_against(dtype, measured[first])}), and {second}s {_times(ratios[1])} as long "
        f"({_against(dtype, measured[second])})"
    )


def _times(ratio: float) -> str:
    return f"{1 / ratio:.{1 if ratio < 1 else 2}f} times"


def _against(dtype: str, by_dtype: dict[str, float]) -> str:
    this, other = (f"{by_dtype[each] / 1e9:,.3g}" for each in (dtype, "float32"))
    return f"{this} against {other} GF/s"


def _ratios(dtype: str, measured: Speeds) -> list[float]:
    return [measured[operation][dtype] / measured[operation]["float32"] for operation in OPERATIONS]
