"""Heads in bfloat16 against heads in float32: final losses with our losses. On Keras 3."""

import json
import sys

from benchmarks import common, losses

HEADS = {"float32": "float32", "bfloat16": "mixed_bfloat16"}
TASKS = ("digits", "language model")


def measure(task: str, head: str) -> list[float]:
    """Final losses of models in mixed_bfloat16, one for each seed."""
    how = {"variant": losses.REFERENCE, "head": HEADS[head]}
    return [losses.TASKS[task](**how, seed=seed) for seed in range(losses.SEEDS)]


def run() -> dict:
    """Trains with both heads, each in a process of its own, and prints a table."""
    results = {
        task: {head: common.in_own_process("benchmarks.heads", task, head) for head in HEADS}
        for task in TASKS
    }
    rows = [
        [head, *(losses.cell(by[head], by["float32"]) for by in results.values())] for head in HEADS
    ]
    common.print_table(
        f"Final losses of models in mixed_bfloat16, mean of {losses.SEEDS} seeds, on Keras 3 (mean "
        "difference from a head in float32 with the same seed, ± two standard errors)",
        ["head", *TASKS],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
