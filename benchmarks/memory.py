"""Peak resident memory of `fit`, also where a skipped step restores statistics; bytes a weight.

Each variant is measured in a process of its own.
"""

import json
import resource
import sys

from benchmarks import common, fit, master_weights, models

STEPS = 5
# float32 statistics of 16 MiB each, of which batch normalization has two.
CHANNELS, BATCH = 2**22, 16


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


def measure_statistics(package: str, is_skipped: bool) -> dict[str, int]:
    """The same for a model that is little more than batch normalization of many channels.

    Args:
        package: "Keras" or "keras_mp", whose `mixed_float16` and loss scaling are used.
        is_skipped: Whether the gradients overflow, so that every step is skipped.
    """
    import numpy as np
    import tensorflow as tf

    if package == "keras_mp":
        import keras_mp

        keras_mp.set_global_policy("mixed_float16")
        # The first skipped steps are told, which is not what is measured.
        optimizer = keras_mp.LossScaleOptimizer("sgd", warn_after_skips=None)
    else:
        optimizer = "sgd"
        tf.keras.mixed_precision.set_global_policy("mixed_float16")
    width = 8
    layers = [
        tf.keras.layers.Dense(width),
        tf.keras.layers.Lambda(
            lambda x: tf.tile(x, [1, CHANNELS // width]), output_shape=(CHANNELS,)
        ),
        tf.keras.layers.BatchNormalization(center=False, scale=False),
        tf.keras.layers.Lambda(lambda x: x[:, :width], output_shape=(width,)),
    ]
    model = tf.keras.Sequential([tf.keras.Input([width]), *layers])
    model.compile(optimizer, "mse")
    inputs = np.random.default_rng(0).normal(size=[STEPS * BATCH, width]).astype("float32")
    labels = np.full_like(inputs, np.inf if is_skipped else 1.0)
    before = peak()
    model.fit(inputs, labels, batch_size=BATCH, verbose=0)
    return {"before": before, "peak": peak()}


def run_statistics() -> dict:
    """Measures a good and a skipped step on both Kerases, and prints a table."""
    results: dict[str, dict] = {}
    rows = []
    for keras in common.KERASES:
        for outcome in ("made", "skipped"):
            added = {}
            for package in ("Keras", "keras_mp"):
                result = common.in_own_process(
                    "benchmarks.memory", package, outcome, keras=keras, on_cpu=True
                )
                added[package] = result["peak"] - result["before"]
                results.setdefault(keras, {}).setdefault(outcome, {})[package] = result
            megabytes = [f"{each / 1e6:.0f} MB" for each in added.values()]
            rows.append([keras, outcome, *megabytes, f"{added['keras_mp'] / added['Keras']:.2f}"])
    common.print_table(
        f"What fit adds at its peak: batch normalization of {CHANNELS} channels, batches of "
        f"{BATCH}, mixed_float16 (one run each)",
        ["", "steps are", "Keras's own", "keras_mp", "ratio"],
        rows,
    )
    return results


def run() -> dict:
    """Measures all models, and prints a table."""
    results: dict[str, dict[str, dict]] = {}
    for name in models.MODELS:
        for variant in fit.VARIANTS:
            result = common.in_own_process("benchmarks.memory", name, variant, on_cpu=True)
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
    return {"fit": results, "statistics": run_statistics(), "weights": master_weights.run()}


if __name__ == "__main__":
    name, variant = sys.argv[1:]
    if name in models.MODELS:
        print(json.dumps(measure(name, variant)))
    else:
        print(json.dumps(measure_statistics(name, is_skipped=variant == "skipped")))
