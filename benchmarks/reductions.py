"""What a sum of gradients over replicas costs in accuracy, by how it is made, on real gradients.

A small network learns scikit-learn's digits on 2, 4 and 8 replicas. Beside `reduce_dtype` there are
two ways to add up in float32 what travels as bfloat16, and error feedback: what the rounding took
from a gradient is added to the next one (Seide 2014, "1-bit stochastic gradient descent").
"""

import json
import statistics
import sys

from benchmarks import common

COUNTS = (2, 4, 8)
SEEDS = 5
STEPS = 200
BATCH = 128
SCALE = 2.0**10

# What one worker sends for each float32 gradient, in bytes, with n workers. A ring sends each value
# twice but for the part that is at home; who gathers sends everything to everybody.
WAYS = {
    "float32": lambda n: 4 * 2 * (n - 1) / n,
    "float16, scaled": lambda n: 2 * 2 * (n - 1) / n,
    "bfloat16": lambda n: 2 * 2 * (n - 1) / n,
    "bfloat16, error feedback": lambda n: 2 * 2 * (n - 1) / n,
    # Each worker adds up one part in float32, and sends that back.
    "bfloat16, added in float32": lambda n: 2 * 2 * (n - 1) / n,
    "bfloat16, gathered": lambda n: 2 * (n - 1),
}


def measure(count: int) -> dict:
    """For each way: errors of sums at the beginning and the end, and what the network learnt."""
    strategy = common.replicas(count)
    import numpy as np
    import sklearn.datasets
    import tensorflow as tf

    from keras_mp.step import gradients, replicas

    data = sklearn.datasets.load_digits()
    images, labels = (data.data / 16).astype("float32"), data.target.astype("int32")
    held_out = len(labels) // 5
    shapes = [(64, 64), (64,), (64, 64), (64,), (64, 10), (10,)]
    with strategy.scope():
        weights = [tf.Variable(tf.zeros(shape)) for shape in shapes]
        momenta = [tf.Variable(tf.zeros(shape)) for shape in shapes]
        residuals = [
            tf.Variable(
                tf.zeros(shape),
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            for shape in shapes
        ]

    def logits_of(x):
        for i in (0, 2):
            x = tf.nn.relu(x @ weights[i] + weights[i + 1])
        return x @ weights[4] + weights[5]

    def loss_of(x, y):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits_of(x))
        return tf.reduce_mean(losses)

    def narrow(values):
        return [tf.cast(v, tf.bfloat16) for v in values]

    def widen(values):
        return [tf.cast(v, tf.float32) for v in values]

    def gathered(grads):
        gather = tf.distribute.get_replica_context().all_gather
        return [tf.reduce_sum(gather(tf.cast(g, tf.float32)[tf.newaxis], 0), 0) for g in grads]

    def with_feedback(grads):
        grads = [g + r for g, r in zip(grads, residuals)]
        for g, sent, r in zip(grads, narrow(grads), residuals):
            r.assign(g - tf.cast(sent, tf.float32))
        return replicas.all_reduce(grads, tf.bfloat16)

    def scaled(grads):
        sums = replicas.all_reduce(gradients.scale(grads, tf.constant(SCALE)), tf.float16)
        return gradients.unscale(sums, tf.constant(SCALE))

    sums = {
        "float32": lambda grads: replicas.all_reduce(grads, tf.float32),
        "float16, scaled": scaled,
        "bfloat16": lambda grads: replicas.all_reduce(grads, tf.bfloat16),
        "bfloat16, error feedback": with_feedback,
        "bfloat16, added in float32": lambda grads: widen(narrow(gathered(narrow(grads)))),
        "bfloat16, gathered": lambda grads: gathered(narrow(grads)),
    }
    assert list(sums) == list(WAYS)

    def own_gradients(rows):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        mine = tf.gather(tf.reshape(rows, [count, -1]), replica)
        with tf.GradientTape() as tape:
            loss = loss_of(tf.gather(images, mine), tf.gather(labels, mine)) / count
        return tape.gradient(loss, weights)

    def make_step(way):
        def step(rows):
            summed = sums[way](own_gradients(rows))
            for w, m, g in zip(weights, momenta, summed):
                m.assign(0.9 * m + g)
                w.assign_sub(0.1 * m)

        return tf.function(lambda rows: strategy.run(step, (rows,)))

    def make_probe(way):
        def probe(rows):
            own = own_gradients(rows)
            return own, sums[way](own)

        run = tf.function(lambda rows: strategy.run(probe, (rows,)))

        def error(rows):
            own, summed = run(rows)
            local = strategy.experimental_local_results
            exact = [sum(each.numpy().astype("float64") for each in local(g)) for g in own]
            found = [local(g)[0].numpy() for g in summed]
            off = sum(np.sum((a - b) ** 2) for a, b in zip(found, exact))
            return float(np.sqrt(off / sum(np.sum(b**2) for b in exact)))

        return error

    def begin(seed):
        generator = np.random.default_rng(seed)
        for variable, shape in zip(weights, shapes):
            deviation = np.sqrt(2 / shape[0]) if len(shape) == 2 else 0.0
            variable.assign(generator.normal(size=shape) * deviation)
        for variable in [*momenta, *residuals]:
            variable.assign(tf.zeros(variable.shape))
        order = generator.permutation(len(labels))
        tested, trained = order[:held_out], order[held_out:]
        draw = lambda: generator.choice(trained, BATCH, replace=False)  # noqa: E731
        return tested, trained, [tf.constant(draw()) for _ in range(STEPS)]

    steps = {way: make_step(way) for way in WAYS}
    probes = {way: make_probe(way) for way in WAYS if way != "bfloat16, error feedback"}
    results = {way: {"first": [], "last": [], "loss": [], "accuracy": []} for way in WAYS}
    for seed in range(SEEDS):
        for way in WAYS:
            tested, trained, batches = begin(seed)
            for i, rows in enumerate(batches):
                when = {0: "first", STEPS - 1: "last"}.get(i)
                if way == "float32" and when:  # every sum, of the same gradients
                    for each, error in probes.items():
                        results[each][when].append(error(rows))
                steps[way](rows)
            result, x, y = results[way], images[tested], labels[tested]
            result["loss"].append(float(loss_of(images[trained], labels[trained])))
            found = tf.argmax(logits_of(x), axis=1).numpy()
            result["accuracy"].append(float(np.mean(found == y)))
    return results


