"""What right sums and the memory of forward writes cost: a step with them beside one without."""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks import common, models

TURNS = 21
POLICIES = ("mixed_bfloat16", "mixed_float16")
WITH, *WITHOUT = VARIANTS = ("keras_mp", "TensorFlow's sums", "forward writes stay")


@contextlib.contextmanager
def _traced_as(variant: str) -> Iterator[None]:
    import keras_mp
    from keras_mp.step import state_rollback

    if variant == "TensorFlow's sums":
        keras_mp.enable_float32_sums(False)
        yield
        keras_mp.enable_float32_sums(True)
    elif variant == "forward writes stay":
        nothing = state_rollback.Kept((), [])
        with mock.patch.object(state_rollback, "keep", return_value=nothing):
            yield
    else:
        yield


def make_step(name: str, policy: str, variant: str) -> Callable[[], Any]:
    """A compiled model's `train_on_batch`, traced with both guards or without one of them."""
    import tensorflow as tf

    import keras_mp

    tf.keras.utils.set_random_seed(1)
    with keras_mp.policy_scope(policy):
        model, inputs, labels = models.make(name)
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.Adam(1e-4))
        model.compile(optimizer, loss, jit_compile=False)

    def step() -> Any:
        return model.train_on_batch(inputs, labels)

    with _traced_as(variant):
        step()
    return step


def measure(name: str, policy: str) -> dict[str, dict[str, list[float]]]:
    """Seconds, and seconds of the processor, that a step takes, for each variant in turn."""
    steps = {variant: make_step(name, policy, variant) for variant in VARIANTS}
    seconds: dict[str, dict[str, list[float]]] = {v: {"wall": [], "cpu": []} for v in steps}
    order = list(steps)
    for _ in range(TURNS):
        for variant in order:
            wall, cpu = time.perf_counter(), time.process_time()
            steps[variant]()
            seconds[variant]["wall"].append(time.perf_counter() - wall)
            seconds[variant]["cpu"].append(time.process_time() - cpu)
        order.append(order.pop(0))  # What comes after a slow one has the caches against it.
    return seconds


def run() -> dict:
    """Measures the models of `fit` on both Kerases, and prints a table."""
    results, rows = {}, []
    everywhere: dict[tuple[str, str], list[float]] = {}
    for keras in common.KERASES:
        for name in models.MODELS:
            for policy in POLICIES:
                seconds = common.in_own_process("benchmarks.guards", name, policy, keras=keras)
                results[f"{keras}, {name}, {policy}"] = seconds
                row = [keras, name, policy, f"{_milliseconds(seconds):.1f} ms"]
                for variant in WITHOUT:
                    for clock in ("wall", "cpu"):
                        of_turn = [
                            a / b for a, b in zip(seconds[WITH][clock], seconds[variant][clock])
                        ]
                        row.append(_spread(of_turn))
                        everywhere.setdefault((variant, clock), []).extend(of_turn)
                rows.append(row)
    rows.append(["all", "", "", "", *map(_spread, everywhere.values())])
    common.print_table(
        "A step of keras_mp as a multiple of one with TensorFlow's own sums, and of one that "
        "keeps no forward writes (medians of the ratios of turns, quartiles)",
        ["", "", "", "step", "sums, clock", "sums, CPU", "writes, clock", "writes, CPU"],
        rows,
    )
    return results


def _milliseconds(seconds: dict[str, dict[str, list[float]]]) -> float:
    return statistics.median(seconds[WITH]["wall"]) * 1e3


def _spread(ratios: list[float]) -> str:
    low, median, high = statistics.quantiles(ratios, n=4)
    return f"{median:.3f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
