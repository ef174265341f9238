"""What a person waits for at the start of a program: the import, a first model, a first `fit`.

Each is measured in processes of their own, Keras's own policies and ours in turns.
"""

import json
import statistics
import sys
import time
import warnings

from benchmarks import common

TURNS = 3
BLOCKS = 10
POLICIES = ("mixed_bfloat16", "mixed_float16")
WHOSE = ("Keras", "keras_mp")
# How the first model is trained. `train_step` is one of the program's own, with a tape.
KINDS = ("fit", "train_step", "loop")
STEPS_OF_LOOP = 10


def measure(whose: str, policy: str, kind: str) -> dict[str, float]:
    """Seconds, in the order in which they pass. "again" is the same model, made and trained anew.

    Args:
        whose: one of `WHOSE`.
        policy: one of `POLICIES`.
        kind: one of `KINDS`.
    """
    seconds, last = {}, time.perf_counter()

    def passed(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[name], last = now - last, now

    import tensorflow as tf

    mixed_precision = tf.keras.mixed_precision
    passed("import tensorflow")
    if whose == "keras_mp":
        import keras_mp as mixed_precision
    passed("import keras_mp")
    mixed_precision.set_global_policy(policy)
    model = make_model()
    inputs = tf.random.stateless_normal([8, 16, 16, 8], [0, 1])
    model(inputs)
    passed("model")
    train(model, inputs, kind)
    passed(kind)
    train(make_model(), inputs, kind)
    passed(f"{kind} again")
    return seconds


def make_model():
    """A convolutional net of one output."""
    import tensorflow as tf

    layers = tf.keras.layers
    blocks = [
        layer
        for _ in range(BLOCKS)
        for layer in (
            layers.Conv2D(8, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
        )
    ]
    return tf.keras.Sequential(
        [layers.Input((16, 16, 8)), *blocks, layers.Flatten(), layers.Dense(1)]
    )


def train(model, inputs, kind: str) -> None:
    """Trains a model for a step of `fit`, or for `STEPS_OF_LOOP` of an eager loop."""
    import tensorflow as tf

    optimizer = tf.keras.optimizers.Adam(1e-3)

    def step(data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(data, training=True) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss}

    class Own(tf.keras.Model):
        def train_step(self, data):
            return step(data)

    if kind == "loop":
        with warnings.catch_warnings():
            # keras_mp says that nobody scales the loss.
            warnings.simplefilter("ignore")
            for _ in range(STEPS_OF_LOOP):
                step(inputs)
        return
    batches = tf.data.Dataset.from_tensors(inputs)
    if kind == "train_step":
        own = Own()
        own.net = model
        own.compile()
        own.fit(batches, shuffle=False, verbose=0)
    else:
        model.compile(optimizer, "mse")
        model.fit(batches.map(lambda x: (x, tf.zeros([8, 1]))), shuffle=False, verbose=0)


def run() -> dict:
    """Measures both Kerases, and prints a table."""
    results, rows = {}, []
    for keras in common.KERASES:
        for policy in POLICIES:
            for kind in KINDS:
                _measured("keras_mp", policy, kind, keras)  # in which no module is compiled later
                turns = [
                    {whose: _measured(whose, policy, kind, keras) for whose in WHOSE}
                    for _ in range(TURNS)
                ]
                results.setdefault(keras, {}).setdefault(policy, {})[kind] = turns
                rows += [[keras, policy, *row] for row in rows_of(turns, kind)]
    header = ["", "", "", *(f"{whose}, s" for whose in WHOSE), "keras_mp / Keras"]
    common.print_table("What comes first (medians of processes)", header, rows)
    return results


def _measured(whose, policy, kind, keras):
    return common.in_own_process("benchmarks.first", whose, policy, kind, keras=keras)


def rows_of(turns: list[dict[str, dict[str, float]]], kind: str) -> list[list[str]]:
    """The rows of the table: medians, and their ratio. What comes before all kinds, once.

    Args:
        turns: what each process of a turn has measured, by whose it was.
        kind: one of `KINDS`.
    """
    rows = []
    for name in turns[0][WHOSE[0]]:
        if not name.startswith(kind) and kind != KINDS[0]:
            continue
        own, ours = (statistics.median(turn[whose][name] for turn in turns) for whose in WHOSE)
        ratio = "" if name == "import keras_mp" else f"{ours / own:.2f}"
        rows.append([name, f"{own:.2f}", f"{ours:.2f}", ratio])
    return rows


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
