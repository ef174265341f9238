"""Two LSTMs, forward and backward: float32, and 16 bits with Keras's own loop and with ours."""

import json
import statistics
from typing import Any

from benchmarks import common

# Batch, time steps, units.
SHAPES = [(64, 64, 512), (8, 100, 128), (32, 32, 64)]
DTYPES = ("bfloat16", "float16")
# Whose loop, and whether it is ours.
LOOPS = {"Keras's own": False, "ours": True}
_REPEATS = 9


def measure() -> dict[str, dict[str, list[float]]]:
    """Seconds by shape and by what runs the loop."""
    return {"x".join(map(str, shape)): _seconds(*shape) for shape in SHAPES}


def _seconds(batch: int, time: int, units: int) -> dict[str, list[float]]:
    import tensorflow as tf

    import keras_mp

    x = tf.random.normal([batch, time, units])

    def step_of(policy: Any, ours: bool) -> Any:
        layer = tf.keras.layers.LSTM
        layers = [layer(units, return_sequences=True, dtype=policy) for _ in range(2)]
        model = tf.keras.Sequential([tf.keras.Input([time, units]), *layers])
        weights = [getattr(each, "_value", each) for each in model.trainable_variables]

        @tf.function(autograph=False)
        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.cast(model(x), tf.float32)))
            return tape.gradient(loss, weights)

        keras_mp.enable_float32_where_faster(ours)
        step()  # A function keeps what it was traced with.
        keras_mp.enable_float32_where_faster()
        return lambda: step()[0].numpy()

    steps = {"float32": step_of("float32", ours=False)}
    for dtype in DTYPES:
        policy = keras_mp.Policy(f"mixed_{dtype}")
        for name, ours in LOOPS.items():
            steps[f"{dtype}, {name}"] = step_of(policy, ours)
    return common.interleaved(steps, _REPEATS)


def run() -> dict:
    """Measures both Kerases, and prints a table."""
    results: dict[str, dict] = {}
    rows, variants = [], []
    for keras in common.KERASES:
        results[keras] = common.in_own_process("benchmarks.lstm", keras=keras)
        for shape, seconds in results[keras].items():
            variants = list(seconds)
            milliseconds = [f"{1e3 * statistics.median(seconds[v]):,.0f}" for v in variants]
            own, ours = LOOPS
            ratios = [
                common.ratio(seconds, f"{dtype}, {ours}", f"{dtype}, {own}") for dtype in DTYPES
            ]
            rows.append([keras, shape, *milliseconds, *ratios])
    common.print_table(
        "Two LSTMs, batch x time x units, forward and backward: ms, and ratios (quartiles)",
        ["", "", *variants, *(f"{dtype}, ours / Keras's own" for dtype in DTYPES)],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure()))
