"""How far numbers are apart, and the noise that tells what rounding explains of that."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from keras_mp.support import kept_casts

# The largest relative error of rounding to the nearest number of a dtype.
UNIT_ROUNDOFF = {
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float32": 2.0**-24,
    "float64": 2.0**-53,
}

# The smallest numbers above 0.
SMALLEST = {
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
    "float32": 2.0**-149,
    "float8_e4m3fn": 2.0**-9,
    "float8_e5m2": 2.0**-16,
}

# The largest, of dtypes that are easily exceeded.
LARGEST = {"float16": 65504.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

# A distance of more units is a finding: about 1 % in float16, 8 % in bfloat16. Sound layers have
# 0.2 to 1, and gradients of convolutions in float16 up to 15, since kernels for CPUs add up some
# thousand products in it. Planted defects begin at 100.
LIMIT = 16.0

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


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far the numbers of one run are from those of another.

    Attributes:
        relative: float. The root mean square of the differences, as a share of that of the
            numbers themselves. Infinite where numbers are finite in the reference only.
        units: float. The same, in units of what rounding explains.
        cosine: float. The cosine of the angle between the two, as vectors: 1 where one is the other
            but for a factor. NaN where it is not known, or where either has nothing but zeros.

    Example:

    >>> from keras_mp.numerics.distances import Distance
    >>> Distance(relative=0.01, units=2.0).sqnr
    40.0
    """

    relative: float
    units: float
    cosine: float = math.nan

    @property
    def sqnr(self) -> float:
        """The signal-to-quantization-noise ratio in dB; infinite where there is no difference."""
        if not self.relative:
            return math.inf
        return -20 * math.log10(self.relative) if math.isfinite(self.relative) else -math.inf

    @classmethod
    def of(
        cls,
        value: np.ndarray,
        reference: np.ndarray,
        explained: float,
        unit: float,
        largest: float = 0.0,
    ) -> "Distance":
        """Measures a distance.

        A gradient may be zero but for rounding, such as that of the bias of an attention's keys, or
        of queries while the keys are alike: larger numbers cancel, and no tensor shows how large.
        So where a gradient is further off than its own size, the rounding error of the largest
        gradient explains it.

        Args:
            value: array of float64.
            reference: array of the same shape; of another shape nothing is explained.
            explained: float. The root mean square of what rounding may change.
            unit: float. The unit roundoff, which rounding explains at least.
            largest: float. The root mean square of the largest gradient beside it, if it is one.
        """
        if value.shape != reference.shape:
            return cls(math.inf, math.inf)
        distance = apart(value, reference)
        angle = cosine(value, reference)
        if distance == 0 or math.isinf(distance):
            return cls(distance, distance, angle)
        size = rms(reference[np.isfinite(reference)])
        explained = max(explained, unit * size)
        if explained and distance > size:
            explained = max(explained, unit * largest)
        return cls(
            distance / size if size else math.inf,
            distance / explained if explained else math.inf,
            angle,
        )

    @staticmethod
    def worst(distances: "Sequence[Distance]") -> "Distance | None":
        """Returns the distance of most units; one of pure rounding only if there is no other."""
        # The gradient of a bias before a normalization is zero but for rounding, so it is further
        # off than its own size.
        reliable = [each for each in distances if each.relative <= 1 or each.units > LIMIT]
        return max(reliable or distances, key=lambda distance: distance.units, default=None)


def kind_of_gradient(name: str) -> str:
    """Returns "input", "output", "argument" or "variable", by the name of a gradient."""
    numbered = re.fullmatch(r"(input|output|argument) \d+", name)
    return numbered[1] if numbered else "variable"


def rms(values: np.ndarray) -> float:
    """Returns the root mean square; 0 for no numbers."""
    largest = float(np.max(np.abs(values), initial=0))
    # The squares of small numbers may be zero.
    return largest * math.sqrt(float(np.mean((values / largest) ** 2))) if largest else 0.0


def apart(value: np.ndarray, reference: np.ndarray) -> float:
    """Returns the root mean square of the differences; infinite if only the reference is finite.

    Numbers that are not finite in the reference do not count: the dtype is not to blame.
    """
    is_finite = np.isfinite(value)
    if np.any(np.isfinite(reference) & ~is_finite):
        return math.inf
    both = is_finite & np.isfinite(reference)
    return rms(value[both] - reference[both])


def cosine(value: np.ndarray, reference: np.ndarray) -> float:
    """Returns the cosine of the angle between two arrays, where both are finite; NaN for zeros."""
    both = np.isfinite(value) & np.isfinite(reference)
    first, second = (each[both] / (rms(each[both]) or math.inf) for each in (value, reference))
    size = math.sqrt(float(np.sum(first**2)) * float(np.sum(second**2)))
    return float(np.sum(first * second)) / size if size else math.nan


def relative(value: np.ndarray, reference: np.ndarray) -> float:
    """Returns the root mean square of the differences, as a share of that of the reference."""
    return Distance.of(value, reference, 0.0, 0.0).relative


def underflow(value: np.ndarray, reference: np.ndarray) -> float:
    """Returns which share of the reference's non-zero numbers is zero in `value`."""
    there = reference != 0
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
