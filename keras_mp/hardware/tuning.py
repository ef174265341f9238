"""Times the 16-bit kernels of this CPU, for a table. Only commands run this.

This module needs TensorFlow only.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.hardware import stopwatch, turns
from keras_mp.kernels import chains, slow, tables
from keras_mp.kernels.measured import CONVOLUTION, MATRIX_PRODUCT
from keras_mp.kernels.replaced import in_float32, last_value
from keras_mp.kernels.tables import Times
from keras_mp.support import cpu
from keras_mp.support.dtypes import LOW_PRECISION_NAMES as DTYPES

# Their gradients take results of the forward pass, so both are in one dtype.
_TIMED_WITH_GRADIENTS = {"MaxPool", "FusedBatchNormV3", *chains.KERNELS}
_TURNS = 15


def machine() -> dict[str, Any]:
    """Returns a description of this machine, to be kept beside its times."""
    return {
        "cpu": cpu.name(),
        "kind": cpu.kind(),
        "threads": tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count(),
        "tensorflow": tf.version.VERSION,
    }


def measure() -> Times:
    """Times all kernels in both dtypes.

    It also times products and convolutions with their gradients. It has to be called in eager.

    Returns:
        dict of dicts: by operation and dtype, how many times as long as in float32 it takes.
    """
    with tf.device("CPU:0"):
        times = {op: {dtype: _time(op, dtype, _TURNS) for dtype in DTYPES} for op in slow.KERNELS}
    with tables.on_trial(times):
        speeds = stopwatch.measure("CPU:0")
    for op in (MATRIX_PRODUCT, CONVOLUTION):
        times[op] = {dtype: speeds[op]["float32"] / speeds[op][dtype] for dtype in DTYPES}
    return {
        op: {dtype: round(time, 2) for dtype, time in of_op.items()} for op, of_op in times.items()
    }


def column(times: Times) -> str:
    """Returns the lines of `kernels/measured.py` for this kind of CPU.

    Args:
        times: the result of `measure`.
    """
    lines = [f"{op:36}" + "".join(f"{times[op][d]:>8.2f}" for d in DTYPES) for op in times]
    return "\n".join([f'"{cpu.kind()}": """', *lines, '""",'])


def _time(op: str, dtype: str, count: int) -> float:
    """Returns how many times as long as float32's with casts a kernel takes."""
    kernel = slow.KERNELS[op]
    own, replacement = slow.own_function(op), kernel.correct or in_float32
    arguments = kernel.example(tf.as_dtype(dtype), None)
    tensors = {
        name: each
        for name, each in arguments.items()
        if all(map(tf.is_tensor, tf.nest.flatten(each)))
    }
    others = {name: each for name, each in arguments.items() if name not in tensors}

    def step(compute: Callable[..., tf.Tensor]) -> Callable[[], object]:
        # In a function, as a training step is: there, oneDNN has more float32 kernels.
        @tf.function(autograph=False)
        def run(tensors: dict[str, tf.Tensor]) -> tf.Tensor:
            y, *_ = tf.nest.flatten(compute(**tensors, **others))
            if op not in _TIMED_WITH_GRADIENTS:
                return y
            # A gradient that needs the output leaves nothing out.
            return tf.gradients(y, [*tensors.values()], y)[0]

        return lambda: last_value(run(tensors)).numpy()

    steps = {"own": step(own), "float32": step(functools.partial(replacement, own))}
    try:
        turns.take(steps, 2)  # Functions are traced, and kernels made, when they are called first.
        seconds = turns.undisturbed(turns.take(steps, count))
    except (tf.errors.OpError, ValueError):
        return 0.0
    return seconds["own"] / seconds["float32"]
