"""Heads in 16 bits, and in 16 bits with float32 outputs, against heads in float32. On Keras 3.

Final losses with our losses, and the time of the head's forward and backward pass.
"""

import json
import statistics
import sys
from typing import Any

from benchmarks import common, losses

DTYPES = ("bfloat16", "float16")
HEADS = ("float32", "16 bits", "output_dtype float32")
TASKS = ("digits", "language model")
# Rows of the inputs, their width, classes.
SHAPES = [(2048, 768, 4000), (512, 256, 1000)]
_REPEATS = 15


def _policy(head: str, dtype: str) -> Any:
    import keras_mp

    if head == "float32":
        return "float32"
    output_dtype = None if head == "16 bits" else "float32"
    return keras_mp.Policy(f"mixed_{dtype}", output_dtype=output_dtype)


def measure(task: str, head: str, dtype: str) -> Any:
    """Final losses of models in 16 bits, one for each seed; of "time", seconds by head."""
    if task == "time":
        return {"x".join(map(str, shape)): _seconds(*shape) for shape in SHAPES}
    how = {"variant": losses.REFERENCE, "policy": f"mixed_{dtype}", "head": _policy(head, dtype)}
    return [losses.TASKS[task](**how, seed=seed) for seed in range(losses.SEEDS)]


def _seconds(rows: int, width: int, classes: int) -> dict[str, list[float]]:
    """Times forward and backward passes of heads whose inputs are bfloat16."""
    import tensorflow as tf

    x = tf.cast(tf.random.normal([rows, width]), tf.bfloat16)
    upstream = tf.random.normal([rows, classes])

    def step_of(head: str) -> Any:
        layer = tf.keras.layers.Dense(classes, dtype=_policy(head, "bfloat16"))
        layer.build([rows, width])

        @tf.function(autograph=False)
        def step() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.cast(layer(x), tf.float32) * upstream)
            return tape.gradient(loss, [x, *layer.trainable_variables])

        return lambda: step()[0].numpy()

    return common.interleaved({head: step_of(head) for head in HEADS}, _REPEATS)


def run() -> dict:
    """Trains with each head, each in a process of its own, and times them; prints the tables."""
    results: dict[str, dict] = {dtype: {} for dtype in DTYPES}
    for dtype, of_dtype in results.items():
        for task in TASKS:
            of_dtype[task] = {
                head: common.in_own_process("benchmarks.heads", task, head, dtype) for head in HEADS
            }
        common.print_table(
            f"Final losses of models in mixed_{dtype}, mean of {losses.SEEDS} seeds, on Keras 3 "
            "(mean difference from a head in float32 with the same seed, ± two standard errors)",
            ["head", *TASKS],
            [
                [head, *(losses.cell(by[head], by["float32"]) for by in of_dtype.values())]
                for head in HEADS
            ],
        )
    times = common.in_own_process("benchmarks.heads", "time", "all", "bfloat16")
    common.print_table(
        "Forward and backward pass of a head, bfloat16: ms, and ratio to float32 (quartiles)",
        ["head", *times],
        [
            [
                head,
                *(
                    f"{1e3 * statistics.median(by[head]):.1f}, {common.ratio(by, head, 'float32')}"
                    for by in times.values()
                ),
            ]
            for head in HEADS
        ],
    )
    return {**results, "time": times}


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
