"""What a LossScaleOptimizer adds to a step of the optimizer that it wraps: Keras's own and ours.

And what a GradScaler adds, beside our LossScaleOptimizer.

The gradients are those of a linear loss, so that a step is little else than the optimizer's.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator

import tensorflow as tf

import keras_mp
from benchmarks import common

SECONDS = 2.0  # to measure a cell
BLOCK_SECONDS = 0.003
REPEATS = (15, 300)
SCALER = "GradScaler"
ADDED = ("Keras", "keras_mp", SCALER)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A step that is measured bare, with Keras's LossScaleOptimizer and with ours."""

    mode: str  # "graph", "XLA" or "eager"
    optimizer: str
    count: int  # of variables
    size: int  # of each, which is a square
    scaler: bool = False  # with a GradScaler too?

    def __str__(self) -> str:
        return f"{self.mode}, {self.optimizer}, {self.count} of {self.size}x{self.size}"


CELLS = {
    1: [
        *(Cell("graph", optimizer, 60, 256) for optimizer in ("SGD", "Adam")),
        Cell("graph", "Adam", 10, 32, scaler=True),
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
    shape = [cell.size, cell.size]
    with strategy.scope() if strategy else contextlib.nullcontext():
        return [tf.Variable(tf.random.normal(shape)) for _ in range(cell.count)]


def make_step(cell: Cell, wrapper: str, variables: list, strategy=None):
    """A function that makes one step, and its argument, as a `functools.partial`."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        optimizer = getattr(tf.keras.optimizers, cell.optimizer)(1e-3)
        if wrapper == SCALER:
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

    def step_of_scaler(factor):
        factor = scaler.scale(factor)
        scaler.step(optimizer, zip([slope * factor for slope in slopes], variables))
        scaler.update()

    step = step_of_scaler if wrapper == SCALER else apply_gradients
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
    repeats = max(low, min(high, round(seconds / (turn * block))))
    return common.interleaved(steps, repeats, block=block)


def summary(seconds: dict[str, list[float]]) -> dict[str, float | list[float]]:
    """Medians and quartiles of one cell.

    Returns:
        dict: "bare", seconds a step; for each other, what it adds to them: its median and its
        quartiles over the turns. "step" is a whole step with keras_mp by one with Keras's.
    """
    added = {
        name: [whole - bare for whole, bare in zip(each, seconds["bare"])]
        for name, each in seconds.items()
        if name != "bare"
    }
    return {
        "bare": statistics.median(seconds["bare"]),
        **{name: _median_and_quartiles(each) for name, each in added.items()},
        "step": statistics.median(seconds["keras_mp"]) / statistics.median(seconds["Keras"]),
    }


def _median_and_quartiles(values):
    low, median, high = statistics.quantiles(values, n=4)
    return [median, low, high]


def run() -> dict:
    """Measures both Kerases on one device and on two, and prints each row when it is there."""
    common.print_header(
        "What a LossScaleOptimizer adds to a step of the bare optimizer, and a GradScaler (medians "
        "of the differences, quartiles)",
        ["", "", "bare", *(f"{name} adds" for name in ADDED), "whole steps"],
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
    added = (_in_milliseconds(of_cell[name]) if name in of_cell else "" for name in ADDED)
    return [f"{of_cell['bare'] * 1e3:.3f} ms", *added, f"{of_cell['step']:.2f}"]


def _in_milliseconds(added):
    median, low, high = (1e3 * x for x in added)
    return f"{median:.3f} ms ({low:.3f}-{high:.3f})"


if __name__ == "__main__":
    _replicas = int(sys.argv[1])
    for row in measure(_replicas, CELLS[_replicas], SECONDS):
        print(json.dumps(row), flush=True)
