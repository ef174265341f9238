"""Measures how long models take to predict and to train, under each policy.

The times are for one batch.
"""

import contextlib
import functools

import tensorflow as tf

import keras_mp
from benchmarks import models
from benchmarks.models import Sizes
from keras_mp import keras_api
from keras_mp.hardware import devices, turns
from tests.gpu import promises

VARIANTS = (
    *("float32", "Keras's mixed_float16", "mixed_float16"),
    *("Keras's mixed_bfloat16", "mixed_bfloat16"),
)
_TURNS, _STEPS = 5, 10
_NAMES = {"dense": "MLP", "residual": "ResNet", "transformer": "transformer"}
_QUICK = {"dense": Sizes(4, 8, 256)}
_OF_CPUS = {
    "dense": Sizes(4, 1024, 256),
    "residual": Sizes(3, 16, 32, 32),
    "transformer": Sizes(2, 128, 32, 64, 1000),
}
_OF_GPUS = {
    "dense": Sizes(4, 8192, 256),
    "residual": Sizes(3, 128, 32, 32),
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
        with _in_force(variant):
            model, x, y = models.make(_NAMES[name], size)
            loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss)
        forward[variant] = functools.partial(model.predict_on_batch, x)  # pyright: ignore
        step[variant] = functools.partial(model.train_on_batch, x, y)
    seconds = {}
    for what, calls in (("forward", forward), ("step", step)):
        turns.take(calls, 2)  # Keras traces and compiles.
        seconds[what] = turns.medians(turns.take(calls, count))
    return seconds


def _in_force(variant: str) -> contextlib.AbstractContextManager[object]:
    """Puts a policy of keras_mp, or one of Keras's own, in force."""
    name = variant.removeprefix("Keras's ")
    if name == variant:
        return keras_mp.policy_scope(name)
    return keras_api.policy_scope(keras_api.BasePolicy(name))
