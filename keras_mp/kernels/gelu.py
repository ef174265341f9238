"""GELU in 16 bits as one function, whose backward pass keeps its input alone.

TensorFlow makes it of up to nine operations, which keep as many tensors of the size of a
transformer's largest. Here each pass computes in float32 from the input, and rounds once. This
module needs TensorFlow only.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.hooks import Everywhere, Replacement, faces, own_gradient, reach
from keras_mp.tensorflow_api import gradients
from keras_mp.tensorflow_api.features import FACES
from keras_mp.variables import scope

# Of the tanh that approximates the error function.
_FACTOR, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def replacements() -> tuple[Replacement, ...]:
    """Returns the row of `tf.nn.gelu`."""
    return (Replacement(Everywhere(tf.nn.gelu), _as_one, feature=FACES),)


def _as_one(original: Callable[..., Any]) -> Callable[..., Any]:
    def gelu(features: Any, approximate: bool = False, name: str | None = None) -> Any:
        thread, x = reach.thread, scope.read(features)
        if (
            not faces.is_low_tensor(x)
            or faces.is_exact(x)
            or thread.is_exact
            or thread.in_gradient
            or thread.region is not None
        ):
            return original(features, approximate, name)

        def compute(x: tf.Tensor) -> own_gradient.Computed:
            # A tape would keep what is computed on the way.
            with reach.decided(), gradients.stop_recording():
                return [tf.cast(original(tf.cast(x, tf.float32), approximate, name), x.dtype)], []

        gradient = functools.partial(_gradient, _slope_by_tanh if approximate else _slope)
        return own_gradient.compute("Gelu", compute, gradient, [x])[0]

    return gelu


def _gradient(
    slope: Callable[[tf.Tensor], tf.Tensor],
    upstream: Sequence[Any],
    inputs: Sequence[Any],
    *_: object,
) -> list[Any]:
    [of_output], [x] = upstream, inputs
    wide = tf.cast(of_output, tf.float32) * slope(tf.cast(x, tf.float32))
    return [tf.cast(wide, x.dtype)]


def _slope(x: tf.Tensor) -> tf.Tensor:
    density = math.sqrt(0.5 / math.pi) * tf.exp(-0.5 * x * x)
    return 0.5 * tf.math.erfc(-math.sqrt(0.5) * x) + x * density


def _slope_by_tanh(x: tf.Tensor) -> tf.Tensor:
    # 1 + tanh(z) is 2 sigmoid(2 z), of which nothing is lost where it is small.
    cubic = _CUBIC * x * x
    sigmoid, rest = (tf.sigmoid(sign * 2 * _FACTOR * x * (1 + cubic)) for sign in (1, -1))
    return sigmoid * (1 + rest * 2 * _FACTOR * x * (1 + 3 * cubic))
