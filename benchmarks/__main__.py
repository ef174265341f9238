"""Runs the benchmarks, side by side with stock, and writes what they measured as JSON.

python -m benchmarks [names]
"""

import argparse
import json
import os
import pathlib
import platform
import sys

import tensorflow as tf

from benchmarks import casts, rounding, verdict, wire

BENCHMARKS = {
    "casts": casts.run,
    "rounding": rounding.run,
    "verdict": verdict.run,
    "wire": wire.run,
}


def main() -> int:
    """Runs those that were named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS), help=" ".join(BENCHMARKS))
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("benchmarks.json"))
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"unknown benchmarks {sorted(unknown)}; there are {sorted(BENCHMARKS)}")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}"
    print(f"On {machine}, Python {platform.python_version()}.")
    results = {name: BENCHMARKS[name]() for name in arguments.names}
    arguments.output.write_text(json.dumps({"machine": machine, **results}, indent=1))
    print(f"\nAll figures are in {arguments.output}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
