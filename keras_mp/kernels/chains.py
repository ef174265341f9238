"""Activations that are chains of operations, in 16 bits, on CPUs.

TensorFlow runs GELU as up to eight kernels forward and more backward; each reads and writes all
numbers, and rounds them to 16 bits. Here a chain computes in float32 inside, is rounded once, and
is marked for XLA, which makes one pass of it. Only its input is kept for the gradient.

The mark is a hint, and no function that XLA must compile: a program without XLA runs the operations
one by one, a saved one too, and so does one whose shapes change again and again.

This module needs TensorFlow only.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.kernels.replaced import Kernel
from keras_mp.support import own_gradient, regions

# What a chain returns: its values, and what computes their derivatives.
_Chain = tuple[tf.Tensor, Callable[[], tf.Tensor]]
# With less, a cluster gains nothing. Of most functions the size of the batch is not known.
_FEWEST_NUMBERS = 512

# Unary operations stand apart here: grappler makes one kernel of two that follow one another, which
# XLA does not take.


def _gelu(x: tf.Tensor) -> _Chain:
    below = 0.5 * tf.math.erf(x * math.sqrt(0.5)) + 0.5
    return x * below, lambda: below + x * (tf.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi)))


def _gelu_by_tanh(x: tf.Tensor) -> _Chain:
    linear = math.sqrt(2 / math.pi)
    cubic, squares = 0.044715 * linear, x * x
    tanh = tf.tanh(x * (squares * cubic + linear))
    below = 0.5 * tanh + 0.5
    slope = squares * (1.5 * cubic) + 0.5 * linear
    return x * below, lambda: below + x * (1 - tanh * tanh) * slope


def _silu(x: tf.Tensor) -> _Chain:
    sigmoid = tf.sigmoid(x)
    return x * sigmoid, lambda: sigmoid + sigmoid * (x - x * sigmoid)


def _may_gain(features: Any) -> bool:
    """Whether a chain may be faster as a cluster: in a function, and with enough numbers."""
    # Sizes of eager tensors may be others each time, and each would be compiled.
    if tf.executing_eagerly() or not isinstance(features, tf.Tensor) or features.shape.rank is None:
        return False
    return math.prod(size or 1 for size in features.shape) >= _FEWEST_NUMBERS


def _cluster(chain: Callable[[tf.Tensor], _Chain]) -> Callable[..., tf.Tensor]:
    """Returns what takes the place of an activation, whose first argument is `features`."""
    name = chain.__name__.strip("_")

    def forward(x: tf.Tensor) -> own_gradient.Computed:
        with tf.xla.experimental.jit_scope():
            return [tf.cast(chain(tf.cast(x, tf.float32))[0], x.dtype)], []

    def backward(
        upstream: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], *_: Any
    ) -> list[tf.Tensor | None]:
        with regions.none(), tf.xla.experimental.jit_scope():
            derivatives = chain(tf.cast(inputs[0], tf.float32))[1]
            slope = derivatives() * tf.cast(upstream[0], tf.float32)
            return [tf.cast(slope, inputs[0].dtype)]

    def activation(own: Any, features: tf.Tensor, *_: Any, **options: Any) -> tf.Tensor:
        with regions.none(), tf.name_scope(options.get("name") or name):
            return own_gradient.compute(name, forward, backward, [features])[0]

    return activation


def _example(**options: Any) -> Callable[..., tuple[dict[str, Any], float]]:
    """Returns an example: enough numbers that the clock tells how long they take."""

    def example(dtype: tf.DType, _: bool) -> tuple[dict[str, Any], float]:
        numbers = tf.random.stateless_normal([2**20 - 1], seed=(0, 0))
        last = 64.0  # Of which all three activations are 64.
        features = tf.cast(tf.reshape(tf.concat([numbers, [last]], 0), [2048, 512]), dtype)
        return {"features": features, **options}, last

    return example


def _case_of_gelu(features: Any, approximate: Any = False, name: str | None = None) -> bool:
    del name
    return not approximate and _may_gain(features)


def _case_of_gelu_by_tanh(features: Any, approximate: Any = False, name: str | None = None) -> bool:
    del name
    return bool(approximate) and _may_gain(features)


def _case_of_silu(features: Any, beta: Any = 1.0) -> bool:
    return isinstance(beta, (int, float)) and beta == 1 and _may_gain(features)


KERNELS = {
    "gelu": Kernel("nn_ops", ("gelu",), _example(), _case_of_gelu, (True,), _cluster(_gelu)),
    "gelu by tanh": Kernel(
        "nn_ops",
        ("gelu",),
        _example(approximate=True),
        _case_of_gelu_by_tanh,
        (True,),
        _cluster(_gelu_by_tanh),
    ),
    "silu": Kernel(
        "nn_impl", ("swish", "silu"), _example(), _case_of_silu, (True,), _cluster(_silu)
    ),
}
