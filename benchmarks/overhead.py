"""What a LossScaleOptimizer adds to a step of the optimizer that it wraps: Keras's own and ours.

And what a GradScaler adds, beside our LossScaleOptimizer.

The gradients are those of a linear loss, so that a step is little else than the optimizer's.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator

from benchmarks import common

SECONDS = 2.0  # to measure a cell
BLOCK_SECONDS = 0.003
REPEATS = (15, 300)
SCALER = "GradScaler"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A step that is measured bare, with Keras's LossScaleOptimizer and with ours."""

    mode: str  # "graph", "XLA" or "eager"
    optimizer: str
    count: int  # of variables
    size: int  # of each, which is a square
    clip: bool = False
    minimize: bool = False
    scaler: bool = False  # with a GradScaler too?

    def __str__(self) -> str:
        clip = ", global_clipnorm" if self.clip else ""
        minimize = ", minimize" if self.minimize else ""
        sizes = f"{self.count} of {self.size}x{self.size}"
        return f"{self.mode}, {self.optimizer}{clip}{minimize}, {sizes}"


CELLS = {
    1: [
        *(Cell("graph", optimizer, 60, 256) for optimizer in ("SGD", "Adam")),
        Cell("graph", "Adam", 10, 32, scaler=True),
        Cell("graph", "AdamW", 60, 32),
        Cell("graph", "Adam", 60, 32, clip=True),
        Cell("graph", "Adam", 60, 32, minimize=True),
        Cell("XLA", "SGD", 60, 256),
        Cell("XLA", "Adam", 10, 32, scaler=True),
        Cell("eager", "SGD", 160, 32),
        Cell("eager", "Adam", 10, 32, scaler=True),
    ],
    2: [
        Cell("graph", "SGD", 300, 32),
        Cell("graph", "Adam", 10, 32, scaler=True),
        Cell("eager", "SGD", 10, 32),
    ],
}


