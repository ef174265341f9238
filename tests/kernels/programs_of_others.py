"""Controls that differentiate, vectorize, load and run what is not ours in less usual ways.

Each makes once what it needs, and returns a function that computes the same numbers whenever, and
in whichever thread, it is called.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.kernels.stock_layers import ROWS, results_and_gradients

K = tf.keras
L = K.layers
OWN_POLICY = getattr(K, "DTypePolicy", None) or K.mixed_precision.Policy
Program = Callable[[], list[Any]]


def _inputs() -> tuple[tf.Tensor, tf.Tensor]:
    return tf.ones([ROWS, 2], "bfloat16"), tf.ones([2], "bfloat16")


def _layer(dtype: str) -> tuple[Any, tf.Tensor]:
    layer = L.Dense(2, "gelu", dtype=OWN_POLICY(f"mixed_{dtype}"))
    x = tf.random.stateless_uniform([ROWS, 2], [1, 2], 0.5, 1.5)
    layer(x)
    return layer, x


def forward_mode() -> Program:
    layer, x = _layer("float16")

    def run() -> list[Any]:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = tf.reduce_sum(layer(x), 0)
        return [accumulator.jvp(y)]

    return run


def vectorized() -> Program:
    x, b = _inputs()

    def run() -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(b)
            y = tf.nn.gelu(tf.nn.bias_add(x[:50], b))
        sums = tf.vectorized_map(lambda column: tf.cumsum(column)[-1:], tf.transpose(x))
        return [sums, tape.jacobian(y, b)]

    return run


def datasets() -> Program:
    def total(i: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.ones([ROWS, 1], tf.bfloat16), 0) * tf.cast(i + 1, tf.bfloat16)

    def gradient(i: tf.Tensor) -> tf.Tensor:
        *_, of_bias = results_and_gradients(tf.nn.bias_add, *_inputs())
        return tf.cast(of_bias, tf.bfloat16) + tf.cast(i, tf.bfloat16)

    def run() -> list[Any]:
        data = tf.data.Dataset.range(4).map(
            lambda i: (total(i), tf.py_function(gradient, [i], tf.bfloat16)), 2, deterministic=True
        )
        return [each for pair in data for each in pair]

    return run


def loaded() -> Program:
    layer, _ = _layer("bfloat16")
    signature = [tf.TensorSpec([None, 2], "bfloat16"), tf.TensorSpec([2], "bfloat16")]
    module, directory = tf.Module(), tempfile.TemporaryDirectory()
    module.layer = layer
    module.call = tf.function(lambda x, b: tf.nn.bias_add(layer(x), b), input_signature=signature)
    tf.saved_model.save(module, directory.name)

    def run() -> list[Any]:
        again = tf.saved_model.load(directory.name)  # It keeps its variables alive.
        return results_and_gradients(again.call, *_inputs())

    return run


class Counts(L.Layer):
    def build(self, input_shape: Any) -> None:
        self.sum = self.add_weight(name="sum", shape=[], initializer="zeros", trainable=False)
        self.built = True

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.sum.assign_add(tf.constant(0.001))
        return x


def counting() -> Program:
    """A layer that adds to a weight, which Keras 3 reads in 16 bits for that."""
    layer, x = Counts(dtype=OWN_POLICY("mixed_bfloat16")), tf.ones([1, 1])
    layer(x)
    call = tf.function(layer)

    def run() -> list[Any]:
        layer.sum.assign(tf.constant(1.0))
        for each in (layer, layer, call, call):
            each(x)
        return [tf.convert_to_tensor(layer.sum)]

    return run


PROGRAMS: dict[str, Callable[[], Program]] = {
    each.__name__: each for each in (forward_mode, vectorized, datasets, loaded, counting)
}
