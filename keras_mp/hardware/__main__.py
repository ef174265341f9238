"""Measures how fast this machine is in each dtype, and names the policy that suits it.

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

from keras_mp import hardware
from keras_mp.hardware import devices, fast_dtypes, stopwatch
from keras_mp.kernels import slow
from keras_mp.support import text_tables

_OUTPUT = "keras_mp_check.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures this machine, keeps the result for later programs, and prints it.

    Args:
        argv: Arguments of the command line; None for the process's own.

    Returns:
        The exit status: 0, or 1 where a check finds a promise broken.
    """
    parser = argparse.ArgumentParser(
        prog="python -m keras_mp.hardware",
        description="Times a matrix product and a convolution, forward and backward, in float32, "
        "bfloat16 and float16 on the device that TensorFlow computes on, and on CPUs the kernels "
        "that may be slow in 16 bits; remembers that for later programs, and says which policy is "
        "the fastest here.",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check instead what keras_mp promises on this machine, and time operations and "
        "models; takes a few minutes",
    )
    parser.add_argument(
        "--quick", action="store_true", help="with --check: check the promises, time nothing"
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="FILE.json",
        help=f"with --check: where all that was found is written, to be sent; {_OUTPUT} by default",
    )
    arguments = parser.parse_args(argv)
    if arguments.check:
        output = arguments.output or pathlib.Path(_OUTPUT)
        try:
            output.open("a").close()  # before the minutes that it takes
        except OSError as error:
            parser.error(f"{output} cannot be written: {error.strerror}")
        return _check(arguments.quick, output)
    if arguments.quick or arguments.output:
        parser.error("--quick and --output go with --check")
    speeds = fast_dtypes.speeds(anew=True, keep=True)
    for line in _lines(speeds):
        print(line)
    return 0


def _check(quick: bool, output: pathlib.Path) -> int:
    # The check uses all of the package; the rest of this subpackage needs TensorFlow only.
    from keras_mp import hardware_check
    from keras_mp.hardware_check import page

    found = hardware_check.check(quick)
    output.write_text(json.dumps(found, indent=1))
    print(*page.lines(found), sep="\n")
    print(f"All that was found is in {output}.")
    return 0 if all(each["kept"] for each in found["promises"]) else 1


def _lines(speeds: stopwatch.Speeds | None) -> Iterator[str]:
    yield f"{_device()}; TensorFlow {tf.version.VERSION}"
    units, used = (", ".join(names) or "none" for names in devices.cpu_units())
    yield f"16-bit units of the CPU: {units}; used by TensorFlow's oneDNN: {used}"
    yield ""
    if speeds is None:
        yield "Nothing could be measured."
    else:
        yield from _table(speeds)
    yield ""
    for dtype in ("bfloat16", "float16"):
        reason = hardware.why_slow(dtype)
        yield f"{dtype} is fast here." if reason is None else f"{dtype} is slow here: {reason}"
    name, reason = fast_dtypes.best_policy()
    yield f"Best policy: {name}, since {reason}"
    if speeds is not None and not devices.gpus():
        yield from _slow_kernels()


def _device() -> str:
    gpus = devices.gpus()
    if devices.has_tpu() or gpus:
        return "TPU" if devices.has_tpu() else ", ".join(map(str, gpus))
    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    return f"{devices.cpu_name()}, {threads} threads"


def _table(speeds: stopwatch.Speeds) -> Iterator[str]:
    header = ("GF/s (times float32)", *stopwatch.DTYPES)
    rows = [header] + [
        (operation, *(_cell(by_dtype, dtype) for dtype in stopwatch.DTYPES))
        for operation, by_dtype in speeds.items()
    ]
    return text_tables.aligned(rows)


def _slow_kernels() -> Iterator[str]:
    """Names the operations that compute in float32 inside, with how slow their own kernels are."""
    for dtype in ("bfloat16", "float16"):
        found = [
            f"{op} ({by_dtype[dtype]:.1f})"
            for op, by_dtype in slow.ratios().items()
            if slow.is_slow(op, dtype)
        ]
        if found:
            yield (
                f"In {dtype} these are computed in float32 inside, as that is so many times as "
                f"fast: {', '.join(found)}"
            )


def _cell(by_dtype: dict[str, float], dtype: str) -> str:
    return f"{by_dtype[dtype] / 1e9:,.0f} ({by_dtype[dtype] / by_dtype['float32']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
