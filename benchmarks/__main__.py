"""Runs the benchmarks, side by side with Keras's own classes; writes JSON and a PNG.

python -m benchmarks [names]
"""

import argparse
import json
import pathlib
import sys

from benchmarks import (
    autocast,
    casts,
    common,
    curves,
    defects,
    faults,
    figure,
    fit,
    gpu_kernels,
    guards,
    heads,
    imports,
    kernels,
    layers,
    losses,
    lstm,
    memory,
    numerics,
    overhead,
    reductions,
    rounding,
    soak,
    step,
    sums,
    third_party,
    third_party_numerics,
    tracing,
    verdict,
    wire,
)

BENCHMARKS = {
    "autocast": autocast.run,
    "overhead": overhead.run,
    "fit": fit.run,
    "memory": memory.run,
    "losses": losses.run,
    "heads": heads.run,
    "lstm": lstm.run,
    "tracing": tracing.run,
    "imports": imports.run,
    "casts": casts.run,
    "rounding": rounding.run,
    "step": step.run,
    "curves": curves.run,
    "reductions": reductions.run,
    "sums": sums.run,
    "kernels": kernels.run,
    "layers": layers.run,
    "gpu_kernels": gpu_kernels.run,
    "guards": guards.run,
    "verdict": verdict.run,
    "wire": wire.run,
    "numerics": numerics.run,
    "defects": defects.run,
    "faults": faults.run,
    "soak": soak.run,
    "third_party": third_party.run,
    "third_party_numerics": third_party_numerics.run,
}


def main() -> int:
    """Runs those that were named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS), help=" ".join(BENCHMARKS))
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("benchmarks.json"))
    parser.add_argument("--turns", type=int, default=soak.TURNS, help="of `soak`")
    parser.add_argument("--small", action="store_true", help="smaller models in `step`, `curves`")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"unknown benchmarks {sorted(unknown)}; there are {sorted(BENCHMARKS)}")
    machine = common.machine()
    print(f"On {machine}.")
    small = {"small": arguments.small}
    options = {"soak": {"turns": arguments.turns}, "step": small, "curves": small}
    results = {name: BENCHMARKS[name](**options.get(name, {})) for name in arguments.names}
    arguments.output.write_text(json.dumps({"machine": machine, **results}, indent=1))
    print(f"\nAll figures are in {arguments.output}.")
    picture = arguments.output.with_suffix(".png")
    if figure.draw(results, machine, picture):
        print(f"Their picture is {picture}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
