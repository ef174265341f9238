"""Runs the benchmarks, side by side with Keras's own classes, and writes JSON.

python -m benchmarks [names]
"""

import argparse
import json
import pathlib
import sys

from benchmarks import (
    common,
    first,
    gpu_compiled,
    gpu_targets,
    memory,
    overhead,
    soak,
    step,
    sums,
)
from benchmarks.acceptance import defects, faults, parity, third_party

_MODULES = (overhead, step, memory, first, sums, gpu_compiled, soak)
_ACCEPTANCE = (defects, faults, parity, third_party)
BENCHMARKS = {each.__name__.rpartition(".")[2]: each.run for each in _MODULES + _ACCEPTANCE}


def main() -> int:
    """Runs those that were named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    # Without names, none that installs something.
    usual = [name for name in BENCHMARKS if name != "gpu_compiled"]
    parser.add_argument("names", nargs="*", default=usual, help=" ".join(BENCHMARKS))
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("benchmarks.json"))
    parser.add_argument("--turns", type=int, default=soak.TURNS, help="of `soak`")
    parser.add_argument("--small", action="store_true", help="smaller models in `step`")
    parser.add_argument("--compiler", help="of `gpu_compiled`: an environment that has it")
    parser.add_argument("--targets", nargs="+", default=(), choices=gpu_targets.TARGETS)
    parser.add_argument(
        "--only", nargs="+", default=(), help="what its steps, or the tasks of `parity`, begin with"
    )
    parser.add_argument("--seeds", type=int, default=parity.SEEDS, help="of `parity`")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"unknown benchmarks {sorted(unknown)}; there are {sorted(BENCHMARKS)}")
    machine = common.machine()
    print(f"On {machine}.")
    compiled = {"folder": arguments.compiler, "targets": arguments.targets}
    options = {
        "soak": {"turns": arguments.turns},
        "step": {"small": arguments.small},
        "parity": {"seeds": arguments.seeds, "only": arguments.only},
        "gpu_compiled": {**compiled, "only": arguments.only},
    }
    results = {name: BENCHMARKS[name](**options.get(name, {})) for name in arguments.names}
    arguments.output.write_text(json.dumps({"machine": machine, **results}, indent=1))
    print(f"\nAll figures are in {arguments.output}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
