"""Measures how long models take to predict and to train, under each policy.

The times are for one batch.
"""

import functools

import tensorflow as tf

from benchmarks import common, models
from benchmarks.models import Sizes
from keras_mp.hardware import devices, turns
from tests.gpu import promises

VARIANTS = tuple(common.POLICIES)
_TURNS, _STEPS = 5, 10
_QUICK = {"MLP": Sizes(4, 8, 256)}
_OF_CPUS = {
    "MLP": Sizes(4, 1024, 256),
    "ResNet": Sizes(3, 16, 32, 32),
    "transformer": Sizes(2, 128, 32, 64, 1000),
}
_OF_GPUS = {
    "MLP": Sizes(4, 8192, 256),
    "ResNet": Sizes(3, 128, 32, 32),
    "transformer": Sizes(2, 1024, 32, 64, 1000),
}

Seconds = dict[str, dict[str, float]]


def measure(quick: bool) -> dict[str, Seconds | str]:
    """Times models as Keras runs them.

    XLA compiles them where Keras lets it by default.

    Args:
        quick: bool. Takes one small model, and one turn.

    Returns:
        dict of models, of "forward" and "step", and of `VARIANTS`: the seconds of a batch. In place
        of a model that cannot be run, what it raised.
    """
    sizes = _QUICK if quick else _OF_GPUS if devices.gpus() else _OF_CPUS
    count = 1 if quick else _TURNS * _STEPS
    return {name: _seconds_or_error(name, size, count) for name, size in sizes.items()}


def all_run(found: dict[str, Seconds | str]) -> tuple[bool, str]:
    """Whether all models ran.

    Args:
        found: what `measure` returned.
    """
    errors = [f"{name}: {each}" for name, each in found.items() if isinstance(each, str)]
    return not errors, "; ".join(errors) or f"{', '.join(found)} under {len(VARIANTS)}"


def _seconds_or_error(name: str, size: Sizes, count: int) -> Seconds | str:
    try:
        return _seconds(name, size, count)
    except Exception as error:  # There may be no memory for one. The others are timed.
        return promises.first_line(error)


def _seconds(name: str, size: Sizes, count: int) -> Seconds:
    forward, step = {}, {}
    for variant in VARIANTS:
        with common.policy(*common.POLICIES[variant]):
            model, x, y = models.make(name, size)
            loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss)
        forward[variant] = functools.partial(model.predict_on_batch, x)  # pyright: ignore
        step[variant] = functools.partial(model.train_on_batch, x, y)
    seconds = {}
    for what, calls in (("forward", forward), ("step", step)):
        turns.take(calls, 2)  # Keras traces and compiles.
        seconds[what] = turns.medians(turns.take(calls, count))
    return seconds
