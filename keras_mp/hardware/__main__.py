"""Measures this machine's speed in each dtype, and names the policy that suits it.

python -m keras_mp.hardware
python -m keras_mp.hardware --check
"""

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.hardware import devices, fast_dtypes, stopwatch
from keras_mp.kernels import slow
from keras_mp.support import cpu, text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.tensorflow_api import features

_OUTPUT = "keras_mp_check.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures this machine, and prints the result.

    Args:
        argv: Arguments of the command line; None for the process's own.

    Returns:
        The exit status: 0, or 1 where a check finds a promise broken.
    """
    parser = argparse.ArgumentParser(
        prog="python -m keras_mp.hardware",
        description="Times a matrix product and a convolution, forward and backward, in float32, "
        "bfloat16 and float16 on the device that TensorFlow computes on, and says which policy is "
        "the fastest here, and which operations keras_mp computes in float32 inside.",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="instead check on this machine what keras_mp promises, and time operations and "
        "models; takes a few minutes",
    )
    parser.add_argument(
        "--quick", action="store_true", help="with --check: check the promises, time nothing"
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="FILE.json",
        help=(
            f"with --check: the file for the full result, which you can send us; {_OUTPUT} by "
            "default"
        ),
    )
    arguments = parser.parse_args(argv)
    if arguments.check:
        output = arguments.output or pathlib.Path(_OUTPUT)
        _refuse_if_not_writable(parser, output)
        return _check(arguments.quick, output)
    if arguments.quick or arguments.output:
        parser.error("--quick and --output go with --check")
    for line in _lines(fast_dtypes.speeds(anew=True)):
        print(line)
    return 0


def _refuse_if_not_writable(parser: argparse.ArgumentParser, path: pathlib.Path) -> None:
    try:
        path.open("a").close()  # before the minutes that it takes
    except OSError as error:
        parser.error(f"{path} cannot be written: {error.strerror}")


def _check(quick: bool, output: pathlib.Path) -> int:
    # The check uses all of the package; the rest of this subpackage needs TensorFlow only.
    from keras_mp import hardware_check
    from keras_mp.hardware_check import page

    found = hardware_check.check(quick)
    output.write_text(json.dumps(found, indent=1))
    print(*page.lines(found), sep="\n")
    print(f"The full result is in {output}.")
    return 0 if all(each["kept"] for each in found["promises"]) else 1


def _lines(speeds: stopwatch.Speeds | None) -> Iterator[str]:
    yield f"{_device()}; TensorFlow {tf.version.VERSION}"
    units, used = (", ".join(names) or "none" for names in cpu.units())
    yield f"16-bit units of the CPU: {units}; used by TensorFlow's oneDNN: {used}"
    yield ""
    if speeds is not None:
        yield from _table(speeds)
        yield ""
    for dtype in LOW_PRECISION_NAMES:
        yield fast_dtypes.verdict(dtype)
    name, reason = fast_dtypes.best_policy()
    yield f"Best policy: {name}, since {reason}"
    yield from _slow_operations()
    yield ""
    yield from _features()


def _features() -> Iterator[str]:
    """Says which features work with this TensorFlow and Keras.

    It also says what the others lack.
    """
    every = features.FEATURES + keras_api.FEATURES
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
    header = ("GF/s (times float32)", *stopwatch.DTYPES)
    rows = [header] + [
        (operation, *(_cell(by_dtype, dtype) for dtype in stopwatch.DTYPES))
        for operation, by_dtype in speeds.items()
    ]
    return text_tables.aligned(rows)


def _slow_operations() -> Iterator[str]:
    """Names the operations that are computed in float32 inside."""
    for dtype in LOW_PRECISION_NAMES:
        names = ", ".join(slow.slow_operations(dtype))
        if names:
            yield f"In {dtype} these are computed in float32 inside: {names}"


def _cell(by_dtype: dict[str, float], dtype: str) -> str:
    return f"{by_dtype[dtype] / 1e9:,.0f} ({by_dtype[dtype] / by_dtype['float32']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
