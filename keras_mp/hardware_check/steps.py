"""How long models take in `predict` and in a step of `fit`, under each policy."""

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import keras_mp
from keras_mp.hardware import tables
from keras_mp.hardware_check import models

VARIANTS = (
    *("float32", "Keras's mixed_float16", "mixed_float16"),
    *("Keras's mixed_bfloat16", "mixed_bfloat16"),
)
_TURNS, _STEPS = 5, 10
_QUICK = {"dense": 8}
_OF_CPUS = {"dense": 1024, "residual": 16, "transformer": 128}
_OF_GPUS = {"dense": 8192, "residual": 256, "transformer": 1024}


Seconds = dict[str, dict[str, float]]


def measure(quick: bool) -> dict[str, Seconds | str]:
    """Times models as Keras runs them, compiled by XLA where it compiles them by itself.

    Args:
        quick: bool. Takes one small model, and one turn.

    Returns:
        dict of models, of "forward" and "step", and of `VARIANTS`: the seconds of a batch. In place
        of a model that cannot be run, what it raised.
    """
    sizes = _QUICK if quick else _OF_GPUS if tables.gpus() else _OF_CPUS
    turns, steps = (1, 2) if quick else (_TURNS, _STEPS)
    return {name: _seconds_or_error(name, size, turns, steps) for name, size in sizes.items()}


def all_run(found: dict[str, Seconds | str]) -> tuple[bool, str]:
    """Whether all models ran.

    Args:
        found: what `measure` returned.
    """
    errors = [f"{name}: {each}" for name, each in found.items() if isinstance(each, str)]
    return not errors, "; ".join(errors) or f"{', '.join(found)} under {len(VARIANTS)}"


def _seconds_or_error(name: str, size: int, turns: int, steps: int) -> Seconds | str:
    try:
        return _seconds(name, size, turns, steps)
    except Exception as error:  # There may be no memory for one; the others are to be timed.
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _seconds(name: str, size: int, turns: int, steps: int) -> Seconds:
    found: dict[str, dict[str, list[float]]] = {
        what: {variant: [] for variant in VARIANTS} for what in ("forward", "step")
    }
    clocks = {variant: _Clock(variant, name, size) for variant in VARIANTS}
    for turn in range(1 + turns):
        for variant, clock in clocks.items():
            forward, step = clock.forward(steps), clock.step(steps)
            if turn > 0:  # In the first one Keras traces and compiles.
                found["forward"][variant].append(forward)
                found["step"][variant].append(step)
    return {
        what: {variant: statistics.median(each) for variant, each in of_variants.items()}
        for what, of_variants in found.items()
    }


class _Clock:
    """Times a model under a policy.

    Args:
        variant: one of `VARIANTS`.
        name: one of `models.MODELS`.
        size: as `models.make` takes it.
    """

    def __init__(self, variant: str, name: str, size: int) -> None:
        with _in_force(variant):
            self._model, x, y = models.make(name, size)
            loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self._model.compile("adam", loss)
        # Each batch is the same, and is there before it is asked for.
        self._inputs = tf.data.Dataset.from_tensors(x).repeat()
        self._examples = tf.data.Dataset.from_tensors((x, y)).repeat()

    def forward(self, steps: int) -> float:
        """Seconds of a batch in `predict`."""
        watch = _Watch()
        self._model.predict(self._inputs, steps=1 + steps, verbose=0, callbacks=[watch])
        return watch.seconds(steps)

    def step(self, steps: int) -> float:
        """Seconds of a step in `fit`."""
        watch = _Watch()
        self._model.fit(
            self._examples, steps_per_epoch=1 + steps, verbose=0, shuffle=False, callbacks=[watch]
        )
        return watch.seconds(steps)


class _Watch(tf.keras.callbacks.Callback):
    """Notes when the first batch has ended, and when all have been computed."""

    def __init__(self) -> None:
        super().__init__()
        self._start = self._end = 0.0

    def seconds(self, batches: int) -> float:
        """Seconds of a batch."""
        return (self._end - self._start) / batches

    def _ended(self, batch: int) -> None:
        if batch == 0:
            self._start = time.perf_counter()
        self._end = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        float(logs["loss"])  # A GPU may still be computing it.
        self._ended(batch)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._ended(batch)


@contextlib.contextmanager
def _in_force(variant: str) -> Iterator[None]:
    """Puts a policy of keras_mp, or one of Keras's own, in force."""
    if not variant.startswith("Keras's "):
        with keras_mp.policy_scope(variant):
            yield
        return
    own = tf.keras.mixed_precision
    before = own.global_policy() if hasattr(own, "global_policy") else own.dtype_policy()
    own.set_global_policy(variant.removeprefix("Keras's "))
    try:
        yield
    finally:
        own.set_global_policy(before)
