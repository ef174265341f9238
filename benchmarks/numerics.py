"""What histograms of exponents cost: a training step with them, and without."""

import json
import statistics
import sys

from benchmarks import common, models

REPEATS = 15
EVERY = 100
# A step in which nothing is counted, and one in which everything is.
IDLE, DUE = "not due", "due"


def measure(name: str) -> dict[str, list[float]]:
    """Seconds a step of a model, without histograms, and with them, never or always due."""
    import tensorflow as tf

    import keras_mp
    from keras_mp.numerics import ExponentHistograms

    keras_mp.set_global_policy("mixed_bfloat16")
    model, inputs, labels = models.make(name)
    model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def make_step(every):
        if every is None:
            return tf.function(lambda: model.train_step((inputs, labels)))
        histograms = ExponentHistograms(model, every=every)

        @tf.function
        def step():
            with histograms.step():
                return model.train_step((inputs, labels))

        return step

    steps = {"without": make_step(None), IDLE: make_step(2**40), DUE: make_step(1)}
    return common.interleaved(steps, REPEATS, warm_up=2, lead_in=1)


def share(seconds: dict[str, list[float]]) -> str:
    """By how much histograms every 100 steps make these longer: of medians, and its quartiles."""

    def longer(without: float, idle: float, due: float) -> float:
        return 100 * (((EVERY - 1) * idle + due) / (EVERY * without) - 1)

    kinds = ("without", IDLE, DUE)
    of_medians = longer(*(statistics.median(seconds[kind]) for kind in kinds))
    low, _, high = statistics.quantiles(map(longer, *(seconds[kind] for kind in kinds)), n=4)
    return f"{of_medians:+.1f} % ({low:+.1f} to {high:+.1f} %)"


def run() -> dict:
    """Measures both Kerases, and prints a table."""
    results, rows = {}, []
    for keras in common.KERASES:
        for name in models.MODELS:
            seconds = common.in_own_process("benchmarks.numerics", name, keras=keras)
            results.setdefault(keras, {})[name] = seconds
            rows.append(
                [
                    keras,
                    name,
                    f"{statistics.median(seconds['without']) * 1e3:.1f} ms",
                    common.ratio(seconds, IDLE, "without"),
                    common.ratio(seconds, DUE, "without"),
                    share(seconds),
                ]
            )
    common.print_table(
        "A training step in mixed_bfloat16 with histograms of all gradients and outputs "
        "(ratios of medians, quartiles)",
        ["", "", "without", "a step not due", "a step that is due", f"every {EVERY} steps"],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
