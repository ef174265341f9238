"""A description of the machine for the report."""

import importlib
import os
import pathlib
import platform
import re
from typing import Any

import tensorflow as tf

import keras_mp
from keras_mp import keras_api
from keras_mp.hardware import devices
from keras_mp.support import cpu

_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def describe() -> dict[str, Any]:
    """Returns devices, libraries and versions.

    Returns:
        dict of str, numbers and lists. Nothing in it names a person or a host.
    """
    build = tf.sysconfig.get_build_info()
    units, used = cpu.units()
    keras = importlib.import_module(keras_api.ROOT_PACKAGE)
    return {
        "gpus": [
            {"name": gpu.name, "compute_capability": gpu.capability} for gpu in devices.gpus()
        ],
        "tpu": devices.has_tpu(),
        "driver": _driver(),
        "cuda": build.get("cuda_version"),
        "cudnn": build.get("cudnn_version"),
        "cpu": cpu.name(),
        "cpu_units": units,
        "cpu_units_of_onednn": used,
        "threads": tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count(),
        "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "tensorflow": tf.version.VERSION,
        "keras": f"{keras_api.ROOT_PACKAGE} {keras.__version__}",
        "keras_mp": keras_mp.__version__,
    }


def _driver() -> str | None:
    """Returns the version of Nvidia's driver, where Linux tells it."""
    if not _DRIVER.exists():
        return None
    found = re.search(r"\s(\d+(\.\d+)+)\s", _DRIVER.read_text())
    return found and found[1]
