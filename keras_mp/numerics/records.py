"""One record of a tensor of a layer: its numbers, how far they are from float32, what explains it.

A model in 16 bits drifts away from the same model in float32, and more so the deeper it is. So what
rounding explains is measured: `Noise` moves inputs, weights and outputs of the float32 model at
random by as much as rounding moves them, and distances are in units of the largest effect in a few
such runs.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf

from keras_mp.support import kept_casts

# A larger tensor is represented by so many of its numbers.
_MOST_VALUES = 2**16

# The largest relative error of rounding to the nearest number of a dtype.
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}

# A distance of more units is a finding: about 1 % in float16, 8 % in bfloat16. Sound layers have
# 0.2 to 1, and gradients of convolutions in float16 up to 15, since kernels for CPUs add up some
# thousand products in it. Planted defects begin at 100.
LIMIT = 16.0

SIDES = ("forward", "backward")

# How far a run with noise moves each number at most, in unit roundoffs: twice as far as rounding
# does. A few such runs then also flip the ReLUs that rounding may flip. (The mean error of rounding
# is a third of the unit roundoff, and the mean of this noise is one unit.)
NOISE = 2.0

# The largest effect of so many runs with noise is what rounding explains.
NOISY_RUNS = 4

# To find the gradients that are rounding noise of float32, whose unit roundoff is 2**-24, numbers
# are moved by up to this share of their size. A gradient is noise if it changes by more than this
# share of its own size.
_JITTER, MOST_NOISE = 2.0**-20, 0.5


class Distance(NamedTuple):
    """How far the numbers of one run are from those of another.

    Attributes:
        relative: float. The root mean square of the differences, as a share of that of the
            numbers themselves. Infinite where numbers are finite in the reference only.
        units: float. The same, in units of what rounding explains.
    """

    relative: float
    units: float

    @staticmethod
    def worst(distances: "Sequence[Distance]") -> "Distance | None":
        """Returns the distance of most units; one of pure rounding only if there is no other."""
        # The gradient of a bias before a normalization is zero but for rounding, so it is further
        # off than its own size.
        reliable = [each for each in distances if each.relative <= 1 or each.units > LIMIT]
        return max(reliable or distances, key=lambda distance: distance.units, default=None)


def smallest_of(dtype: str) -> float:
    """Returns the smallest number above 0 of a floating-point dtype."""
    number = tf.as_dtype(dtype).as_numpy_dtype
    return float(np.nextafter(number(0), number(1)))


def rms(values: np.ndarray) -> float:
    """Returns the root mean square; 0 for no numbers."""
    largest = float(np.max(np.abs(values), initial=0))
    # The squares of small numbers may be zero.
    return largest * math.sqrt(float(np.mean((values / largest) ** 2))) if largest else 0.0


def apart(value: np.ndarray, reference: np.ndarray) -> float:
    """Returns the root mean square of the differences; infinite if only the reference is finite.

    So it is of arrays of different sizes. Numbers that are not finite in the reference do not
    count: the dtype is not to blame.
    """
    is_finite = np.isfinite(value)
    if value.shape != reference.shape or np.any(np.isfinite(reference) & ~is_finite):
        return math.inf
    both = is_finite & np.isfinite(reference)
    return rms(value[both] - reference[both])


def relative(value: np.ndarray, reference: np.ndarray) -> float:
    """Returns the root mean square of the differences, as a share of that of the reference."""
    return _ratio(apart(value, reference), rms(reference[np.isfinite(reference)]))


def _ratio(distance: float, size: float) -> float:
    return distance / size if size else distance and math.inf


def underflow(value: np.ndarray, reference: np.ndarray) -> float:
    """Returns which share of the reference's non-zero numbers is zero, or missing, in `value`."""
    if value.shape != reference.shape:
        return 1.0
    size = np.abs(reference)
    # What is much smaller than the largest number may be what float32 leaves of a sum that is 0.
    there = size > 2.0**-20 * np.max(size, initial=0.0)
    return float(np.mean(value[there] == 0)) if there.any() else 0.0


def array(value: tf.Tensor | tf.Variable | np.ndarray) -> np.ndarray:
    """Returns a tensor as an array of float64, which holds all numbers of the other dtypes."""
    return tf.cast(tf.convert_to_tensor(value), tf.float64).numpy()


