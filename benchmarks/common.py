"""What the benchmarks share: interleaved timing, and processes of their own."""

import contextlib
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
KERASES = {"Keras 3": "0", "tf_keras": "1"}
# Whose policy it is, and its name.
POLICIES: dict[str, tuple[str | None, str]] = {
    "float32": (None, "float32"),
    "mixed_float16": ("keras_mp", "mixed_float16"),
    "mixed_bfloat16": ("keras_mp", "mixed_bfloat16"),
    "Keras's mixed_float16": ("Keras", "mixed_float16"),
    "Keras's mixed_bfloat16": ("Keras", "mixed_bfloat16"),
}


def interleaved(
    steps: dict[str, Callable[[], Any]],
    repeats: int,
    warm_up: int = 2,
    block: int = 1,
) -> dict:
    """Times functions in turns, so that what else the machine does falls on all of them.

    Args:
        steps: dict of names and functions.
        repeats: int. How often each is timed.
        warm_up: int. How often each is called before.
        block: int. How often each is called in a turn; the time is that of one call.

    Returns:
        dict of names and lists of seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(warm_up + repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(block):
                step()
            if i >= warm_up:
                seconds[name].append((time.perf_counter() - start) / block)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, reference: str) -> str:
    """Describes how long one takes in terms of another: ratio of medians, and its quartiles.

    The quartiles are those of the ratios of calls that were made one after the other.
    """
    medians = statistics.median(seconds[name]) / statistics.median(seconds[reference])
    pairs = [a / b for a, b in zip(seconds[name], seconds[reference])]
    low, _, high = statistics.quantiles(pairs, n=4)
    return f"{medians:.2f} ({low:.2f}-{high:.2f})"


def machine() -> str:
    """Says what the figures were measured on."""
    import tensorflow as tf

    from keras_mp.hardware import devices
    from keras_mp.support import cpu

    units, _ = cpu.units()
    gpus = [gpu.name for gpu in devices.gpus()]
    parts = [*gpus, cpu.name(), *units, f"{os.cpu_count()} cores"]
    versions = f"TensorFlow {tf.__version__}, Python {platform.python_version()}"
    return f"{', '.join(parts)}; {versions}"


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def lines_of(
    module: str, *arguments: str, keras: str = "Keras 3", on_cpu: bool = False
) -> Iterator[Any]:
    """Runs `python -m module arguments`, and yields what it prints when it does: lines of JSON.

    A process holds one `tf.keras`, and on CPUs one MirroredStrategy.

    Args:
        module: str.
        *arguments: of the command line.
        keras: str. "Keras 3" or "tf_keras".
        on_cpu: bool. Whether it sees no GPU: where the host's memory is measured, or what is traced
            is about a machine that is not this one. Defaults to False.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    chosen = {"TF_USE_LEGACY_KERAS": KERASES[keras], "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **chosen, **hidden}, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            # Libraries print, too.
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def in_own_process(module: str, *arguments: str, **options: Any) -> Any:
    """Returns the last of `lines_of`."""
    *_, last = lines_of(module, *arguments, **options)
    return last


def set_policy(whose: str | None, name: str) -> None:
    """Sets the global policy: one of "keras_mp", or else Keras's own."""
    import tensorflow as tf

    import keras_mp

    own = tf.keras.mixed_precision
    (keras_mp if whose == "keras_mp" else own).set_global_policy(name)


@contextlib.contextmanager
def policy(whose: str | None, name: str) -> Iterator[None]:
    """A context manager in which a global policy is set. After it, that is Keras's float32."""
    with warnings.catch_warnings():
        # Both say that 16 bits are slow here, and keras_mp that the policy is not one of its own.
        warnings.filterwarnings("ignore", "mixed_.* may run slower")
        warnings.filterwarnings("ignore", "The global policy")
        set_policy(whose, name)
        try:
            yield
        finally:
            set_policy(None, "float32")


def _keras(optimizer):
    import tensorflow as tf

    return tf.keras.mixed_precision.LossScaleOptimizer(optimizer)


def _keras_mp(optimizer):
    import keras_mp

    return keras_mp.LossScaleOptimizer(optimizer)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda optimizer: optimizer,
    "Keras": _keras,
    "keras_mp": _keras_mp,
}


def scaled(optimizer: Any, loss: Any) -> tuple[Any, Callable[[list], list]]:
    """Scales a loss as the optimizer of this Keras does; a bare optimizer's stays.

    Returns:
        The loss, and a function that makes of its gradients what `apply_gradients` takes.
    """
    import tensorflow as tf

    if not isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        return loss, list
    if hasattr(tf.keras.mixed_precision.LossScaleOptimizer, "scale_loss"):
        return optimizer.scale_loss(loss), list
    return optimizer.get_scaled_loss(loss), optimizer.get_unscaled_gradients


def steps_skipped(optimizer: Any) -> int:
    """How many steps an optimizer or a `GradScaler` has skipped; 0 if it does not scale."""
    if hasattr(optimizer, "steps_skipped"):
        return int(optimizer.steps_skipped)
    # Keras's own halves the scale for each, and does not double it in as few steps as these.
    scale = loss_scale(optimizer)
    return 0 if scale is None else round(math.log2(optimizer.initial_scale / scale))


def loss_scale(optimizer: Any) -> float | None:
    """The loss scale of an optimizer, ours or Keras's own; None if it does not scale."""
    for name in ("dynamic_scale", "loss_scale"):
        if hasattr(optimizer, name):
            return float(getattr(optimizer, name))
    return None


def replicas(count: int) -> Any:
    """A MirroredStrategy of that many logical CPU devices. Before TensorFlow does anything else."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(cpu, devices)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Prints a table in Markdown."""
    print_header(title, header)
    for row in rows:
        print_row(row)


def print_header(title: str, header: list[str]) -> None:
    """Begins a table."""
    print(f"\n{title}\n")
    print_row(header)
    print_row(["---"] * len(header))


def print_row(row: list[str]) -> None:
    """Goes on with a table."""
    print("| " + " | ".join(row) + " |", flush=True)
