"""Random noise of the size of rounding errors, to measure what rounding explains."""

import contextlib
import math
from collections.abc import Iterator
from typing import TypeVar, cast

import numpy as np
import tensorflow as tf

from keras_mp.numerics.comparison.calls import Called, Variables, map_floating, shape_of
from keras_mp.numerics.distances import relative

# How far a run with noise moves each number at most, in unit roundoffs: twice as far as rounding
# does. A few such runs then also flip the ReLUs that rounding may flip. (The mean error of rounding
# is a third of the unit roundoff, and the mean of this noise is one unit.)
NOISE = 2.0

# The largest effect of so many runs with noise is what rounding explains.
NOISY_RUNS = 4

# To find the gradients that are rounding noise of float32, whose unit roundoff is 2**-24, numbers
# are moved by up to this share of their size. A gradient is noise if it changes by more than this
# share of its own size.
_JITTER, _NOISE = 2.0**-20, 0.5

# The root mean square of that share.
RMS_OF_JITTER = _JITTER / math.sqrt(3)

_Structure = TypeVar("_Structure")


class Noise:
    """Moves numbers of a run in float32 at random, as far as rounding may.

    Where the backward error of an algorithm is small, what it returns is what the exact one would
    return for inputs that differ by a few roundings (N. Higham, "Accuracy and Stability of
    Numerical Algorithms", 1.5); to move the numbers at random and look is Monte Carlo arithmetic
    (D. Stott Parker, 1997).

    Args:
        unit: float. The unit roundoff whose effects are to be seen.
        seed: int.
    """

    def __init__(self, unit: float, seed: int) -> None:
        self._step = NOISE * unit
        self._random = np.random.default_rng(seed)

    def __call__(self, value: tf.Tensor) -> tf.Tensor:
        """Moves each number, by up to twice the unit roundoff of its size.

        A mask of zeros and ones is left alone. Every dtype holds it exactly, and with noise a layer
        that multiplies 1 - mask by a large number would mask something else.
        """
        if tf.reduce_all((value == 0) | (value == 1)):
            return value
        dtype = value.dtype if value.dtype.size >= 4 else tf.float32
        factors = self._factors(shape_of(value))
        return tf.cast(tf.cast(value, dtype) * tf.cast(factors, dtype), value.dtype)

    def on_inputs(self, structure: _Structure) -> _Structure:
        """Moves the floating-point tensors in a structure."""
        return map_floating(self, structure)

    def both_ways(self, value: tf.Tensor) -> tf.Tensor:
        """Moves each number, and the gradient in the backward pass too."""

        @tf.custom_gradient
        def moved(value: tf.Tensor) -> tuple[tf.Tensor, "Noise"]:
            return self(value), self

        return cast(tf.Tensor, moved(value))

    @contextlib.contextmanager
    def on_weights(self, layer: Called | Variables) -> Iterator[None]:
        """Moves the weights of a layer or model for the block."""
        weights = [w for w in getattr(layer, "weights", ()) if tf.as_dtype(w.dtype).is_floating]
        before = [weight.numpy() for weight in weights]
        for weight, value in zip(weights, before):
            weight.assign((value * self._factors(value.shape)).astype(value.dtype))
        try:
            yield
        finally:
            for weight, value in zip(weights, before):
                weight.assign(value)

    def _factors(self, shape: tuple[int, ...]) -> np.ndarray:
        return 1 + self._step * self._random.uniform(-1, 1, shape)


def jitter(seed: int = 0) -> Noise:
    """Returns noise that is so small that only gradients that are noise change with it."""
    return Noise(_JITTER / NOISE, seed)


def is_noise(values: np.ndarray, moved: np.ndarray) -> bool:
    """Whether a gradient is nothing but rounding noise of float32.

    Args:
        values: array of float64, the gradient.
        moved: the same, where `jitter` has moved the numbers.
    """
    are_finite = np.isfinite(values).all() and np.isfinite(moved).all()
    return bool(are_finite) and relative(moved, values) > _NOISE
