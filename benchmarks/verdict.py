"""What one verdict for all replicas costs: a step with keras_mp, with Keras's own, unscaled."""

import json
import statistics
import sys

from benchmarks import common

COUNTS = (2, 4)
VARIABLES, SHAPE = 60, [64, 64]
REPEATS = 200


def measure(count: int) -> dict[str, list[float]]:
    """Seconds a step, for three optimizers on the same variables and gradients."""
    strategy = common.replicas(count)
    import tensorflow as tf

    import keras_mp

    wraps = {
        **common.WRAPPERS,
        "keras_mp, float32": lambda optimizer: keras_mp.LossScaleOptimizer(
            optimizer, aggregate_in_float16=False
        ),
    }

    def make_step(wrap):
        with strategy.scope():
            variables = [tf.Variable(tf.random.normal(SHAPE)) for _ in range(VARIABLES)]
            optimizer = wrap(tf.keras.optimizers.Adam(1e-3))
            optimizer.build(variables)

        def replica_step():
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(v) for v in variables]) * 1e-4
                loss, unscale = common.scaled(optimizer, loss)
            gradients = unscale(tape.gradient(loss, variables))
            optimizer.apply_gradients(zip(gradients, variables))

        return tf.function(lambda: strategy.run(replica_step))

    return common.interleaved(
        {name: make_step(wrap) for name, wrap in wraps.items()}, REPEATS, warm_up=10
    )


def run() -> dict:
    """Measures both Kerases on 2 and 4 logical devices, and prints a table."""
    results, rows = {}, []
    for keras in common.KERASES:
        for count in COUNTS:
            seconds = common.in_own_process("benchmarks.verdict", str(count), keras=keras)
            results[f"{keras}, {count} replicas"] = seconds
            rows.append(
                [
                    keras,
                    str(count),
                    f"{statistics.median(seconds['bare']) * 1e3:.1f} ms",
                    common.ratio(seconds, "Keras", "bare"),
                    common.ratio(seconds, "keras_mp, float32", "bare"),
                    common.ratio(seconds, "keras_mp", "bare"),
                    common.ratio(seconds, "keras_mp", "Keras"),
                ]
            )
    common.print_table(
        f"A step of Adam on {VARIABLES} variables of {SHAPE[0]}x{SHAPE[1]}, replicas on one CPU "
        "(ratios of medians, quartiles)",
        ["", "replicas", "bare", "Keras", "keras_mp, float32", "keras_mp", "keras_mp / Keras"],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
