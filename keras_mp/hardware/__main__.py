"""Measures this machine's speed in each dtype, and names the policy that suits it.

python -m keras_mp.hardware
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
    parser = argparse.ArgumentParser(
        prog="python -m keras_mp.hardware",
        description="Times a matrix product and a convolution, forward and backward, in float32, "
        "bfloat16 and float16 on the device that TensorFlow computes on, and says which policy is "
        "the fastest here, and which operations keras_mp computes in float32 inside.",
    )
    parser.parse_args(argv)
    for line in _lines(hardware.speeds(anew=True)):
        print(line)
    return 0


def _lines(speeds: stopwatch.Speeds | None) -> Iterator[str]:
    yield f"{_device()}; TensorFlow {tf.version.VERSION}"
    units, used = (", ".join(names) or "none" for names in cpu.units())
    yield f"16-bit units of the CPU: {units}; used by TensorFlow's oneDNN: {used}"
    yield ""
    if speeds is not None:
        yield from _table(speeds)
        yield ""
    for dtype in LOW_PRECISION_NAMES:
        yield devices.verdict(dtype)
    name, reason = devices.best_policy()
    yield f"Best policy: {name}, since {reason}"
    yield from _slow_operations()
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
    gpus = devices.gpus()
    if devices.has_tpu() or gpus:
        return "TPU" if devices.has_tpu() else ", ".join(map(str, gpus))
    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    return f"{cpu.name()}, {threads} threads"


def _table(speeds: stopwatch.Speeds) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("GF/s (times float32)", *stopwatch.DTYPES)]
    for operation, by_dtype in speeds.items():
        of_float32 = by_dtype["float32"]
        cells = (f"{each / 1e9:,.0f} ({each / of_float32:.2f})" for each in by_dtype.values())
        rows.append((operation, *cells))
    return columns.aligned(rows)


def _slow_operations() -> Iterator[str]:
    """Names the operations that are computed in float32 inside."""
    for dtype in LOW_PRECISION_NAMES:
        names = ", ".join(slow.slow_operations(dtype))
        if names:
            yield f"In {dtype} these are computed in float32 inside: {names}"


if __name__ == "__main__":
    sys.exit(main())