def run() -> dict:
    """Measures all counts of replicas, and prints a table."""
    results = {c: common.in_own_process("benchmarks.reductions", str(c)) for c in COUNTS}
    _print(results)
    return results


def _print(results: dict) -> None:
    def of_all(way, text):
        return " / ".join(text(results[count][way], results[count]["float32"]) for count in COUNTS)

    def error(when):
        return lambda result, _: f"{statistics.mean(result[when]):.0e}" if result[when] else ""

    def loss(result, exact):
        off = [a / b - 1 for a, b in zip(result["loss"], exact["loss"])]
        uncertainty = statistics.stdev(off) / len(off) ** 0.5
        return f"{statistics.mean(off):+.0%} ± {uncertainty:.0%}"

    def accuracy(result, exact):
        del exact
        return f"{statistics.mean(result['accuracy']):.1%}"

    rows = [
        [
            way,
            " / ".join(f"{bytes_sent(count):.1f}" for count in COUNTS),
            of_all(way, error("first")).strip(" /"),
            of_all(way, error("last")).strip(" /"),
            of_all(way, loss),
            of_all(way, accuracy),
        ]
        for way, bytes_sent in WAYS.items()
    ]
    common.print_table(
        f"Sums of gradients over {' / '.join(map(str, COUNTS))} replicas, against float64, and "
        f"{STEPS} steps with them (means of {SEEDS} runs)",
        ["sum", "bytes sent", "error, first step", "last step", "training loss", "accuracy"],
        rows,
    )


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
