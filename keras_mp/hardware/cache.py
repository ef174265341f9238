"""The file that keeps a machine's speeds, so that only the first program measures.

There is a file for each machine, as far as speeds depend on it: a home folder may be shared by
many. A file that cannot be read, or has another format, counts as missing. Where nothing can be
written, nothing is.
"""

import contextlib
import hashlib
import json
import math
import os
import pathlib
import platform
import tempfile
from typing import Any

import tensorflow as tf

from keras_mp.hardware import devices
from keras_mp.hardware.stopwatch import DTYPES, OPERATIONS, Speeds
from keras_mp.kernels.slow import Ratios

# Of what is written. Before 2 only the forward pass was timed.
_FORMAT = 2
# They say which kernels TensorFlow chooses.
_ENVIRONMENT = ("TF_ENABLE_ONEDNN_OPTS", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE")


def describe(device: str) -> dict[str, Any]:
    """Returns all that speeds depend on, and initializes nothing.

    Args:
        device: str. What TensorFlow says of the device.

    Returns:
        dict of what JSON can hold.
    """
    cpu = {"machine": platform.machine(), "processor": platform.processor(), **devices.cpu_info()}
    return {
        "device": device,
        "cpu": cpu,
        "cores": _cores(),
        "threads": tf.config.threading.get_intra_op_parallelism_threads(),
        "tensorflow": [tf.version.VERSION, tf.version.GIT_VERSION],
        "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
    }


def read(machine: dict[str, Any]) -> tuple[Speeds, Ratios] | None:
    """Returns the speeds of a machine and how slow its 16-bit kernels are, or None.

    Args:
        machine: what `describe` returned.
    """
    try:
        stored = json.loads(_path(machine).read_text())
        if stored["machine"] != machine or stored["format"] != _FORMAT:
            return None
        speeds = {
            operation: {dtype: float(stored["speeds"][operation][dtype]) for dtype in DTYPES}
            for operation in OPERATIONS
        }
        kernels = {
            op: {dtype: float(ratio) for dtype, ratio in by_dtype.items()}
            for op, by_dtype in stored["kernels"].items()
        }
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return None
    numbers = [number for by_dtype in speeds.values() for number in by_dtype.values()]
    are_speeds = all(math.isfinite(number) and number > 0 for number in numbers)
    return (speeds, kernels) if are_speeds else None


def write(machine: dict[str, Any], speeds: Speeds, kernels: Ratios) -> None:
    """Keeps the speeds of a machine, if there is a place for them.

    Args:
        machine: what `describe` returned.
        speeds: what `stopwatch.measure` returned.
        kernels: what `kernels.slow.ratios` returned.
    """
    found = {"format": _FORMAT, "machine": machine, "speeds": speeds, "kernels": kernels}
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, whatever else is reading or writing.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = pathlib.Path(folder) / path.name
            whole.write_text(json.dumps(found, indent=1))
            whole.replace(path)


def _path(machine: dict[str, Any]) -> pathlib.Path:
    key = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return _folder() / f"hardware-{key}.json"


def _folder() -> pathlib.Path:
    if own := os.environ.get("KERAS_MP_CACHE"):
        return pathlib.Path(own)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored, says the XDG Base Directory Specification.
    parent = pathlib.Path(cache) if os.path.isabs(cache) else pathlib.Path.home() / ".cache"
    return parent / "keras_mp"


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
