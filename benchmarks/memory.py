"""Memory: statistics that are put back, and weights in 16 bits, by how digits are kept.

What is measured for a row has a process of its own.
"""

import json
import resource
import statistics
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import keras_mp
from benchmarks import common
from keras_mp.master_weights.adapter import size_in_bytes

STEPS = 5
# float32 statistics of 16 MiB each, of which batch normalization has two.
CHANNELS, BATCH = 2**22, 16
MATRICES, SHAPE = 10, (2500, 4000)
_ROUNDED = {"method": "stochastic_rounding"}
_SLOTS = {"slot_dtype": "bfloat16"}
# The dtype of variables, whether the forward pass is in bfloat16, and how digits are kept.
WEIGHTS: dict[str, tuple[str, bool, dict[str, str] | None]] = {
    "float32": ("float32", False, None),
    "mixed_bfloat16": ("float32", True, None),
    "bfloat16, Keras's own": ("bfloat16", True, None),
    "copy": ("bfloat16", True, {"method": "copy"}),
    "split": ("bfloat16", True, {"method": "split"}),
    "split, bfloat16 slots": ("bfloat16", True, {"method": "split", **_SLOTS}),
    "stochastic_rounding": ("bfloat16", True, _ROUNDED),
    "stochastic_rounding, bfloat16 slots": ("bfloat16", True, {**_ROUNDED, **_SLOTS}),
}
REFERENCE = "mixed_bfloat16"


def peak() -> int:
    """Bytes that were resident when most were."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def measure_statistics(package: str, outcome: str) -> dict[str, int]:
    """Peaks before and after `fit` of little more than batch normalization of many channels.

    Args:
        package: "Keras" or "keras_mp", whose `mixed_float16` and loss scaling are used.
        outcome: "skipped" if the gradients of every step overflow, or "made".
    """
    if package == "keras_mp":
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
    labels = np.full_like(inputs, np.inf if outcome == "skipped" else 1.0)
    before = peak()
    model.fit(inputs, labels, batch_size=BATCH, verbose=0)
    return {"before": before, "peak": peak()}


def measure_weights(variant: str) -> dict[str, float]:
    """Memory and time of steps of Adam with 100 million weights."""
    dtype, in_bfloat16, how = WEIGHTS[variant]
    tf.zeros([1]) + 1
    before = common.resident()
    weights = [tf.Variable(tf.zeros(SHAPE, dtype)) for _ in range(MATRICES)]
    optimizer = tf.keras.optimizers.Adam(1e-3)
    if how is not None:
        optimizer = keras_mp.MasterWeightOptimizer(optimizer, seed=1, **how)
    optimizer.build(weights)
    inputs = tf.ones([8, SHAPE[0]], "bfloat16" if in_bfloat16 else "float32")

    @tf.function
    def forward_and_backward() -> list[Any]:
        with tf.GradientTape() as tape:
            outputs = [tf.matmul(inputs, tf.cast(weight, inputs.dtype)) for weight in weights]
            loss = tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32) ** 2) for each in outputs])
        return tape.gradient(loss, weights)

    @tf.function
    def step() -> None:
        optimizer.apply_gradients(zip(forward_and_backward(), weights))

    @tf.function
    def update(gradients: list[Any]) -> None:
        optimizer.apply_gradients(zip(gradients, weights))

    count = MATRICES * SHAPE[0] * SHAPE[1]
    seconds, most = _median_seconds(step), peak()
    gradients = forward_and_backward()
    return {
        "bytes": sum(map(size_in_bytes, [*weights, *optimizer.variables])) / count,
        "peak": (most - before) / count,
        "step": seconds,
        "update": _median_seconds(lambda: update(gradients)),
    }


def _median_seconds(step: Any) -> float:
    return statistics.median(common.interleaved({"step": step}, STEPS, warm_up=1)["step"])


def _run_statistics() -> dict:
    found: dict[str, dict] = {}
    rows = []
    for keras in common.KERASES:
        for outcome in ("made", "skipped"):
            found[f"{keras}, {outcome}"] = of_package = {
                package: common.in_own_process(
                    "benchmarks.memory", "statistics", package, outcome, keras=keras, on_cpu=True
                )
                for package in ("Keras", "keras_mp")
            }
            own, ours = (each["peak"] - each["before"] for each in of_package.values())
            megabytes = (f"{each / 1e6:.0f} MB" for each in (own, ours))
            rows.append([keras, outcome, *megabytes, f"{ours / own:.2f}"])
    common.print_table(
        f"What fit adds at its peak: batch normalization of {CHANNELS} channels, batches of "
        f"{BATCH}, mixed_float16 (one run each)",
        ["", "steps are", "Keras's own", "keras_mp", "ratio"],
        rows,
    )
    return found


def _run_weights() -> dict:
    found = {
        variant: common.in_own_process("benchmarks.memory", "weights", variant, on_cpu=True)
        for variant in WEIGHTS
    }
    reference = found[REFERENCE]
    common.print_table(
        f"Adam, {MATRICES * SHAPE[0] * SHAPE[1]:,} weights, on Keras 3 (in terms of {REFERENCE})",
        ["", "bytes a weight", "peak of a step, a weight", "step", "update alone"],
        [
            [
                variant,
                f"{each['bytes']:.2f}",
                f"{each['peak']:.1f}",
                *(f"{each[k]:.2f} s ({each[k] / reference[k]:.2f})" for k in ("step", "update")),
            ]
            for variant, each in found.items()
        ],
    )
    return found


def run() -> dict:
    """Measures everything, and prints two tables."""
    return {"statistics": _run_statistics(), "weights": _run_weights()}


if __name__ == "__main__":
    what, *of = sys.argv[1:]
    print(json.dumps({"statistics": measure_statistics, "weights": measure_weights}[what](*of)))
