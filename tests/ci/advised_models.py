"""Small models that suffer in 16 bits, each from something else, and models that do not."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, Times

K = tf.keras
L = K.layers
FEATURES = 8


class Case(NamedTuple):
    """A model and a batch.

    Attributes:
        layers: returns the layers between the input and the head.
        dtype: in which it suffers, or not.
        shape: of an input.
        inputs: the smallest and the largest input. Integers are drawn for an embedding.
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
            integers = isinstance(self.inputs[1], int)
            inputs = K.Input(self.shape, dtype="int32" if integers else "float32")
            x = inputs
            for layer in self.layers():
                x = layer(x)
            if len(x.shape) > 2:
                x = L.Flatten(name="flat")(x)
            # Small weights at the end: what comes before decides what is lost.
            return K.Model(inputs, L.Dense(1, name="head", dtype="float32")(x))

    def batch(self, count: int = 32) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        low, high = self.inputs
        if isinstance(high, int):
            x = rng.integers(low, high, size=[count, *self.shape]).astype(np.int32)
        else:
            x = rng.uniform(low, high, size=[count, *self.shape]).astype(np.float32)
        return x, rng.normal(size=[count, 1]).astype(np.float32)

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
    "square": lambda x: x * x,
    "variance": lambda x: (
        tf.reduce_mean(x * x, -1, keepdims=True) - tf.reduce_mean(x, -1, keepdims=True) ** 2
    ),
    "sum": lambda x: tf.reduce_sum(x, -1, keepdims=True),
    "clipped logarithm": lambda x: tf.math.log(tf.clip_by_value(x, 1e-8, 1.0)),
    "there and back": lambda x: (x + 4096.0) - 4096.0,
    "positions": lambda x: tf.sin(x * 100.0),
    "distance": lambda x: tf.sqrt(tf.reduce_sum(x * x, -1, keepdims=True) + 1e-9),
    "plus 100": lambda x: x + 100.0,
    "plus 1000": lambda x: x + 1000.0,
    "mask": lambda x: tf.nn.softmax(tf.where(x > 0, x, tf.cast(-1e4, x.dtype))),
}


def dense(name: str = "first", units: int = FEATURES, **kwargs: Any) -> Any:
    return L.Dense(units, name=name, **kwargs)


def constant(value: float) -> Any:
    return K.initializers.Constant(value)


class Attention(L.Layer):
    """Attention of a sequence to itself, with a residual, as a transformer's block has it."""

    def __init__(self, normalizes: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        policy = kwargs.get("dtype")
        self.normalizes = normalizes
        self.norm = L.LayerNormalization(name="norm", dtype=policy)
        self.attention = L.MultiHeadAttention(2, 4, name="attention", dtype=policy)

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        if IS_KERAS_3:
            self.attention.build(shape, shape)
        super().build(shape)

    def call(self, x: Any) -> Any:
        y = self.norm(x) if self.normalizes else x
        return x + self.attention(y, y)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "normalizes": self.normalizes}


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
    "squares of large numbers": Case(
        lambda: [
            dense(),
            Times(1e3, name="large"),
            Computes("square", name="square"),
            Times(1e-6, name="back"),
            dense("last"),
        ]
    ),
    "a variance as a difference of squares": Case(
        lambda: [Computes("plus 100", name="far"), Computes("variance", name="variance")]
    ),
    "a sum beyond the largest number": Case(
        lambda: [Times(1e3, name="large"), Computes("sum", name="sum")],
        shape=(1, 128),
        inputs=(0.5, 1.0),
    ),
    "a logarithm of what is clipped": Case(
        lambda: [Computes("clipped logarithm", name="logarithm"), dense("last")], inputs=(-1.0, 1.0)
    ),
    "positions": Case(
        lambda: [Computes("positions", name="sine"), dense("last")],
        inputs=(0.0, 1000.0),
        dtype="float16",
    ),
    "numbers that are too small": Case(
        lambda: [dense(), Times(2.0**-26, name="tiny"), Times(2.0**26, name="back")]
    ),
    "a mask beyond the largest number": Case(
        lambda: [Times(-1e9, name="far"), L.Softmax(name="weights"), dense("last")],
        inputs=(0.0, 1.0),
    ),
    "large weights": Case(
        lambda: [
            dense(kernel_initializer=constant(2e4)),
            Times(1e-5, name="back"),
            dense("last"),
        ],
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
    "attention to large numbers": Case(
        lambda: [Times(1e3, name="large"), Attention(normalizes=False, name="block")],
        shape=(4, 4),
    ),
    "a recurrent layer that grows": Case(
        lambda: [
            L.SimpleRNN(4, "relu", recurrent_initializer=K.initializers.Identity(4.0), name="rnn"),
            Times(1e-6, name="back"),
        ],
        shape=(10, 4),
        inputs=(0.5, 1.0),
    ),
    "a branch that is scaled down": Case(
        lambda: [dense(), Branch(name="branch"), dense("last")], factor=2.0**12
    ),
}

HEALTHY = {
    "gelu": Case(lambda: [dense(activation="gelu"), dense("second", activation="gelu")]),
    "a bias before batch normalization": Case(
        lambda: [dense(), L.BatchNormalization(name="norm"), L.ReLU()]
    ),
    "layer normalization": Case(lambda: [dense(units=16), L.LayerNormalization(name="norm")]),
    "convolutions": Case(
        lambda: [L.Conv2D(4, 3, name="conv", activation="relu"), L.MaxPooling2D(name="pool")],
        shape=(8, 8, 3),
        factor=2.0**-4,
    ),
    "a convolution of a sequence": Case(
        lambda: [L.Conv1D(4, 3, name="conv", padding="causal", activation="tanh")], shape=(8, 4)
    ),
    "pixels": Case(
        lambda: [L.Rescaling(1 / 255, name="scale"), L.Conv2D(4, 3, name="conv")],
        shape=(8, 8, 3),
        inputs=(0.0, 255.0),
        factor=2.0**-4,
    ),
    "an embedding": Case(
        lambda: [L.Embedding(16, 8, name="words"), L.GlobalAveragePooling1D(name="mean")],
        shape=(6,),
        inputs=(0, 16),
    ),
    "attention": Case(lambda: [dense(), Attention(name="block")], shape=(4, 4), factor=2.0**-4),
    "a GRU in bfloat16": Case(lambda: [L.GRU(8, name="gru")], shape=(6, 4), dtype="bfloat16"),
    "a mask that fits": Case(lambda: [dense(), Computes("mask", name="mask")], inputs=(0.2, 1.0)),
    "a distance": Case(lambda: [dense(), Computes("distance", name="distance")], inputs=(0.5, 1.0)),
    "a softmax": Case(lambda: [dense(), L.Softmax(name="softmax"), dense("second")]),
}
