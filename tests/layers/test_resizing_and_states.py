"""Layers of Keras whose gradients or states met two dtypes."""

import contextlib
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, differentiated, made, pairs, unscaled

layers = tf.keras.layers
IMAGES = tf.random.stateless_uniform([2, 6, 6, 3], [1, 2])


def _gradients(policy: Any, interpolation: str, how: str, region: str | None = None) -> list[Any]:
    def make() -> Any:
        stack = [
            layers.Conv2D(4, 3, activation="relu", padding="same"),
            layers.UpSampling2D(2, interpolation=interpolation),
            layers.Conv2D(1, 3, padding="same"),
        ]
        return tf.keras.Sequential([layers.Input([6, 6, 3]), *stack])

    model = made(make, policy)

    def step(x: tf.Tensor) -> list[Any]:
        loss = lambda: tf.reduce_mean(tf.cast(model(x), tf.float32) ** 2)  # noqa: E731
        return differentiated(loss, model.trainable_variables)[1]

    if how != "eager":
        step = tf.function(step, jit_compile=how == "xla")
    with contextlib.nullcontext() if region is None else keras_mp.autocast(region):
        return step(IMAGES)


@functools.cache
def _exact_gradients(interpolation: str) -> list[Any]:
    return _gradients("float32", interpolation, "eager")


WHERE = ("policy", "output_dtype", "region")
CASES = pairs(("nearest", "bilinear", "bicubic", "lanczos3"), ("eager", "graph"), WHERE)
# XLA has neither the others nor, in Keras 2, the nearest.
COMPILED = [
    (interpolation, "xla", where)
    for interpolation in (("nearest", "bilinear") if IS_KERAS_3 else ("bilinear",))
    for where in WHERE
]


@pytest.mark.parametrize(("interpolation", "how", "where"), [*CASES, *COMPILED])
def test_images_that_are_enlarged_have_gradients(interpolation: str, how: str, where: str) -> None:
    exact = _exact_gradients(interpolation)
    policy: Any = {
        "policy": unscaled("bfloat16"),
        "output_dtype": keras_mp.Policy("mixed_bfloat16", output_dtype="float32"),
        "region": "float32",
    }[where]
    region = "bfloat16" if where == "region" else None
    for found, right in zip(_gradients(policy, interpolation, how, region), exact, strict=True):
        assert found.dtype == tf.float32
        np.testing.assert_allclose(found, right, rtol=0.05, atol=0.01 * np.max(np.abs(right)))


RECURRENT = {
    "LSTM": lambda: layers.LSTM(2),
    "GRU": lambda: layers.GRU(2),
    "SimpleRNN": lambda: layers.SimpleRNN(2),
    "RNN": lambda: layers.RNN(layers.GRUCell(2)),
    "Bidirectional": lambda: layers.Bidirectional(layers.GRU(2)),
}


def _trained(name: str, policy: Any, eagerly: bool) -> tuple[np.ndarray, list[float]]:
    x = np.random.default_rng(0).normal(size=[4, 5, 3]).astype("float32")
    states = 2 if name in ("LSTM", "Bidirectional") else 1
    initial = [np.full([4, 2], 0.3 + i, "float32") for i in range(states)]
    tf.keras.utils.set_random_seed(1)
    with keras_mp.policy_scope(policy):
        sequence = layers.Input([5, 3])
        given = [layers.Input([2]) for _ in initial]
        layer = RECURRENT[name]()
        hidden = layer(sequence, initial_state=given if states > 1 else given[0])
        model = tf.keras.Model([sequence, *given], layers.Dense(1)(hidden))
        model.compile("sgd", "mse", run_eagerly=eagerly)
    history = model.fit([x, *initial], np.ones([4, 1]), epochs=2, verbose=0)
    direct = layer(tf.constant(x), initial_state=[tf.constant(each) for each in initial])
    return np.asarray(direct, "float32"), history.history["loss"]


@functools.cache
def _trained_in_float32(name: str) -> tuple[np.ndarray, list[float]]:
    return _trained(name, "float32", eagerly=False)


@pytest.mark.parametrize(
    ("name", "dtype", "eagerly"), pairs(RECURRENT, ["float16", "bfloat16"], [False, True])
)
def test_initial_states_from_inputs(name: str, dtype: str, eagerly: bool) -> None:
    found = _trained(name, unscaled(dtype), eagerly)
    for value, right in zip(found, _trained_in_float32(name), strict=True):
        np.testing.assert_allclose(value, right, rtol=0.05, atol=0.02)
