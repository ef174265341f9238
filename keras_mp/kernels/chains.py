"""Activations that are chains of operations, in 16 bits, on CPUs.

TensorFlow runs GELU as up to eight kernels forward and more backward; each reads and writes all
numbers, and rounds them to 16 bits. Here a chain computes in float32 inside, is rounded once, and
is marked for XLA, which makes one pass of it. Only its input is kept for the gradient.

The mark is a hint, and no function that XLA must compile: a program without XLA runs the operations
one by one, a saved one too, and so does a program whose shapes change again and again.

This module needs TensorFlow only.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.hooks import own_gradient, reach
from keras_mp.kernels.replaced import Kernel, shape_of

# The result of a chain: its values, and a function that computes their derivatives.
_Chain = tuple[tf.Tensor, Callable[[], tf.Tensor]]
# With fewer, a cluster gains nothing. In most functions the size of the batch is not known.
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


def _may_gain(features: object) -> bool:
    """Whether a chain may be faster as a cluster.

    It may in a function, with enough numbers.
    """
    # The sizes of eager tensors may change each time, and each would be compiled.
    if tf.executing_eagerly() or not isinstance(features, tf.Tensor) or features.shape.rank is None:
        return False
    return math.prod(size or 1 for size in shape_of(features)) >= _FEWEST_NUMBERS


def _kernel(
    public: Callable[..., Any],
    chain: Callable[[tf.Tensor], _Chain],
    is_chain: Callable[..., bool],
    alias: str = "",
    **options: bool,
) -> Kernel:
    """Returns the kernel of an activation.

    Args:
        public: TensorFlow's function, whose first argument is `features`.
        chain: computes it in float32.
        is_chain: takes the other arguments, and tells whether they ask for this chain.
        alias: another name under which TensorFlow has the function.
        **options: other arguments of the example.
    """
    name = chain.__name__.strip("_")

    def forward(x: tf.Tensor) -> own_gradient.Computed:
        with tf.xla.experimental.jit_scope():
            return [tf.cast(chain(tf.cast(x, tf.float32))[0], x.dtype)], []

    def backward(
        upstream: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], *_: object
    ) -> list[tf.Tensor | None]:
        with reach.without_region(), tf.xla.experimental.jit_scope():
            derivatives = chain(tf.cast(inputs[0], tf.float32))[1]
            slope = derivatives() * tf.cast(upstream[0], tf.float32)
            return [tf.cast(slope, inputs[0].dtype)]

    def activation(own: object, features: tf.Tensor, *_: object, **options: Any) -> tf.Tensor:
        with reach.without_region(), tf.name_scope(options.get("name") or name):
            return own_gradient.compute(name, forward, backward, [features])[0]

    def example(dtype: tf.DType, _: object) -> dict[str, Any]:
        # Enough numbers that the clock tells how long they take.
        numbers = tf.random.stateless_normal([2048, 512], seed=(0, 0))
        return {"features": tf.cast(numbers, dtype), **options}

    def case(features: object, *args: Any, **kwargs: Any) -> bool:
        return is_chain(*args, **kwargs) and _may_gain(features)

    return Kernel(example, case=case, cases=(True,), correct=activation, public=public, alias=alias)


KERNELS = {
    "gelu": _kernel(tf.nn.gelu, _gelu, lambda approximate=False, name=None: not approximate),
    "gelu by tanh": _kernel(
        tf.nn.gelu,
        _gelu_by_tanh,
        lambda approximate=False, name=None: bool(approximate),
        approximate=True,
    ),
    "silu": _kernel(
        tf.nn.silu,
        _silu,
        lambda beta=1.0: isinstance(beta, (int, float)) and beta == 1,
        alias="silu",
    ),
}
