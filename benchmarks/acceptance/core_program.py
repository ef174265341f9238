"""The core of keras_mp in one program: what must work with any private name missing.

python -m benchmarks.acceptance.core_program [--plain]

Each part runs by itself and prints a line: its name, then "passed" or the error. The last line of
a part that a private name is missing for begins with "off". `--plain` runs the parts that Keras has
too, without keras_mp: what fails there is no fault of keras_mp.
"""

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

K = tf.keras
_X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
_Y = _X.sum(axis=1, keepdims=True)


def _model(policy: Any) -> Any:
    K.utils.set_random_seed(0)
    keras_mp: Any = sys.modules.get("keras_mp", K.mixed_precision)
    keras_mp.set_global_policy(policy)
    layers = [K.layers.Dense(4, activation="relu"), K.layers.Dense(1)]
    return K.Sequential([K.layers.Input([3]), *layers])


def _check_trained(before: list[Any], after: list[Any]) -> None:
    assert all(np.all(np.isfinite(each)) for each in after), "a weight is not finite"
    assert any(np.any(a != b) for a, b in zip(before, after, strict=True)), "no weight has changed"


def _fit(policy: Any, **arguments: Any) -> Any:
    model = _model(policy)
    model.compile("adam", "mse", metrics=["mae"], **arguments)
    before = model.get_weights()
    history = model.fit(_X, _Y, batch_size=4, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    _check_trained(before, model.get_weights())
    assert np.isfinite(np.asarray(model.predict(_X, verbose=0), "float32")).all()
    return model


def _save(policy: Any) -> None:
    model = _fit(policy)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        loaded = K.models.load_model(path)
        for one, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        loaded.fit(_X, _Y, verbose=0)
        path = os.path.join(folder, "checkpoint")
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
        before = int(model.optimizer.iterations)
        model.fit(_X, _Y, verbose=0)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(path)
        assert int(model.optimizer.iterations) == before


def _own_loop(policy: Any, optimizer: Any, run: Callable[..., Any] | None) -> None:
    model = _model(policy)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(model(_X, training=True) - _Y, tf.float32) ** 2)
            scaled = optimizer.get_scaled_loss(loss) if run is not None else loss
        grads = tape.gradient(scaled, model.trainable_variables)
        if run is not None:
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        return loss

    step = (run or tf.function)(step)
    before = model.get_weights()
    losses = [float(step()) for _ in range(5)]
    assert losses[-1] < losses[0], losses
    _check_trained(before, model.get_weights())


def plain_parts() -> dict[str, Callable[[], Any]]:
    """Returns the parts that Keras has too."""
    return {
        "fit in float32": lambda: _fit("float32"),
        "fit in mixed_float16, and saving": lambda: _save("mixed_float16"),
        "own loop": lambda: _own_loop("float32", K.optimizers.SGD(0.01), None),
    }


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the parts, by their names."""
    import keras_mp

    half = keras_mp.Policy("mixed_float16")

    def scaler() -> None:
        model, scaler = _model(half), keras_mp.GradScaler()
        optimizer = K.optimizers.SGD(0.01)
        before = model.get_weights()
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.cast(model(_X) - _Y, tf.float32) ** 2)
                scaled = scaler.scale(loss)
            grads = tape.gradient(scaled, model.trainable_variables)
            scaler.step(optimizer, zip(grads, model.trainable_variables))
            scaler.update()
        _check_trained(before, model.get_weights())

    def autocast() -> None:
        keras_mp.set_global_policy("float32")
        x = tf.constant(_X)
        with keras_mp.autocast("bfloat16"):
            result = tf.matmul(x, x, transpose_b=True)
        assert result.dtype == tf.float32

    def replicas() -> None:
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            model = _model(half)
            model.compile("adam", "mse")
        before = model.get_weights()
        model.fit(_X, _Y, batch_size=8, epochs=2, verbose=0)
        _check_trained(before, model.get_weights())

    def overflow() -> None:
        v = tf.Variable([1.0])
        optimizer = keras_mp.LossScaleOptimizer(K.optimizers.SGD(1.0))
        optimizer.minimize(lambda: tf.reduce_sum(v * float("inf")), [v])
        assert v.numpy().tolist() == [1.0]
        assert int(optimizer.steps_skipped) == 1

    def own_loop(run: Callable[..., Any]) -> None:
        optimizer = keras_mp.LossScaleOptimizer(K.optimizers.SGD(0.01))
        _own_loop(half, optimizer, run)

    return {
        "fit in float32": lambda: _fit("float32"),
        "fit in mixed_float16, and saving": lambda: _save(half),
        "fit in mixed_bfloat16": lambda: _fit(keras_mp.Policy("mixed_bfloat16")),
        "fit with XLA": lambda: _fit(half, jit_compile=True),
        "own loop": lambda: own_loop(tf.function),
        "own loop in eager": lambda: own_loop(lambda step: step),
        "overflow": overflow,
        "GradScaler": scaler,
        "layer of keras_mp": lambda: keras_mp.layers.Layer(dtype=half),
        "autocast": autocast,
        "two replicas": replicas,
    }


def run(parts: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Runs parts, and returns the error of each, or "passed"; features that are off among them."""
    found = {}
    for name, part in parts.items():
        try:
            part()
            found[name] = "passed"
        except Exception as error:
            found[name] = _said(error)
    return found


def results(is_plain: bool = False) -> tuple[dict[str, str], list[str]]:
    """Runs the parts in a process that has computed nothing.

    Args:
        is_plain: bool. Whether Keras runs them without keras_mp. Defaults to False.

    Returns:
        What each part has said, and the warnings of keras_mp.
    """
    cpus = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpus[0], two)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = {"import": "passed", **run(plain_parts() if is_plain else parts())}
        except Exception as error:
            found = {"import": _said(error)}
    ours = [each for each in caught if each.category.__name__ == "MixedPrecisionWarning"]
    return found, [str(each.message) for each in ours]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")


def main() -> int:
    """Runs the parts and prints a line for each."""
    found, warned = results(is_plain="--plain" in sys.argv)
    for name, result in found.items():
        print(f"{name}: {result}")
    for message in warned:
        print(f"warning: {message}")
    return int(any(result != "passed" for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
