"""What every test, and every doctest, starts from."""

import gc
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Takes what `.ci/run` gives for the oldest TensorFlow."""
    parser.addoption(
        "--fewer-cases", action="store_true", help="of each test the first and the last case only"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves cases out: every behaviour is looked at, but not with every combination."""
    if not config.getoption("--fewer-cases"):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(item) for each in cases.values() for item in (each[0], each[-1])}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


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


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from looking through TensorFlow again and again."""
    gc.freeze()
