"""Checks whether keras_mp keeps its promises on this machine, and how fast it is.

`python -m tests --gpu` runs it. It is for machines on which keras_mp has not been run
before, GPUs above all: one page to read and one JSON to send.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import keras_mp
from keras_mp.support import messages
from tests.gpu import machine, promises, replicas, steps
from tests.gpu.promises import judge


def check(quick: bool = False) -> dict[str, Any]:
    """Checks this machine.

    If it has GPUs, TensorFlow must not have initialized its devices.

    Args:
        quick: bool. Takes models too small to tell a speed, to see that they run, and times no
            operations. Defaults to False.

    Returns:
        dict of what JSON can hold: "machine", "promises", "kernels", "speeds" and "steps".
    """
    with _quiet():
        # First, since this process takes the memory of a GPU as soon as it computes.
        of_replicas = replicas.judged_in_own_process()
        kernels = promises.measure_kernels()
        sums_are_right = functools.partial(promises.sums_are_right, kernels)
        seconds = steps.measure(quick)
        all_run = functools.partial(steps.all_run, seconds)
        judged = [
            *(judge(name, each) for name, each in promises.PROMISES.items()),
            judge("sums and convolutions in 16 bits are right", sums_are_right),
            *of_replicas,
            judge("models run under every policy", all_run),
        ]
        return {
            "machine": machine.describe(),
            "quick": quick,
            "promises": [each._asdict() for each in judged],
            "kernels": kernels,
            "speeds": None if quick else keras_mp.hardware.speeds(anew=True),
            "steps": seconds,
        }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps warnings from the page."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # TensorFlow warns of the many functions that promises trace.
    try:
        with warnings.catch_warnings():
            # The check itself finds out what is slow here.
            warnings.simplefilter("ignore", messages.MixedPrecisionWarning)
            yield
    finally:
        logger.setLevel(level)
