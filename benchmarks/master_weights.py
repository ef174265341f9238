"""Weights in 16 bits: bytes, peak memory and time of a step, and what they learn. On Keras 3."""

import json
import resource
import statistics
import sys
import time
from typing import Any

from benchmarks import common

MATRICES, SHAPE = 10, (2500, 4000)
# The dtype of variables, whether the forward pass is in bfloat16, and how digits are kept.
_METHODS: dict[str, dict[str, str]] = {
    "copy": {"method": "copy"},
    "split": {"method": "split"},
    "split, bfloat16 slots": {"method": "split", "slot_dtype": "bfloat16"},
    "stochastic_rounding": {"method": "stochastic_rounding"},
    "stochastic_rounding, bfloat16 slots": {
        "method": "stochastic_rounding",
        "slot_dtype": "bfloat16",
    },
}
_COMPILED = {"jit_compile": True}
VARIANTS: dict[str, tuple[str, bool, dict[str, Any] | None]] = {
    "float32": ("float32", False, None),
    "mixed_bfloat16": ("float32", True, None),
    "mixed_bfloat16, compiled": ("float32", True, _COMPILED),
    "bfloat16, Keras's own": ("bfloat16", True, None),
    **{name: ("bfloat16", True, how) for name, how in _METHODS.items()},
    **{f"{name}, compiled": ("bfloat16", True, how | _COMPILED) for name, how in _METHODS.items()},
}
STEPS, EPOCHS, SEEDS = 5, 25, 3


def _wrapped(optimizer: Any, how: dict[str, Any] | None) -> Any:
    import keras_mp

    if how is None:
        return optimizer
    if "method" in how:
        return keras_mp.MasterWeightOptimizer(optimizer, seed=1, **how)
    return keras_mp.OptimizerWrapper(optimizer, **how)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measure_step(variant: str) -> dict[str, float]:
    """Memory and time of steps of Adam with 100 million weights."""
    import tensorflow as tf

    dtype, in_bfloat16, how = VARIANTS[variant]
    tf.zeros([1]) + 1
    before = _resident()
    weights = [tf.Variable(tf.zeros(SHAPE, dtype)) for _ in range(MATRICES)]
    optimizer = _wrapped(tf.keras.optimizers.Adam(1e-3), how)
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

    variables = sum(v.shape.num_elements() * _size(v) for v in [*weights, *optimizer.variables])
    seconds = _median_seconds(step)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gradients = forward_and_backward()
    return {
        "bytes": variables / (MATRICES * SHAPE[0] * SHAPE[1]),
        "peak": (peak - before) / (MATRICES * SHAPE[0] * SHAPE[1]),
        "step": seconds,
        "update": _median_seconds(lambda: update(gradients)),
    }


def _size(variable: Any) -> int:
    from keras_mp.master_weights.adapter import size_in_bytes

    return size_in_bytes(variable) // max(variable.shape.num_elements(), 1)


def _median_seconds(step: Any) -> float:
    step()
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure_loss(variant: str) -> dict[str, list[float]]:
    """Final losses of an MLP on scikit-learn's digits, with AdamW and a learning rate of 3e-4."""
    import sklearn.datasets
    import tensorflow as tf

    import keras_mp

    dtype, in_bfloat16, how = VARIANTS[variant]
    policy = {("float32", False): "float32", ("float32", True): "mixed_bfloat16"}.get(
        (dtype, in_bfloat16), "bfloat16"
    )
    data = sklearn.datasets.load_digits()
    losses = []
    for seed in range(SEEDS):
        tf.keras.utils.set_random_seed(seed)
        layers = tf.keras.layers
        # Keras's own policy, under which nothing is wrapped.
        model = tf.keras.Sequential(
            [
                tf.keras.Input((64,)),
                layers.Dense(128, activation="relu", dtype=policy),
                layers.Dense(128, activation="relu", dtype=policy),
                layers.Dense(10, dtype=policy),
            ]
        )
        optimizer = _wrapped(tf.keras.optimizers.AdamW(3e-4), how)
        loss = keras_mp.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
        model.fit(data.data / 16, data.target, batch_size=32, epochs=EPOCHS, verbose=0)
        losses.append(float(model.evaluate(data.data / 16, data.target, verbose=0)))
    return {"losses": losses}


def run() -> dict:
    """Measures all variants, each in a process of its own, and prints a table."""
    results = {
        variant: {
            **common.in_own_process("benchmarks.master_weights", "step", variant),
            **common.in_own_process("benchmarks.master_weights", "loss", variant),
        }
        for variant in VARIANTS
    }
    reference = results["mixed_bfloat16"]
    rows = [
        [
            variant,
            f"{result['bytes']:.2f}",
            f"{result['peak']:.1f}",
            f"{result['step']:.2f} s ({result['step'] / reference['step']:.2f})",
            f"{result['update']:.2f} s ({result['update'] / reference['update']:.2f})",
            f"{statistics.mean(result['losses']):.4f}",
        ]
        for variant, result in results.items()
    ]
    weights = MATRICES * SHAPE[0] * SHAPE[1]
    common.print_table(
        f"Adam, {weights:,} weights, and an MLP on digits ({SEEDS} seeds), on Keras 3",
        ["", "bytes a weight", "peak of a step, a weight", "step", "update alone", "loss"],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps({"step": measure_step, "loss": measure_loss}[sys.argv[1]](sys.argv[2])))
