"""The methods by which digits are kept that weights in 16 bits leave out.

float32 becomes 16 bits and back: nearest with the remainder kept, or stochastic. All of it is done
on the bits, or with operations that are exact, and with casts that XLA keeps. Bits are of uint32:
on GPUs, TensorFlow computes with int32 in the memory of the host. No integer is cast to a dtype
that cannot hold it: what becomes of it would depend on the compiler.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.support import kept_casts, rounding_by_bits
from keras_mp.support.dtypes import LOW_PRECISION

_Noise = Callable[[], tf.Tensor]

_MAGNITUDE = 0x7FFFFFFF
_BFLOAT16_LARGEST = 0x7F7F0000
# The last of float16's 11 bits.
_FLOAT16_DIGITS = 2.0**-10
_FLOAT16_LARGEST = 65504.0
# A remainder of float16 is counted in units of 2**-25 of its weight's binade. It is at most half of
# a float16 digit, 2**14 units, and all float32 digits are whole units.
_REMAINDER_UNIT = 2.0**-25


class Method(NamedTuple):
    """A method of keeping float32 values in a variable in 16 bits.

    Further variables may be kept beside it.

    Attributes:
        beside: takes a weight; returns initial values for the variables kept beside it, by their
            names in files and among the optimizer's variables.
        join: takes the value of the variable in 16 bits, and those of the ones beside it; returns
            the float32 value.
        split: takes a float32 value, and a function that returns random bits of the same shape, a
            uint32 tensor; returns the values of all of these variables, that in 16 bits first.
    """

    beside: Callable[[tf.Variable], dict[str, tf.Tensor]]
    join: Callable[..., tf.Tensor]
    split: Callable[[tf.Tensor, _Noise], Sequence[tf.Tensor]]


def split_bfloat16(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Splits float32 values into bfloat16 ones and their remainders.

    bfloat16 is the upper half of float32's bits. Rounded to nearest, the rest is the lower half,
    read as a signed number of 16 bits, with one exception: in a tie that rounds down it is +32768,
    where the lower half is read as -32768, and a carry tells so.

    Args:
        value: float32 tensor.

    Returns:
        tuple of the nearest bfloat16 values (ties to even), of an int16 tensor, and of the carries
        as `pack_bits` packs them.
    """
    bits = tf.bitcast(value, tf.uint32)
    nearest = kept_casts.to_16_bits(value, tf.bfloat16)
    # A tie rounds down where the last bit of the upper half, 0x10000, is even.
    remainder = tf.bitcast(tf.cast(bits & 0xFFFF, tf.uint16), tf.int16)
    return nearest, remainder, pack_bits(tf.equal(bits & 0x1FFFF, 0x8000))


def join_bfloat16(nearest: tf.Tensor, remainder: tf.Tensor, carry: tf.Tensor) -> tf.Tensor:
    """Returns the float32 values that `split_bfloat16` has split.

    They are the same bit for bit, except for NaN.

    Args:
        nearest: bfloat16 tensor.
        remainder: int16 tensor.
        carry: bool tensor, packed.
    """
    as_float32 = tf.cast(nearest, tf.float32)
    signed = tf.bitcast(tf.cast(remainder, tf.int32), tf.uint32)
    is_carried = unpack_bits(carry, nearest.shape)
    rest = tf.where(is_carried, tf.constant(0x8000, tf.uint32), signed)
    joined = tf.bitcast(tf.bitcast(as_float32, tf.uint32) + rest, tf.float32)
    # If a program has set the weight since, what is left of the old one is less than half a digit.
    # But a zero has no bits that it could be taken from.
    return tf.where(tf.math.is_nan(joined), as_float32, joined)


