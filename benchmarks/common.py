"""What the benchmarks share: interleaved timing, and processes of their own."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
KERASES = {"Keras 3": "0", "tf_keras": "1"}


def interleaved(steps: dict[str, Callable[[], Any]], repeats: int, warm_up: int = 2) -> dict:
    """Times functions in turns, so that what else the machine does falls on all of them.

    Args:
        steps: dict of names and functions.
        repeats: int. How often each is timed.
        warm_up: int. How often each is called before.

    Returns:
        dict of names and lists of seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(warm_up + repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if i >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, reference: str) -> str:
    """Describes how long one takes in terms of another: ratio of medians, and its quartiles.

    The quartiles are those of the ratios of calls that were made one after the other.
    """
    medians = statistics.median(seconds[name]) / statistics.median(seconds[reference])
    pairs = [a / b for a, b in zip(seconds[name], seconds[reference])]
    low, _, high = statistics.quantiles(pairs, n=4)
    return f"{medians:.2f} ({low:.2f}-{high:.2f})"


def in_own_process(module: str, *arguments: str, keras: str = "Keras 3", prefix: tuple = ()) -> Any:
    """Runs `python -m module arguments` and returns what its last line says, as JSON.

    A process holds one `tf.keras`, and on CPUs one MirroredStrategy.

    Args:
        module: str.
        *arguments: of the command line.
        keras: str. "Keras 3" or "tf_keras".
        prefix: strings before `python`, such as another command that runs it.
    """
    done = subprocess.run(
        [*prefix, sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment(keras),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def environment(keras: str) -> dict[str, str]:
    """The environment of a benchmark's process: one of the Kerases, on CPUs, quiet."""
    return {
        **os.environ,
        "TF_USE_LEGACY_KERAS": KERASES[keras],
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }


def replicas(count: int) -> Any:
    """A MirroredStrategy of that many logical CPU devices. Before TensorFlow does anything else."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(cpu, devices)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Prints a table in Markdown."""
    print(f"\n{title}\n")
    for row in (header, ["---"] * len(header), *rows):
        print("| " + " | ".join(row) + " |")
