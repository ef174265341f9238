"""Do models end as good as in float32? Real tasks in each dtype, several seeds, both Kerases.

What was trained is in the lines of `parity.jsonl`. Who stops the command and runs it again goes on
from there.
"""

import concurrent.futures
import itertools
import json
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import keras_mp
from benchmarks import common
from benchmarks.acceptance import parity_page

SEEDS = 5
RESULTS = pathlib.Path("parity.jsonl")
# Trained with one seed; its loss scale is recorded.
LONG = "long"
# "bfloat16" has its weights in bfloat16, too.
VARIANTS = {**common.POLICIES, "bfloat16": ("keras_mp", "bfloat16")}


def _wrapped(variant: str, optimizer: Any) -> Any:
    """Wraps an optimizer by hand, as a program must where `compile` does not."""
    if variant == "bfloat16":
        return keras_mp.MasterWeightOptimizer(optimizer)
    scales = variant == "Keras's mixed_float16"
    return common.WRAPPERS["Keras"](optimizer) if scales else optimizer


class Trainer:
    """A model that is made and traced once, and set back for each seed.

    Args:
        task: a `parity_tasks.Task`.
        variant: one of VARIANTS.
        folder: for the state before the first step.
    """

    def __init__(self, task: Any, variant: str, folder: str) -> None:
        self.task = task
        with common.policy(*VARIANTS[variant]):
            self.model = task.make(
                scaled=common.scaled if VARIANTS[variant][0] == "Keras" else None,
                wrap=lambda optimizer: _wrapped(variant, optimizer),
            )
            self.optimizers = [self.model.optimizer]
            networks = [self.model]
            if hasattr(self.model, "d_optimizer"):
                self.optimizers.append(self.model.d_optimizer)
                networks = [self.model.generator, self.model.discriminator]
            for optimizer, network in zip(self.optimizers, networks, strict=True):
                optimizer.build(network.trainable_variables)
            self._state = tf.train.Checkpoint(model=self.model, optimizers=self.optimizers)
            self._first = self._state.write(f"{folder}/{variant}")
            self._fit(seed=0, steps=1)

    def _fit(self, seed: int, steps: int, callbacks: tuple = ()) -> None:
        x, y = self.task.batches(np.random.default_rng(seed), steps * self.task.batch)
        options = {"batch_size": self.task.batch, "shuffle": False, "verbose": 0}
        self.model.fit(x, y, callbacks=[*callbacks], **options)

    def train(self, seed: int, weights: list[Any]) -> dict:
        """Trains from first weights on the batches of a seed; returns what is written down."""
        self._state.read(self._first).assert_existing_objects_matched()
        self.model.set_weights(weights)
        scales: list[tuple[int, float]] = []
        callbacks = (_scale_recorder(scales),) if self.task.records_scale else ()
        start = time.process_time()
        self._fit(seed, self.task.steps, callbacks)
        result = {"seconds": time.process_time() - start}
        result["quality"] = self.task.quality(self.model)
        if not self.task.records_scale:
            return {**result, "skipped": sum(map(common.steps_skipped, self.optimizers))}
        # A scale goes down once for each skipped step.
        skipped = sum(after < before for (_, before), (_, after) in itertools.pairwise(scales))
        return {**result, "skipped": skipped, "scales": scales}


def _scale_recorder(scales: list[tuple[int, float]]) -> Any:
    class Recorder(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            scale = common.loss_scale(self.model.optimizer)
            if scale is not None and (not scales or scales[-1][1] != scale):
                scales.append((batch, scale))

    return Recorder()


def _first_weights(task: Any, seed: int) -> list[Any]:
    """Those of a seed, with which all variants begin."""
    tf.keras.utils.set_random_seed(seed)
    with common.policy(None, "float32"):
        return task.make().get_weights()


def measure(
    keras: str, path: pathlib.Path, seeds: int, names: Iterable[str], most_steps: int | None = None
) -> None:
    """Trains what is not in the results yet, and adds it to them.

    Args:
        keras: of this process.
        path: of the results.
        seeds: how many.
        names: of the tasks.
        most_steps: at which training ends.
    """
    from benchmarks.acceptance import parity_tasks

    done = {(r["task"], r["variant"], r["seed"]) for r in read(path) if r["keras"] == keras}
    for name in names:
        wanted = range(1 if name == LONG else seeds)
        missing = {v: [s for s in wanted if (name, v, s) not in done] for v in VARIANTS}
        if not any(missing.values()):
            continue
        task = parity_tasks.TASKS[name]()
        task = task._replace(steps=min(task.steps, most_steps or task.steps))
        weights = {seed: _first_weights(task, seed) for seed in wanted}
        about = {"measure": task.measure, "is_error": task.is_error, "steps": task.steps}
        for variant, of_variant in missing.items():
            for seed, result in _train(task, variant, {s: weights[s] for s in of_variant}):
                row = {"keras": keras, "task": name, "variant": variant, "seed": seed, **result}
                with path.open("a") as file:
                    file.write(json.dumps({**row, **about}) + "\n")
                print(*row.values(), file=sys.stderr, flush=True)


def _train(task: Any, variant: str, weights: dict[int, list]) -> Iterator[tuple[int, dict]]:
    """Trains with each seed. That a policy cannot train a task is its result."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = None
        for seed in weights:
            try:
                trainer = trainer or Trainer(task, variant, folder)
                yield seed, trainer.train(seed, weights[seed])
            except Exception as error:
                traceback.print_exc()
                yield seed, {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}


def read(path: pathlib.Path) -> list[dict]:
    """What was trained so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(seeds: int = SEEDS, only: Iterable[str] = ()) -> list[dict]:
    """Trains on both Kerases side by side, and prints tables.

    Args:
        seeds: how many.
        only: what the names of the tasks begin with; all by default.
    """
    path = RESULTS.absolute()

    def train(keras: str) -> None:
        arguments = (keras, str(path), str(seeds), *only)
        common.in_own_process("benchmarks.acceptance.parity", *arguments, keras=keras)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(train, common.KERASES))
    results = read(path)
    parity_page.print_tables(results)
    return results


def main(keras: str, path: str, seeds: str, *only: str) -> None:
    """Trains in this process, on one thread, so that seconds of the CPU mean something."""
    from benchmarks.acceptance import parity_tasks

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    names = [name for name in parity_tasks.TASKS if not only or name.startswith(only)]
    measure(keras, pathlib.Path(path), int(seeds), names)
    print(json.dumps(names))


if __name__ == "__main__":
    main(*sys.argv[1:])
