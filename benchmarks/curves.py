"""The losses of `step`'s models over 200 steps, by how 16 bits are used, against float32's.

All variants begin with the same weights, and learn the same batch by heart.
"""

import json
import sys
from typing import Any

import numpy as np

from benchmarks import common, step, step_models

STEPS = 200
# The same in exact arithmetic: what another order of sums does to the losses.
CONTROL = "float32, jit_compile"
VARIANTS: dict[str, dict[str, Any]] = {CONTROL: {"jit_compile": True}, **step.VARIANTS}


def measure(name: str, size: str) -> dict[str, list[float]]:
    """The loss before each step, by variant."""
    import tensorflow as tf

    curves = {}
    for variant, how in VARIANTS.items():
        tf.keras.utils.set_random_seed(1)
        take_step = step.make_step(name, step_models.SIZES[size][name], **how)
        curves[variant] = [float(take_step()) for _ in range(STEPS)]
    return curves


def deviation(curve: list[float], exact: list[float]) -> tuple[float, float]:
    """How far losses are from others: the mean, and the most, of the first loss."""
    far = np.abs(np.subtract(curve, exact)) / exact[0]
    return far.mean(), far.max()


def run(small: bool = False) -> dict:
    """Measures each model on both Kerases, and prints a table."""
    size = "small" if small else "full"
    results = step.of_models("benchmarks.curves", size)
    others = [variant for variant in VARIANTS if variant != "float32"]
    rows = []
    for keras, models in results.items():
        for name, curves in models.items():
            exact = curves["float32"]
            far = [deviation(curves[variant], exact) for variant in others]
            columns = [f"{1e4 * mean:.2g} ({1e4 * most:.2g})" for mean, most in far]
            rows.append([keras, name, f"{exact[0]:.3f} to {exact[-1]:.3f}", *columns])
    common.print_table(
        f"Losses over {STEPS} steps ({size} sizes): how far from float32's in the mean"
        " (at most), in 1e-4 of the first loss",
        ["", "", "float32", *others],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
