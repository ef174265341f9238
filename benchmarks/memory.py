"""Peak resident memory of `fit`, and bytes a weight in 16 bits. On Keras 3.

Each variant is measured in a process of its own.
"""

import json
import resource
import sys

from benchmarks import common, fit, master_weights, models

STEPS = 5


def peak() -> int:
    """Bytes that were resident when most were."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def measure(name: str, variant: str) -> dict[str, int]:
    """Peaks before the model is made, and after it was trained."""
    import tensorflow as tf

    tf.zeros([1]) + tf.keras.backend.epsilon()
    before = peak()
    fit.make_fit(name, **fit.VARIANTS[variant])(STEPS)
    return {"before": before, "peak": peak()}


def run() -> dict:
    """Measures all models, and prints a table."""
    results: dict[str, dict[str, dict]] = {}
    for name in models.MODELS:
        for variant in fit.VARIANTS:
            result = common.in_own_process("benchmarks.memory", name, variant)
            results.setdefault(name, {})[variant] = result
    rows = []
    for name, variants in results.items():
        added = {variant: r["peak"] - r["before"] for variant, r in variants.items()}
        for variant, result in variants.items():
            against = added[variant] / added["float32"]
            megabytes = [result["peak"] / 1e6, added[variant] / 1e6]
            rows.append([name, variant, *(f"{mb:.0f} MB" for mb in megabytes), f"{against:.2f}"])
    common.print_table(
        "Peak resident memory of fit, on Keras 3 (one run each)",
        ["", "", "peak", "of it since TensorFlow was loaded", "in terms of float32"],
        rows,
    )
    return {"fit": results, "weights": master_weights.run()}


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