def pack_bits(bits: tf.Tensor) -> tf.Tensor:
    """Packs a bool tensor of any shape into bytes, eight to each.

    Args:
        bits: bool tensor of a static shape.

    Returns:
        uint8 tensor of rank 1.
    """
    flat = tf.reshape(tf.cast(bits, tf.uint8), [-1])
    eights = tf.reshape(tf.pad(flat, [[0, -bits.shape.num_elements() % 8]]), [-1, 8])
    # One product moves the eight lowest bits of the bytes into the highest byte.
    gathered = tf.bitcast(eights, tf.uint64) * tf.constant(0x0102040810204080, tf.uint64)
    return tf.cast(tf.bitwise.right_shift(gathered, tf.constant(56, tf.uint64)), tf.uint8)


def unpack_bits(packed: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Returns the bool tensor that `pack_bits` has packed.

    Args:
        packed: uint8 tensor.
        shape: its static shape.
    """
    everywhere = tf.cast(packed, tf.uint64) * tf.constant(0x0101010101010101, tf.uint64)
    one_each = everywhere & tf.constant(0x8040201008040201, tf.uint64)
    flat = tf.reshape(tf.bitcast(one_each, tf.uint8), [-1])
    return tf.reshape(tf.not_equal(flat[: shape.num_elements()], 0), shape)


def split_float16(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Splits float32 values into float16 ones and their remainders.

    From 2**-16 up to where float16 becomes infinite, 65520, nothing is lost. Smaller values lose
    the digits below 2**-39.

    Args:
        value: float32 tensor.

    Returns:
        tuple of the nearest float16 values and of an int16 tensor.
    """
    nearest = kept_casts.to_16_bits(value, tf.float16)
    as_float32 = tf.cast(nearest, tf.float32)
    _, inverse = rounding_by_bits.float16_binade(as_float32)
    units = (value - as_float32) * (inverse * (1 / _REMAINDER_UNIT))
    # Infinities and NaN have no remainder.
    units = tf.where(tf.math.is_finite(units), units, 0.0)
    return nearest, tf.cast(tf.round(units), tf.int16)


def join_float16(nearest: tf.Tensor, remainder: tf.Tensor) -> tf.Tensor:
    """Returns the float32 values that `split_float16` has split.

    Args:
        nearest: float16 tensor.
        remainder: int16 tensor.
    """
    as_float32 = tf.cast(nearest, tf.float32)
    power, _ = rounding_by_bits.float16_binade(as_float32)
    joined = as_float32 + tf.cast(remainder, tf.float32) * (power * _REMAINDER_UNIT)
    return tf.where(tf.equal(remainder, 0), as_float32, joined)  # which keeps the sign of -0.0


def stochastic_bfloat16(value: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
    """Rounds to one of the two neighbours in bfloat16, so that the mean is the value.

    Args:
        value: float32 tensor.
        noise: tensor of random bits, in int32 or uint32, of which the upper ones are read.

    Returns:
        bfloat16 tensor. Finite values stay finite.
    """
    bits, noise = tf.bitcast(value, tf.uint32), tf.bitcast(noise, tf.uint32)
    # From the largest finite number on, nothing is added.
    is_largest = (bits & _MAGNITUDE) >= _BFLOAT16_LARGEST
    noise = tf.bitwise.right_shift(noise, 16)
    noise = tf.where(is_largest, tf.constant(0, tf.uint32), noise)
    upper = tf.bitwise.right_shift(bits + noise, 16)
    rounded = tf.bitcast(tf.cast(upper, tf.uint16), tf.bfloat16)
    # The upper half of a NaN may be that of an infinity.
    return tf.where(tf.math.is_nan(value), tf.constant(float("nan"), tf.bfloat16), rounded)


def stochastic_float16(value: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
    """Rounds to one of the two neighbours in float16, so that the mean is the value.

    Args:
        value: float32 tensor.
        noise: tensor of random bits, in int32 or uint32, of which the upper ones are read.

    Returns:
        float16 tensor. Finite values stay finite.
    """
    power, inverse = rounding_by_bits.float16_binade(value)
    units = value * (inverse * (1 / _FLOAT16_DIGITS))
    below = tf.floor(units)
    # float32 holds the difference exactly; its digits above 2**-31 count.
    threshold = tf.cast((units - below) * 2.0**31, tf.uint32)
    goes_up = tf.bitwise.right_shift(tf.bitcast(noise, tf.uint32), 1) < threshold
    rounded = tf.where(goes_up, below + 1, below) * (power * _FLOAT16_DIGITS)
    rounded = tf.clip_by_value(rounded, -_FLOAT16_LARGEST, _FLOAT16_LARGEST)
    return tf.cast(tf.where(tf.math.is_finite(value), rounded, value), tf.float16)


def noise(shape: tf.TensorShape, seed: tf.Tensor) -> tf.Tensor:
    """Returns random bits for stochastic rounding; the same for the same seed.

    Random numbers are drawn for each row and for each column, which takes far less time than one
    for each element. An element gets their product. They are odd: given either, the product goes
    through all odd numbers. So it is uniform in all bits but the last, and independent of that of
    any other element. The variance of a sum over elements is therefore the same as with numbers
    that are drawn for each.

    Args:
        shape: static shape. The last dimension has the columns, all others the rows.
        seed: int64 tensor of two numbers.

    Returns:
        uint32 tensor, whose last bit is always 1.
    """
    sizes: list[Any] = shape.as_list() or [1]
    *leading, columns = sizes
    rows = math.prod(leading)
    drawn = tf.random.stateless_uniform(
        [rows + columns],
        seed,
        minval=None,  # pyright: ignore[reportArgumentType]
        maxval=None,
        dtype=tf.int32,
        alg="philox",
    )
    odd = tf.bitcast(drawn, tf.uint32) | 1
    return tf.reshape(odd[:rows, tf.newaxis] * odd[rows:], shape)


def _remainder(weight: tf.Variable) -> dict[str, tf.Tensor]:
    return {"remainder": tf.zeros(weight.shape, tf.int16)}


def _remainder_and_carry(weight: tf.Variable) -> dict[str, tf.Tensor]:
    """Together they are all of float32, in one bit more than the 16 of a remainder."""
    return {**_remainder(weight), "carry": pack_bits(tf.zeros(weight.shape, tf.bool))}


def _join_copy(low_precision: tf.Tensor, copy: tf.Tensor) -> tf.Tensor:
    # Where the weight was set since, by loading a file for one, the copy is out of date.
    rounded = kept_casts.to_16_bits(copy, low_precision.dtype)
    is_current = tf.equal(rounded, low_precision)
    return tf.where(is_current, copy, tf.cast(low_precision, tf.float32))


def _copy(dtype: tf.DType) -> Method:
    return Method(
        lambda weight: {"copy": tf.cast(weight, tf.float32)},
        _join_copy,
        lambda value, noise: [kept_casts.to_16_bits(value, dtype), value],
    )


def _at_random(to_neighbour: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Method:
    """Keeps nothing beside the weight, so that the mean of many updates is right."""
    return Method(
        lambda weight: {},
        lambda low_precision: tf.cast(low_precision, tf.float32),
        lambda value, noise: [to_neighbour(value, noise())],
    )


_METHODS: dict[str, dict[tf.DType, Method]] = {
    "split": {
        tf.bfloat16: Method(
            _remainder_and_carry,
            join_bfloat16,
            lambda value, noise: split_bfloat16(value),
        ),
        tf.float16: Method(_remainder, join_float16, lambda value, noise: split_float16(value)),
    },
    "copy": {dtype: _copy(dtype) for dtype in LOW_PRECISION},
    "stochastic_rounding": {
        tf.bfloat16: _at_random(stochastic_bfloat16),
        tf.float16: _at_random(stochastic_float16),
    },
}

NAMES = tuple(_METHODS)


def method(name: str, dtype: tf.DType) -> Method:
    """Returns the method of that name for weights of a dtype.

    Args:
        name: one of `NAMES`.
        dtype: bfloat16 or float16.
    """
    return _METHODS[name][dtype]
