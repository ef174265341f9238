"""What every test, and every doctest, starts from."""

import os
import warnings
from collections.abc import Iterator

import pytest
import tensorflow as tf

import keras_mp
from keras_mp.grappler import passes

# Also in the processes that tests start. What is measured differs from run to run.
os.environ["KERAS_MP_MEASURE"] = "0"

# The module of the Keras that is not there.
_UNUSED = {"keras": "keras2", "tf_keras": "keras3"}[keras_mp.keras_api.ROOT_PACKAGE]
collect_ignore_glob = [f"keras_mp/keras_api/{_UNUSED}*.py"]

# Replicas are logical CPU devices. They must exist before TensorFlow starts.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)

# The machines that run the tests are slow with float16, which keras_mp says once per process.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
    keras_mp.hardware.warn_if_slow("float16")
    keras_mp.hardware.warn_if_slow("bfloat16")


@pytest.fixture(autouse=True)
def clean_slate(doctest_namespace: dict) -> Iterator[None]:
    """Names for doctests; policy, floatx and graph rewrite as TensorFlow starts with them."""
    doctest_namespace.update(keras_mp=keras_mp, tf=tf)
    tf.keras.backend.set_floatx("float32")
    keras_mp.set_global_policy(None)
    tf.keras.utils.set_random_seed(0)
    yield
    if passes.enabled_dtype() is not None:
        keras_mp.disable_mixed_precision_graph_rewrite()
    tf.keras.backend.set_floatx("float32")
    keras_mp.set_global_policy(None)
