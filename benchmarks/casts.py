"""What casting a weight once saves: layers that read one many times, Keras's own and ours."""

import json
import statistics

from benchmarks import common

READS, WIDTH, BATCH = 50, 1024, 16
REPEATS = 30


def measure() -> dict[str, dict]:
    """Seconds a step and casts in a forward pass, for each way of reading a weight."""
    import tensorflow as tf

    import keras_mp

    def build(self, shape):
        initializer = tf.keras.initializers.RandomNormal(stddev=WIDTH**-0.5, seed=1)
        self.w = self.add_weight(shape=(WIDTH, WIDTH), initializer=initializer, name="w")

    def dense(self, x):
        return tf.tanh(x @ tf.convert_to_tensor(self.w))

    def in_a_row(self, x):
        for _ in range(READS):
            x = dense(self, x)
        return x

    def in_a_loop(self, x):
        def body(i, x):
            return i + 1, dense(self, x)

        return tf.while_loop(lambda i, x: i < READS, body, (0, x), maximum_iterations=READS)[1]

    def in_a_loop_once(self, x):
        with self.weights_cast_once():
            return in_a_loop(self, x)

    def make(base, call):
        return type("Reads", (base,), {"build": build, "call": call})(dtype="mixed_bfloat16")

    x = tf.random.stateless_normal([BATCH, WIDTH], [1, 2])

    def make_step(layer):
        layer(x)

        @tf.function(autograph=False)
        def step():
            with tf.GradientTape() as tape:
                y = tf.reduce_mean(tf.cast(layer(x), tf.float32))
            return tape.gradient(y, layer.trainable_variables)

        return step

    own, ours = tf.keras.layers.Layer, keras_mp.layers.Layer
    variants = {
        f"{READS} reads in a row": {"Keras": (own, in_a_row), "keras_mp": (ours, in_a_row)},
        f"a loop of {READS} steps": {
            "Keras": (own, in_a_loop),
            "keras_mp": (ours, in_a_loop),
            "keras_mp, weights_cast_once": (ours, in_a_loop_once),
        },
    }
    results = {}
    for case, layers in variants.items():
        layers = {name: make(*what) for name, what in layers.items()}
        seconds = common.interleaved(
            {name: make_step(layer) for name, layer in layers.items()}, REPEATS
        )
        for name, layer in layers.items():
            forward = tf.function(lambda layer=layer: layer(x), autograph=False)
            casts = _casts(forward.get_concrete_function().graph.as_graph_def())
            results.setdefault(case, {})[name] = {"casts": casts, "seconds": seconds[name]}
    return results


def _casts(graph) -> int:
    """How often a forward pass casts: the body of the loop runs READS times."""
    bodies = [f.node_def for f in graph.library.function if "body" in f.signature.name]
    weights = [(graph.node, 1), *((body, READS) for body in bodies)]
    return sum(times * [node.op for node in nodes].count("Cast") for nodes, times in weights)


def run() -> dict:
    """Measures both Kerases and prints a table."""
    results, rows = {}, []
    for keras in common.KERASES:
        results[keras] = common.in_own_process("benchmarks.casts", keras=keras)
        for case, variants in results[keras].items():
            seconds = {name: variant["seconds"] for name, variant in variants.items()}
            for name, variant in variants.items():
                milliseconds = statistics.median(seconds[name]) * 1e3
                against = common.ratio(seconds, name, "Keras")
                rows.append(
                    [keras, case, name, str(variant["casts"]), f"{milliseconds:.1f} ms", against]
                )
    common.print_table(
        f"A weight of {WIDTH}x{WIDTH} in mixed_bfloat16, forward and backward (ratios of medians, "
        "quartiles; one of the casts is the input's)",
        ["", "", "", "casts", "step", "in terms of Keras"],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure()))
