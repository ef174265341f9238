"""What every test, and every doctest, starts from."""

import gc
import pathlib
from collections.abc import Iterator

import absl.logging
import pytest
import tensorflow as tf

import keras_mp
from tests import inside, speed
from tests.common import needs_bfloat16_rewrite
from tests.models import FAMILIES

# The modules of the Keras that is not there.
_UNUSED = {"keras": "keras2*.py", "tf_keras": "keras3*.py"}[keras_mp.keras_api.ROOT_PACKAGE]

# Replicas are logical CPU devices. They must exist before TensorFlow starts.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)

speed.settle()


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    """Leaves out doctests of modules that cannot be imported."""
    is_unused = collection_path.match(f"keras_mp/keras_api/{_UNUSED}")
    # It needs an environment of its own.
    is_of_compiler = collection_path.match("tests/ci/gpu_compiler/run.py")
    return True if is_unused or is_of_compiler else None


@pytest.fixture(autouse=True)
def clean_slate(doctest_namespace: dict) -> Iterator[None]:
    """Names for doctests; policy, floatx, rewrite and kernels as a process starts with them."""
    doctest_namespace.update(keras_mp=keras_mp, tf=tf)
    tf.keras.backend.set_floatx("float32")
    keras_mp.set_global_policy(None)
    tf.keras.utils.set_random_seed(0)
    inside.forget_losses()
    yield
    if inside.enabled_rewrite() is not None:
        keras_mp.disable_mixed_precision_graph_rewrite()
    keras_mp.enable_float32_where_faster()
    keras_mp.enable_float32_sums()
    tf.keras.backend.set_floatx("float32")
    keras_mp.set_global_policy(None)


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    """The optimizer SGD of each family."""
    return request.param


@pytest.fixture
def kernels_of_tensorflow() -> None:
    """Nothing is computed in float32 since it is faster, which takes casts and both dtypes."""
    keras_mp.enable_float32_where_faster(False)


@pytest.fixture
def sums_of_tensorflow() -> None:
    """No sum is computed in float32, which takes casts."""
    keras_mp.enable_float32_sums(False)


@pytest.fixture
def infos(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What absl's logger, which TensorFlow has, is told, information included."""
    verbosity = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.INFO)
    with caplog.at_level("INFO", "absl"):
        yield caplog
    absl.logging.set_verbosity(verbosity)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips examples of the graph rewrite on CPUs where TensorFlow rewrites nothing."""
    for item in items:
        examples = item.dtest.examples if isinstance(item, pytest.DoctestItem) else ()
        if any("enable_mixed_precision_graph_rewrite(" in each.source for each in examples):
            item.add_marker(needs_bfloat16_rewrite)


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from looking through TensorFlow and through graphs all the time.

    Each graph that is traced allocates enough for it to start many times by default.
    """
    gc.freeze()
    gc.set_threshold(10_000)
