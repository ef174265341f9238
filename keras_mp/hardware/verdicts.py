"""What tables and clocks say together: which dtypes are slow here, and the fastest policy."""

import copy
import math
import os
import threading

import tensorflow as tf

from keras_mp.hardware import remembered, stopwatch, tables
from keras_mp.hardware.stopwatch import OPERATIONS, Speeds
from keras_mp.kernels import slow
from keras_mp.support import host, regions

# Figures have some noise, and in a model there are casts, which take time too.
_SLOW, _FAST = 0.85, 1 / 0.85

_lock = threading.Lock()
# By what the speeds depend on, since a program may still change that.
_known: dict[str, Speeds | None] = {}


def wants_figures() -> bool:
    """Whether the device has to be timed, and this program may do so."""
    return not tables.tell() and _is_on() and not host.in_v1_graph()


def _is_on() -> bool:
    return os.environ.get("KERAS_MP_MEASURE") != "0"


def speeds(measure: bool, anew: bool = False, remember: bool = False) -> Speeds | None:
    """The speeds of the device that computes, or None if they are not known.

    Args:
        measure: bool. Whether it may be measured, if it is not known yet.
        anew: bool. Measures in any case. Defaults to False.
        remember: bool. Writes a file for later programs. Defaults to False, which does so only
            where KERAS_MP_CACHE names a folder for it.
    """
    gpus = tables.gpus()
    machine = remembered.describe(str(gpus[0]) if gpus else "CPU")
    key = str(machine)
    with _lock:  # Two clocks at once would disturb each other.
        if anew or key not in _known:
            found = remembered.read(machine) if _is_on() and not anew else None
            if found is not None:
                slow.learn(remembered.read_kernels(machine))
            else:
                if tables.has_tpu() or not measure or not _can_measure_now():
                    return None
                if anew:
                    slow.forget()
                found = _measure("GPU:0" if gpus else "CPU:0")
                if found is not None and (remember or os.environ.get("KERAS_MP_CACHE")):
                    remembered.write(machine, found, {} if gpus else _kernels())
            _known[key] = found
        return copy.deepcopy(_known[key])


def _can_measure_now() -> bool:
    """Not in a graph of TensorFlow 1, and not by each of several replicas at the same time."""
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


def _kernels() -> slow.Ratios:
    with tf.init_scope():
        return slow.ratios()


def why_slow(dtype: str, figures: Speeds | None) -> str | None:
    """Returns the reason why a dtype is slow here, or None.

    Args:
        dtype: str, "float16" or "bfloat16".
        figures: the speeds; None leaves it to the tables.
    """
    if figures is None:
        return tables.why_slow(dtype)
    is_slow = min(_ratios(dtype, figures)) < _SLOW
    return f"{compare(dtype, figures)}." if is_slow else None


def best_policy() -> tuple[str, str]:
    """Returns the name of the policy that is fastest here and sound, and why it is."""
    if tables.has_tpu():
        return "mixed_bfloat16", "bfloat16 is what a TPU multiplies."
    if tables.tell():
        capability, gpu = min((gpu.capability or (0, 0), str(gpu)) for gpu in tables.gpus())
        for dtype in ("bfloat16", "float16"):
            major, minor = tables.COMPUTE_CAPABILITY[dtype]
            if capability >= (major, minor):
                return f"mixed_{dtype}", f"{dtype} is fast on {gpu}."
        return "float32", str(tables.why_slow("float16"))
    figures = speeds(measure=True) if wants_figures() else None
    if figures is None:
        return "float32", "nothing was measured, and nothing else tells what is fast here."
    ratios = _ratios("bfloat16", figures)
    is_faster = min(ratios) >= _SLOW and math.prod(ratios) ** (1 / len(ratios)) >= _FAST
    return "mixed_bfloat16" if is_faster else "float32", f"{compare('bfloat16', figures)}."


def compare(dtype: str, figures: Speeds) -> str:
    """How long a dtype takes, in terms of float32, with the figures.

    Args:
        dtype: str, "float16" or "bfloat16".
        figures: the speeds.
    """
    device = "GPU" if tables.gpus() else "CPU"
    (first, second), ratios = OPERATIONS, _ratios(dtype, figures)
    return (
        f"{dtype} {first}s take {_times(ratios[0])} as long as float32 ones on this {device} "
        f"({_against(dtype, figures[first])}), and {second}s {_times(ratios[1])} as long "
        f"({_against(dtype, figures[second])})"
    )


def _times(ratio: float) -> str:
    return f"{1 / ratio:.{1 if ratio < 1 else 2}f} times"


def _against(dtype: str, by_dtype: dict[str, float]) -> str:
    this, other = (f"{by_dtype[each] / 1e9:,.3g}" for each in (dtype, "float32"))
    return f"{this} against {other} GF/s"


def _ratios(dtype: str, figures: Speeds) -> list[float]:
    return [figures[operation][dtype] / figures[operation]["float32"] for operation in OPERATIONS]
