"""Weights in 16 bits: bytes, peak memory and time of a step. On Keras 3."""

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
VARIANTS: dict[str, tuple[str, bool, dict[str, Any] | None]] = {
    "float32": ("float32", False, None),
    "mixed_bfloat16": ("float32", True, None),
    "bfloat16, Keras's own": ("bfloat16", True, None),
    **{name: ("bfloat16", True, how) for name, how in _METHODS.items()},
}
STEPS = 5
_CLAIMS = """
From their pages, for PyTorch. optimi, Kahan summation (https://github.com/warner-benjamin/optimi):
with Adam 37.5 to 45.5 percent less memory than mixed precision, activations aside. torchao,
stochastic rounding (https://github.com/pytorch/ao/tree/main/torchao/optim): no float32 copy of the
weights; of memory in all, 51.6 GB with Llama2-7B in bfloat16, and 39.1 GB with slots in 8 bits.
Here, variables, slots and a gradient in the variables' dtype: 16 bytes a weight in mixed_bfloat16,
10.1 with "split" and slots in bfloat16 (37 percent less), 8 with stochastic rounding (50)."""


def policy(variant: str) -> str:
    """The policy of Keras's own under which layers have the variables of a variant."""
    dtype, in_bfloat16, _ = VARIANTS[variant]
    return "mixed_bfloat16" if dtype == "float32" and in_bfloat16 else dtype


def wrapped(optimizer: Any, variant: str, seed: int = 0) -> Any:
    """Wraps an optimizer as a variant has it."""
    import keras_mp

    *_, how = VARIANTS[variant]
    if how is None:
        return optimizer
    return keras_mp.MasterWeightOptimizer(optimizer, seed=seed + 1, **how)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measure_step(variant: str) -> dict[str, float]:
    """Memory and time of steps of Adam with 100 million weights."""
    import tensorflow as tf

    dtype, in_bfloat16, _ = VARIANTS[variant]
    tf.zeros([1]) + 1
    before = _resident()
    weights = [tf.Variable(tf.zeros(SHAPE, dtype)) for _ in range(MATRICES)]
    optimizer = wrapped(tf.keras.optimizers.Adam(1e-3), variant)
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


def run() -> dict:
    """Measures all variants, each in a process of its own, and prints a table."""
    results = {
        variant: common.in_own_process("benchmarks.master_weights", variant, on_cpu=True)
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
        ]
        for variant, result in results.items()
    ]
    weights = MATRICES * SHAPE[0] * SHAPE[1]
    common.print_table(
        f"Adam, {weights:,} weights, on Keras 3 (in terms of mixed_bfloat16)",
        ["", "bytes a weight", "peak of a step, a weight", "step", "update alone"],
        rows,
    )
    print(_CLAIMS)
    return results


if __name__ == "__main__":
    print(json.dumps(measure_step(sys.argv[1])))