def measure(
    replicas: int, cells: list[Cell], seconds: float
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yields the seconds a step of each cell: bare, Keras's and ours, and maybe a GradScaler's."""
    strategy = common.replicas(replicas) if replicas > 1 else None
    for cell in cells:
        wrappers = [*common.WRAPPERS, *[SCALER] * cell.scaler]
        steps = {
            wrapper: make_step(cell, wrapper, make_variables(cell, strategy), strategy)
            for wrapper in wrappers
        }
        yield str(cell), _in_blocks(steps, seconds)
        del steps
        gc.collect()


def make_variables(cell: Cell, strategy=None) -> list:
    """The variables of one cell."""
    import tensorflow as tf

    shape = [cell.size, cell.size]
    with strategy.scope() if strategy else contextlib.nullcontext():
        return [tf.Variable(tf.random.normal(shape)) for _ in range(cell.count)]


def make_step(cell: Cell, wrapper: str, variables: list, strategy=None):
    """A function that makes one step, and its argument, as a `functools.partial`."""
    import tensorflow as tf

    with strategy.scope() if strategy else contextlib.nullcontext():
        optimizer = getattr(tf.keras.optimizers, cell.optimizer)(
            1e-3, global_clipnorm=1.0 if cell.clip else None
        )
        if wrapper == SCALER:
            import keras_mp

            scaler = keras_mp.GradScaler()
        else:
            optimizer = common.WRAPPERS[wrapper](optimizer)
        optimizer.build(variables)
    slopes = [tf.random.normal(v.shape, stddev=1e-3) for v in variables]

    def apply_gradients(factor):
        # The gradients of `add_n([reduce_sum(v * slope)]) * factor`, which is never computed.
        factor, unscale = common.scaled(optimizer, factor)
        gradients = unscale([slope * factor for slope in slopes])
        optimizer.apply_gradients(zip(gradients, variables))

    def minimize(factor):
        def loss():
            return factor * tf.add_n([tf.reduce_sum(v * s) for v, s in zip(variables, slopes)])

        common.minimize(optimizer, loss, variables)

    def step_of_scaler(factor):
        factor = scaler.scale(factor)
        scaler.step(optimizer, zip([slope * factor for slope in slopes], variables))
        scaler.update()

    step = minimize if cell.minimize else apply_gradients
    if wrapper == SCALER:
        step = step_of_scaler
    if cell.mode == "XLA":
        step = tf.function(step, jit_compile=True)
    if strategy:
        step = _on_replicas(strategy, step)
    if cell.mode == "graph":
        step = tf.function(step)
    return functools.partial(step, tf.constant(1.0))


def _on_replicas(strategy, step):
    return lambda factor: strategy.run(step, [factor])


def _in_blocks(steps, seconds):
    for step in steps.values():
        step()
        step()
    start = time.perf_counter()
    for step in steps.values():
        step()
    turn = time.perf_counter() - start
    block = max(1, min(50, round(BLOCK_SECONDS * len(steps) / turn)))
    low, high = REPEATS
    lead_in = int(block > 1)
    repeats = max(low, min(high, round(seconds / (turn * (block + lead_in)))))
    return common.interleaved(steps, repeats, block=block, lead_in=lead_in)


def summary(seconds: dict[str, list[float]]) -> dict[str, float | list[float]]:
    """Medians and quartiles of one cell.

    Returns:
        dict: "bare", seconds a step; "Keras" and "keras_mp", what they add to it (median and
        quartiles over the turns); "ratio", keras_mp's part by Keras's, with the interval in which
        it is for 90 % of resamples of the turns; "step", a whole step with keras_mp by one with
        Keras's. Where a GradScaler was measured, "GradScaler", what that adds, and "scaler_ratio",
        by keras_mp's part.
    """
    results = {
        "bare": statistics.median(seconds["bare"]),
        "Keras": _median_and_quartiles(_added(seconds, "Keras")),
        "keras_mp": _median_and_quartiles(_added(seconds, "keras_mp")),
        "ratio": _ratio(seconds, "keras_mp", "Keras"),
        "step": statistics.median(seconds["keras_mp"]) / statistics.median(seconds["Keras"]),
    }
    if SCALER in seconds:
        results[SCALER] = _median_and_quartiles(_added(seconds, SCALER))
        results["scaler_ratio"] = _ratio(seconds, SCALER, "keras_mp")
    return results


def _added(seconds, name):
    return [whole - bare for whole, bare in zip(seconds[name], seconds["bare"])]


def _ratio(seconds, name, reference):
    """What one adds by what another adds, with an interval."""
    turns = list(zip(_added(seconds, name), _added(seconds, reference)))

    def ratio(turns):
        ours, others = (statistics.median(each) for each in zip(*turns))
        return ours / others if others else float("nan")

    generator = random.Random(0)
    resamples = [ratio(generator.choices(turns, k=len(turns))) for _ in range(200)]
    cuts = statistics.quantiles(resamples, n=20)
    return [ratio(turns), cuts[0], cuts[-1]]


def _median_and_quartiles(values):
    low, median, high = statistics.quantiles(values, n=4)
    return [median, low, high]


def run() -> dict:
    """Measures both Kerases on one device and on two, and prints each row when it is there."""
    common.print_header(
        "What a LossScaleOptimizer adds to a step of the bare optimizer, and a GradScaler (medians "
        "of the differences, quartiles; for the ratio, 90 % of resamples)",
        [
            *("", "", "bare", "Keras adds", "keras_mp adds", "keras_mp / Keras", "whole steps"),
            *(f"{SCALER} adds", f"{SCALER} / keras_mp"),
        ],
    )
    results: dict[str, dict] = {}
    for keras in common.KERASES:
        for replicas in CELLS:
            for cell, seconds in common.lines_of("benchmarks.overhead", str(replicas), keras=keras):
                name = cell if replicas == 1 else f"{cell}, {replicas} replicas"
                of_cell = summary(seconds)
                results.setdefault(keras, {})[name] = of_cell
                common.print_row([keras, name, *_columns(of_cell)])
    return results


def _columns(of_cell):
    columns = [
        f"{of_cell['bare'] * 1e3:.3f} ms",
        *(_in_milliseconds(of_cell[name]) for name in ("Keras", "keras_mp")),
        _with_interval(of_cell["ratio"]),
        f"{of_cell['step']:.2f}",
    ]
    if SCALER not in of_cell:
        return [*columns, "", ""]
    return [*columns, _in_milliseconds(of_cell[SCALER]), _with_interval(of_cell["scaler_ratio"])]


def _in_milliseconds(added):
    median, low, high = (1e3 * x for x in added)
    return f"{median:.3f} ms ({low:.3f}-{high:.3f})"


def _with_interval(ratio):
    return "{:.2f} ({:.2f}-{:.2f})".format(*ratio)


if __name__ == "__main__":
    _replicas = int(sys.argv[1])
    for row in measure(_replicas, CELLS[_replicas], SECONDS):
        print(json.dumps(row), flush=True)
