"""What histograms of exponents cost: a training step with them, and without."""

import json
import statistics
import sys

from benchmarks import common, models

REPEATS = 25
EVERY = 100
# Steps of a loop of one's own: without histograms, with nothing to count, and with everything. In
# `fit` a step that has nothing to count is one without.
WITHOUT, IDLE, DUE = "without", "not due", "due"


def measure(name: str) -> dict[str, list[float]]:
    """Seconds a step of a model, without histograms, and with them, never or always due."""
    import tensorflow as tf

    import keras_mp
    from keras_mp.numerics.counting import ExponentHistograms

    keras_mp.set_global_policy("mixed_bfloat16")
    model, inputs, labels = models.make(name, models.SIZES["full"][name])
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

    steps = {WITHOUT: make_step(None), IDLE: make_step(2**40), DUE: make_step(1)}
    return common.interleaved(steps, REPEATS, warm_up=2, lead_in=1)


def share(seconds: dict[str, list[float]], between: str) -> str:
    """By how much histograms every 100 steps make these longer: of medians, and its quartiles.

    Args:
        seconds: what `measure` returns.
        between: what the steps between two counts are, `IDLE` or `WITHOUT`.
    """

    def longer(without: float, idle: float, due: float) -> float:
        return 100 * (((EVERY - 1) * idle + due) / (EVERY * without) - 1)

    kinds = (WITHOUT, between, DUE)
    of_medians = longer(*(statistics.median(seconds[kind]) for kind in kinds))
    low, _, high = statistics.quantiles(map(longer, *(seconds[kind] for kind in kinds)), n=4)
    return f"{of_medians:+.1f} % ({low:+.1f} to {high:+.1f} %)"


def run() -> dict:
    """Measures both Kerases, and prints a table."""
    results, rows = {}, []
    for keras in common.KERASES:
        for name in models.SIZES["full"]:
            seconds = common.in_own_process("benchmarks.numerics", name, keras=keras)
            results.setdefault(keras, {})[name] = seconds
            rows.append(
                [
                    keras,
                    name,
                    f"{statistics.median(seconds[WITHOUT]) * 1e3:.1f} ms",
                    common.ratio(seconds, IDLE, WITHOUT),
                    common.ratio(seconds, DUE, WITHOUT),
                    share(seconds, IDLE),
                    share(seconds, WITHOUT),
                ]
            )
    common.print_table(
        "A training step in mixed_bfloat16 with histograms of all gradients and outputs "
        "(ratios of medians, quartiles)",
        [
            *("", "", WITHOUT, "a step not due", "a step that is due"),
            *(f"every {EVERY} steps, own loop", f"every {EVERY} steps, fit"),
        ],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
