"""A description of the machine for the report."""

import importlib
import os
import pathlib
import platform
import re

import tensorflow as tf

import keras_mp
from keras_mp import keras_api
from keras_mp.hardware import devices
from keras_mp.support import cpu

_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def describe() -> list[str]:
    """Returns lines about versions, devices and libraries. Nothing names a person or a host."""
    keras = importlib.import_module(keras_api.ROOT_PACKAGE)
    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    units, used = (", ".join(names) or "none" for names in cpu.units())
    lines = [
        f"keras_mp {keras_mp.__version__}, TensorFlow {tf.version.VERSION}, "
        f"{keras_api.ROOT_PACKAGE} {keras.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}",
        f"CPU: {cpu.name()}, {threads} threads; 16-bit units: {units}; used: {used}",
    ]
    if not devices.gpus():
        return [*lines, "A TPU was seen." if devices.has_tpu() else "No GPU was seen."]
    build = tf.sysconfig.get_build_info()
    cuda, cudnn = (build.get(f"{name}_version", "unknown") for name in ("cuda", "cudnn"))
    tensor_float_32 = tf.config.experimental.tensor_float_32_execution_enabled()
    return [
        *lines,
        *(f"GPU: {gpu}" for gpu in devices.gpus()),
        f"driver {_driver() or 'unknown'}, CUDA {cuda}, cuDNN {cudnn}; "
        f"TensorFloat-32 {'on' if tensor_float_32 else 'off'}",
    ]


def _driver() -> str | None:
    """Returns the version of Nvidia's driver, where Linux tells it."""
    if not _DRIVER.exists():
        return None
    found = re.search(r"\s(\d+(\.\d+)+)\s", _DRIVER.read_text())
    return found and found[1]
