"""Two LSTMs, forward and backward: float32, bfloat16 with Keras's own loop, and with ours."""

import json
import statistics
from typing import Any

from benchmarks import common

# Batch, time steps, units.
SHAPES = [(64, 64, 512), (8, 100, 128), (32, 32, 64)]
_REPEATS = 9


def measure() -> dict[str, dict[str, list[float]]]:
    """Seconds by shape and by what runs the loop."""
    return {"x".join(map(str, shape)): _seconds(*shape) for shape in SHAPES}


def _seconds(batch: int, time: int, units: int) -> dict[str, list[float]]:
    import tensorflow as tf

    import keras_mp
    from keras_mp.kernels import slow

    x = tf.random.normal([batch, time, units])
    policy = keras_mp.Policy("mixed_bfloat16")

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

        slow.enable_float32_where_faster(ours)
        step()  # A function keeps what it was traced with.
        slow.enable_float32_where_faster()
        return lambda: step()[0].numpy()

    steps = {
        "float32": step_of("float32", ours=False),
        "Keras's own": step_of(policy, ours=False),
        "ours": step_of(policy, ours=True),
    }
    return common.interleaved(steps, _REPEATS)


def run() -> dict:
    """Measures both Kerases, and prints a table."""
    results: dict[str, dict] = {}
    rows = []
    for keras in common.KERASES:
        results[keras] = common.in_own_process("benchmarks.lstm", keras=keras)
        for shape, seconds in results[keras].items():
            milliseconds = [f"{1e3 * statistics.median(s):,.0f}" for s in seconds.values()]
            rows.append([keras, shape, *milliseconds, common.ratio(seconds, "ours", "Keras's own")])
    common.print_table(
        "Two LSTMs, batch x time x units, forward and backward: ms, and ratios (quartiles)",
        ["", "", "float32", "Keras's own", "ours", "ours / Keras's own"],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure()))
