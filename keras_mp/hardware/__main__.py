"""Measures this machine's speed in each dtype, and names the policy that suits it.

It times a matrix product and a convolution, forward and backward, in float32, bfloat16 and float16
on the device that TensorFlow computes on, and says which policy is the fastest here, and which
operations keras_mp computes in float32 inside.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_mp import hardware, keras_api
from keras_mp.hardware import devices, stopwatch
from keras_mp.kernels import slow
from keras_mp.support import columns, cpu
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.tensorflow_api import features


def main(argv: Sequence[str] | None = None) -> int:
    """Measures this machine, and prints the result.

    Args:
        argv: Arguments of the command line; None for the process's own.

    Returns:
        The exit status, 0.
    """
    argparse.ArgumentParser("python -m keras_mp.hardware", description=__doc__).parse_args(argv)
    print(*_lines(hardware.speeds(anew=True)), sep="\n")
    return 0


def _lines(speeds: stopwatch.Speeds | None) -> Iterator[str]:
    yield f"{_device()}; TensorFlow {tf.version.VERSION}"
    units, used = (", ".join(names) or "none" for names in cpu.units())
    yield f"16-bit units of the CPU: {units}; used by TensorFlow's oneDNN: {used}"
    yield ""
    if speeds is not None:
        header = "GF/s (times float32)", *stopwatch.DTYPES
        yield from columns.aligned([header, *map(_row, speeds, speeds.values())])
        yield ""
    for dtype in LOW_PRECISION_NAMES:
        yield devices.verdict(dtype)
    name, reason = devices.best_policy()
    yield f"Best policy: {name}, since {reason}"
    for dtype in LOW_PRECISION_NAMES:
        if names := ", ".join(slow.slow_operations(dtype)):
            yield f"In {dtype} these are computed in float32 inside: {names}"
    yield ""
    yield from _features()


def _features() -> Iterator[str]:
    """Says which features work with this TensorFlow and Keras.

    It also says what the others lack.
    """
    every = features.FEATURES + keras_api.names.FEATURES
    off = [feature for feature in every if feature.missing()]
    yield f"Features that need private names: {len(every) - len(off)} of {len(every)} are on"
    for feature in every:
        lacks = feature.missing()
        yield f"  {'off' if lacks else 'on '}  {feature.title}"
        for line in (feature.without, *(f"{each}." for each in lacks)) if lacks else ():
            yield f"         {line}"


def _device() -> str:
    if devices.has_tpu():
        return "TPU"
    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    return ", ".join(map(str, devices.gpus())) or f"{cpu.name()}, {threads} threads"


def _row(operation: str, speeds: dict[str, float]) -> list[str]:
    of_float32 = speeds["float32"]
    return [operation, *(f"{s / 1e9:,.0f} ({s / of_float32:.2f})" for s in speeds.values())]


if __name__ == "__main__":
    sys.exit(main())
