"""The methods by which digits are kept that weights in 16 bits leave out."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_mp.master_weights import rounding
from keras_mp.support import kept_casts
from keras_mp.support.dtypes import LOW_PRECISION

_Noise = Callable[[], tf.Tensor]


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


def _remainder(weight: tf.Variable) -> dict[str, tf.Tensor]:
    return {"remainder": tf.zeros(weight.shape, tf.int16)}


def _remainder_and_carry(weight: tf.Variable) -> dict[str, tf.Tensor]:
    """Together they are all of float32, in one bit more than the 16 of a remainder."""
    return {**_remainder(weight), "carry": rounding.pack_bits(tf.zeros(weight.shape, tf.bool))}


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
            rounding.join_bfloat16,
            lambda value, noise: rounding.split_bfloat16(value),
        ),
        tf.float16: Method(
            _remainder, rounding.join_float16, lambda value, noise: rounding.split_float16(value)
        ),
    },
    "copy": {dtype: _copy(dtype) for dtype in LOW_PRECISION},
    "stochastic_rounding": {
        tf.bfloat16: _at_random(rounding.stochastic_bfloat16),
        tf.float16: _at_random(rounding.stochastic_float16),
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