def are_finite(tensors: Iterable[tf.Tensor | None]) -> bool:
    """Whether all numbers of the tensors are finite."""
    found = (tf.convert_to_tensor(each) for each in tensors if each is not None)
    return all(bool(tf.reduce_all(kept_casts.is_finite(each))) for each in found)


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
        factors = self._factors(tuple(value.shape))
        return tf.cast(tf.cast(value, dtype) * tf.cast(factors, dtype), value.dtype)

    def both_ways(self, value: tf.Tensor) -> tf.Tensor:
        """Moves each number, and the gradient in the backward pass too."""

        @tf.custom_gradient
        def moved(value: tf.Tensor) -> tuple[tf.Tensor, "Noise"]:
            return self(value), self

        return cast(tf.Tensor, moved(value))

    def move_weights(self, layer: Any) -> None:
        """Moves the weights of a layer or model."""
        for weight in getattr(layer, "weights", ()):
            if tf.as_dtype(weight.dtype).is_floating:
                value = weight.numpy()
                weight.assign((value * self._factors(value.shape)).astype(value.dtype))

    def _factors(self, shape: tuple[Any, ...]) -> np.ndarray:
        random = 2 * self._random.random(shape, np.float32) - 1
        return 1 + np.float32(self._step) * random


def jitter() -> Noise:
    """Returns noise that is so small that only gradients that are noise change with it."""
    return Noise(_JITTER / NOISE, seed=0)


def sample(value: tf.Tensor | tf.Variable | np.ndarray) -> np.ndarray:
    """Returns the numbers of a tensor, or of a large one a sample, as a vector of float64."""
    flat = tf.reshape(tf.convert_to_tensor(value), [-1])
    if (size := flat.shape[0] or 0) > _MOST_VALUES:
        # The same ones in every run. At equal distances they could all be of the same few features.
        flat = tf.gather(flat, np.random.default_rng(0).integers(0, size, _MOST_VALUES))
    return array(flat)


def off(narrow: Iterable[tf.Tensor], wide: Iterable[tf.Tensor]) -> float:
    """Returns how far tensors are from those of a reference: the one that is furthest off."""
    return max((relative(sample(n), sample(w)) for n, w in zip(narrow, wide)), default=0.0)


@dataclasses.dataclass
class Quantity:
    """What is known of a tensor of a run.

    Attributes:
        tensor: the tensor.
        values: array of float64, its numbers, or a sample of a large tensor's.
        not_finite: int. How many numbers of the whole tensor are Inf or NaN.
        explained: float. The root mean square of what rounding may change in it.
        beside: float. The root mean square of the largest gradient beside it, if it is one.
    """

    tensor: tf.Tensor
    values: np.ndarray
    not_finite: int
    explained: float = 0.0
    beside: float = 0.0

    @classmethod
    def of(cls, tensor: tf.Tensor, scale: float = 1.0) -> "Quantity":
        """Makes the record of a tensor, whose values are divided by a scale."""
        bad = int(tf.math.count_nonzero(tf.logical_not(kept_casts.is_finite(tensor))))
        return cls(tensor, sample(tensor) / scale, bad)

    @property
    def size(self) -> float:
        """The root mean square of its finite numbers."""
        return rms(self.values[np.isfinite(self.values)])

    def distance(self, reference: "Quantity", unit: float) -> Distance:
        """Measures how far its numbers are from those of the reference.

        A gradient may be zero but for rounding, such as that of the bias of an attention's keys, or
        of queries while the keys are alike: larger numbers cancel, and no tensor shows how large.
        So where a gradient is further off than its own size, the rounding error of the largest
        gradient explains it.

        Args:
            reference: the same tensor, of which it is known what rounding explains.
            unit: float. The unit roundoff, which rounding explains at least.
        """
        # What is not finite may not be in the sample of a large tensor.
        is_bad = self.not_finite and not reference.not_finite
        distance = math.inf if is_bad else apart(self.values, reference.values)
        explained = max(reference.explained, unit * reference.size)
        if explained and reference.size < distance < math.inf:
            explained = max(explained, unit * reference.beside)
        # Noise may change the shape, or leave no gradient: then it explains whatever there is.
        units = _ratio(distance, explained) if explained < math.inf else 0.0
        return Distance(_ratio(distance, reference.size), units)

    @property
    def is_noise(self) -> bool:
        """Whether rounding explains it all: there is nothing in it to be lost."""
        return self.explained > MOST_NOISE * self.size


def share_off(distance: float) -> str:
    """Returns a relative distance, as tables have it."""
    return (f"{distance:.1e}" if distance else "0") if math.isfinite(distance) else "not finite"
