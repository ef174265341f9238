"""The file in which a machine's speeds are remembered, so that only the first program measures.

A file for each machine, as far as speeds depend on it: a home folder may be shared by many. What
cannot be read, or is no such file, is as good as missing; where nothing can be written, nothing is.
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

from keras_mp.hardware.stopwatch import DTYPES, OPERATIONS, Speeds
from keras_mp.kernels.slow import Ratios

# Of what is written. Before 2 only the forward pass was timed.
_FORMAT = 2
_CPU_FIELDS = ("model name", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")
# They say which kernels TensorFlow chooses.
_ENVIRONMENT = ("TF_ENABLE_ONEDNN_OPTS", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE")


def describe(device: str) -> dict[str, Any]:
    """Describes all that speeds depend on, and initializes nothing.

    Args:
        device: str. What TensorFlow says of the device.

    Returns:
        dict of what JSON can hold.
    """
    return {
        "device": device,
        "cpu": {"machine": platform.machine(), "processor": platform.processor(), **cpu_info()},
        "cores": _cores(),
        "threads": tf.config.threading.get_intra_op_parallelism_threads(),
        "tensorflow": [tf.version.VERSION, tf.version.GIT_VERSION],
        "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
    }


def cpu_info() -> dict[str, str]:
    """Returns what Linux says of the first CPU: model and flags; nothing elsewhere."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = [line.partition(":") for line in text.partition("\n\n")[0].splitlines()]
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return {name: fields[name] for name in _CPU_FIELDS if name in fields}


def read(machine: dict[str, Any]) -> Speeds | None:
    """Returns the speeds of a machine, or None if they are not known.

    Args:
        machine: what `describe` returned.
    """
    stored = _stored(machine)
    try:
        speeds = {
            operation: {dtype: float(stored["speeds"][operation][dtype]) for dtype in DTYPES}
            for operation in OPERATIONS
        }
    except (ValueError, TypeError, LookupError):
        return None
    numbers = [number for by_dtype in speeds.values() for number in by_dtype.values()]
    are_speeds = all(math.isfinite(number) and number > 0 for number in numbers)
    return speeds if are_speeds else None


def read_kernels(machine: dict[str, Any]) -> Ratios:
    """Returns how slow 16-bit kernels are, as far as it is known; empty where it is not.

    Args:
        machine: what `describe` returned.
    """
    try:
        return {
            op: {dtype: float(ratio) for dtype, ratio in by_dtype.items()}
            for op, by_dtype in _stored(machine)["kernels"].items()
        }
    except (ValueError, TypeError, LookupError, AttributeError):
        return {}


def _stored(machine: dict[str, Any]) -> Any:
    """What the file of a machine says, if it is of this format; else an empty dict."""
    try:
        stored = json.loads(_path(machine).read_text())
        is_known = stored["machine"] == machine and stored["format"] == _FORMAT
    except (OSError, RuntimeError, ValueError, TypeError, LookupError):
        return {}
    return stored if is_known else {}


def write(machine: dict[str, Any], speeds: Speeds, kernels: Ratios | None = None) -> None:
    """Remembers the speeds of a machine, if there is a place for it.

    Args:
        machine: what `describe` returned.
        speeds: what `read` is to return.
        kernels: what `read_kernels` is to return. Defaults to None, which is nothing.
    """
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, whatever else is reading or writing.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = pathlib.Path(folder) / path.name
            found = {
                "format": _FORMAT,
                "machine": machine,
                "speeds": speeds,
                "kernels": kernels or {},
            }
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
