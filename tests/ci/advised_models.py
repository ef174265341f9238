"""Small models that suffer in 16 bits, each from something else, and models that do not."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import keras_mp
from tests.common import Times

K = tf.keras
L = K.layers
FEATURES = 8


class Case(NamedTuple):
    """A model and a batch.

    Attributes:
        layers: returns the layers between the input and the head.
        dtype: in which it suffers, or not.
        shape: of an input.
        inputs: the smallest and the largest input.
        factor: by what the loss is multiplied.
    """

    layers: Callable[[], Sequence[Any]]
    dtype: str = "float16"
    shape: tuple[int, ...] = (FEATURES,)
    inputs: tuple[float, float] = (-1.0, 1.0)
    factor: float = 1.0

    def model(self) -> Any:
        K.utils.set_random_seed(0)
        with keras_mp.policy_scope(f"mixed_{self.dtype}"):
            x = inputs = K.Input(self.shape)
            for layer in self.layers():
                x = layer(x)
            if len(x.shape) > 2:
                x = L.Flatten(name="flat")(x)
            # Small weights at the end: what comes before decides what is lost.
            return K.Model(inputs, L.Dense(1, name="head", dtype="float32")(x))

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        x = rng.uniform(*self.inputs, size=[32, *self.shape]).astype(np.float32)
        return x, rng.normal(size=[32, 1]).astype(np.float32)

    def loss(self, y: Any, predictions: Any) -> Any:
        return tf.reduce_mean((tf.cast(predictions, tf.float32) - y) ** 2) * self.factor


class Computes(L.Layer):
    """A layer that computes a function.

    Its policy is Keras's own: under one of keras_mp, much of what suffers here does not.
    """

    def __init__(self, function: str, dtype: Any = None, **kwargs: Any) -> None:
        dtype = dtype or K.mixed_precision.Policy(keras_mp.global_policy().name)
        super().__init__(dtype=dtype, **kwargs)
        self.function = function

    def call(self, x: Any) -> Any:
        return FUNCTIONS[self.function](x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "function": self.function}


FUNCTIONS = {
    "sum": lambda x: tf.reduce_sum(x, -1, keepdims=True),
    "there and back": lambda x: (x + 4096.0) - 4096.0,
    "distance": lambda x: tf.sqrt(tf.reduce_sum(x * x, -1, keepdims=True) + 1e-9),
    "plus 1000": lambda x: x + 1000.0,
    "mask": lambda x: tf.nn.softmax(tf.where(x > 0, x, tf.cast(-1e4, x.dtype))),
}


def dense(name: str = "first", **kwargs: Any) -> Any:
    return L.Dense(FEATURES, name=name, **kwargs)


class Branch(L.Layer):
    """A residual whose branch is scaled down so much that its gradients suit no common scale."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.small = L.Dense(FEATURES, name="small", dtype=kwargs.get("dtype"))

    def build(self, shape: Any) -> None:
        self.small.build(shape)
        super().build(shape)

    def call(self, x: Any) -> Any:
        return x + self.small(x) * 2.0**-15 * 2.0**-15


SUFFERING = {
    "a sum beyond the largest number": Case(
        lambda: [Times(1e3, name="large"), Computes("sum", name="sum")],
        shape=(1, 128),
        inputs=(0.5, 1.0),
    ),
    "gradients that are too small for the loss scale": Case(
        lambda: [dense(activation="tanh"), dense("second", activation="tanh")], factor=2.0**-26
    ),
    "gradients that are too large for the loss scale": Case(
        lambda: [dense(activation="tanh"), dense("second", activation="tanh")], factor=2.0**8
    ),
    "bfloat16 that leaves digits out": Case(
        lambda: [dense(), Times(1e-3, name="small"), Computes("there and back", name="back")],
        dtype="bfloat16",
    ),
    "an offset before batch normalization": Case(
        lambda: [
            Computes("plus 1000", name="far"),
            L.BatchNormalization(name="norm"),
            dense("last"),
        ]
    ),
    "a branch that is scaled down": Case(
        lambda: [dense(), Branch(name="branch"), dense("last")], factor=2.0**12
    ),
}

HEALTHY = {
    "gelu": Case(lambda: [dense(activation="gelu"), dense("second", activation="gelu")]),
    "pixels": Case(
        lambda: [L.Rescaling(1 / 255, name="scale"), L.Conv2D(4, 3, name="conv")],
        shape=(8, 8, 3),
        inputs=(0.0, 255.0),
        factor=2.0**-4,
    ),
    "a GRU in bfloat16": Case(lambda: [L.GRU(8, name="gru")], shape=(6, 4), dtype="bfloat16"),
    "a mask that fits": Case(lambda: [dense(), Computes("mask", name="mask")], inputs=(0.2, 1.0)),
    "a distance": Case(lambda: [dense(), Computes("distance", name="distance")], inputs=(0.5, 1.0)),
}
