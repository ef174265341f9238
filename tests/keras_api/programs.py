"""Programs that need a process of their own; prints what they find, as JSON.

In most of them keras_mp cannot work, or not all of it.

Each is a fork of one process that has imported TensorFlow and no Keras, the last ones of one that
has imported keras_mp: imports take longer than what programs do.
"""

import importlib
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import tensorflow as tf


def _error_of_import() -> str:
    try:
        import keras_mp  # noqa: F401
    except ImportError as error:
        return str(error)
    return "imported"


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def backend_not_installed() -> list[str]:
    """Keras 3 for a backend that is not there."""
    os.environ |= {"TF_USE_LEGACY_KERAS": "0", "KERAS_BACKEND": "jax"}
    _forget("keras")  # TensorFlow has tried to import it.
    return [_error_of_import()]


def no_tf_keras() -> list[str]:
    """Keras 2 is asked for, and not installed."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    sys.modules["tf_keras"] = None
    return [_error_of_import()]


def not_supported() -> list[str]:
    """Another backend, of which keras_mp sees no more than the name; versions that are too old."""
    os.environ["TF_USE_LEGACY_KERAS"] = "0"
    import keras

    # The version is looked at before anything is imported that it may not have.
    private = {"keras.src.backend.common.symbolic_scope": None}
    errors = []
    for patch, hidden in (
        (mock.patch.object(tf.keras.backend, "backend", return_value="jax"), {}),
        (mock.patch.object(tf, "__version__", "2.15.1"), {}),
        (mock.patch.object(keras, "__version__", "3.4.1"), {}),
        (mock.patch.object(keras, "__version__", "3.3.0"), private),
    ):
        with patch, mock.patch.dict(sys.modules, hidden):
            errors.append(_error_of_import())
        _forget("keras_mp")
    return errors


def other_keras_before_a_policy() -> list[str]:
    """Models of the other Keras under float32, some with an optimizer of ours; then under ours."""
    import keras_mp

    other = importlib.import_module(keras_mp.keras_api.OTHER_PACKAGE)
    keras_mp.set_global_policy("float32")
    errors = [_error_of_compile(other, lambda: "sgd")]
    errors.append(_error_of_compile(other, lambda: keras_mp.LossScaleOptimizer("sgd")))
    inner = other.optimizers.SGD()
    errors.append(_error_of_compile(other, lambda: keras_mp.LossScaleOptimizer(inner)))
    keras_mp.set_global_policy("mixed_float16")
    return [*errors, _error_of_compile(other, lambda: "sgd")]


def other_keras_after_a_policy() -> list[str]:
    """Nobody watches imports: the other Keras is seen when the next policy is set."""
    import keras_mp

    keras_mp.set_global_policy("mixed_float16")
    finders = list(sys.meta_path)
    other = importlib.import_module(keras_mp.keras_api.OTHER_PACKAGE)
    assert sys.meta_path == finders
    keras_mp.set_global_policy(keras_mp.global_policy())
    return [_error_of_compile(other, lambda: "sgd")]


def a_scope_before_a_policy() -> list[Any]:
    """What a scope of 16 bits makes of a variable, where nothing else of keras_mp was used yet.

    And whether it is the same after a policy.
    """
    import keras_mp

    third = keras_mp.autocast_variable(tf.Variable(1 / 3))

    def values() -> list[tuple[str, float]]:
        with keras_mp.autocast_scope("float16"):
            wide = tf.convert_to_tensor(third, dtype=tf.float32)
            mixed = tf.ones([]) * third.value()
        return [(each.dtype.name, float(each)) for each in (wide, mixed)]

    before = values()
    keras_mp.Policy("mixed_float16")
    return [before == values(), *before]


def devices_after_a_policy() -> list[bool]:
    """Whether a program can configure its devices after its policy, and is warned all the same."""
    import keras_mp

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keras_mp.set_global_policy("mixed_bfloat16")
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.threading.set_intra_op_parallelism_threads(2)
        halves = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, halves)
        is_divided = len(tf.config.list_logical_devices("CPU")) == 2
        tf.random.set_seed(1)
        model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
        before = tf.random.uniform([]).numpy()
        tf.random.set_seed(1)
        tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.SGD(), "mse")
        draws_as_before = tf.random.uniform([]).numpy() == before
    is_warned = any("mixed_bfloat16 may run slower" in str(each.message) for each in caught)
    is_slow = keras_mp.hardware.why_slow("bfloat16") is not None
    return [is_divided, bool(draws_as_before), is_warned == is_slow]


def _error_of_compile(keras: Any, make_optimizer: Callable[[], Any]) -> str:
    model = keras.Sequential([keras.layers.Dense(1)])
    try:
        model.compile(make_optimizer(), "mse")
    except (TypeError, ValueError) as error:
        return str(error)
    return "compiled"


# What does not depend on the Keras of this process.
_OF_BOTH = (backend_not_installed, no_tf_keras, not_supported)


def main() -> None:
    """Runs them all."""
    context = multiprocessing.get_context("fork")

    def in_a_fork(function: Callable[[], list[str]]) -> list[str]:
        with context.Pool(1) as pool:
            return pool.apply(function)

    is_keras_3 = os.environ["TF_USE_LEGACY_KERAS"] == "0"
    raised = {each.__name__: in_a_fork(each) for each in _OF_BOTH if is_keras_3}
    import keras_mp  # noqa: F401

    for each in (
        other_keras_before_a_policy,
        other_keras_after_a_policy,
        a_scope_before_a_policy,
        devices_after_a_policy,
    ):
        raised[each.__name__] = in_a_fork(each)
    print(json.dumps(raised))


if __name__ == "__main__":
    main()
