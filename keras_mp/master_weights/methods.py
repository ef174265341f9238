"""The methods by which digits are kept that weights in 16 bits leave out."""

import abc
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_mp.master_weights import rounding
from keras_mp.support import kept_casts


class Method(abc.ABC):
    """A method of keeping float32 values in a variable in 16 bits.

    Further variables may be kept beside it.
    """

    def beside(self, weight: tf.Variable) -> dict[str, tf.Tensor]:
        """Returns initial values for the variables kept beside a weight, by their names.

        The names are those in files and among the optimizer's variables.
        """
        del weight
        return {}

    @abc.abstractmethod
    def join(self, low_precision: tf.Tensor, beside: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the float32 value.

        Args:
            low_precision: the value of the variable in 16 bits.
            beside: the values of those beside it.
        """

    @abc.abstractmethod
    def split(
        self, value: tf.Tensor, dtype: tf.DType, noise: Callable[[], tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the values of all of these variables, that in 16 bits first.

        Args:
            value: float32 tensor.
            dtype: the dtype in 16 bits.
            noise: returns random bits of the same shape, a uint32 tensor.
        """


class SplitBFloat16(Method):
    """Keeps the remainder beside a bfloat16 weight.

    That is all of float32, in one bit more than the 16 of a remainder.
    """

    def beside(self, weight: tf.Variable) -> dict[str, tf.Tensor]:
        remainder = tf.zeros(weight.shape, tf.int16)
        return {"remainder": remainder, "carry": rounding.pack_bits(remainder < 0)}

    def join(self, low_precision: tf.Tensor, beside: Sequence[tf.Tensor]) -> tf.Tensor:
        remainder, carry = beside
        carry = rounding.unpack_bits(carry, low_precision.shape)
        return rounding.join_bfloat16(low_precision, remainder, carry)

    def split(
        self, value: tf.Tensor, dtype: tf.DType, noise: Callable[[], tf.Tensor]
    ) -> list[tf.Tensor]:
        del dtype, noise
        nearest, remainder, carry = rounding.split_bfloat16(value)
        return [nearest, remainder, rounding.pack_bits(carry)]


class SplitFloat16(Method):
    """The remainder beside a float16 weight."""

    def beside(self, weight: tf.Variable) -> dict[str, tf.Tensor]:
        return {"remainder": tf.zeros(weight.shape, tf.int16)}

    def join(self, low_precision: tf.Tensor, beside: Sequence[tf.Tensor]) -> tf.Tensor:
        return rounding.join_float16(low_precision, *beside)

    def split(
        self, value: tf.Tensor, dtype: tf.DType, noise: Callable[[], tf.Tensor]
    ) -> list[tf.Tensor]:
        del dtype, noise
        return list(rounding.split_float16(value))


class Copy(Method):
    """A float32 weight beside the one in 16 bits."""

    def beside(self, weight: tf.Variable) -> dict[str, tf.Tensor]:
        return {"copy": tf.cast(weight, tf.float32)}

    def join(self, low_precision: tf.Tensor, beside: Sequence[tf.Tensor]) -> tf.Tensor:
        # Where the weight was set since, by loading a file for one, the copy is out of date.
        [copy] = beside
        rounded = kept_casts.to_16_bits(copy, low_precision.dtype)
        is_current = tf.equal(rounded, low_precision)
        return tf.where(is_current, copy, tf.cast(low_precision, tf.float32))

    def split(
        self, value: tf.Tensor, dtype: tf.DType, noise: Callable[[], tf.Tensor]
    ) -> list[tf.Tensor]:
        del noise
        return [kept_casts.to_16_bits(value, dtype), value]


class StochasticRounding(Method):
    """Keeps nothing beside the weight, and rounds it at random.

    So the mean of many updates is right.
    """

    def join(self, low_precision: tf.Tensor, beside: Sequence[tf.Tensor]) -> tf.Tensor:
        del beside
        return tf.cast(low_precision, tf.float32)

    def split(
        self, value: tf.Tensor, dtype: tf.DType, noise: Callable[[], tf.Tensor]
    ) -> list[tf.Tensor]:
        rounded = {
            tf.bfloat16: rounding.stochastic_bfloat16,
            tf.float16: rounding.stochastic_float16,
        }
        return [rounded[dtype](value, noise())]


_METHODS: dict[str, dict[tf.DType, type[Method]]] = {
    "split": {tf.bfloat16: SplitBFloat16, tf.float16: SplitFloat16},
    "copy": {tf.bfloat16: Copy, tf.float16: Copy},
    "stochastic_rounding": {tf.bfloat16: StochasticRounding, tf.float16: StochasticRounding},
}

NAMES = tuple(_METHODS)


def method(name: str, dtype: tf.DType) -> Method:
    """Returns the method of that name for weights of a dtype.

    Args:
        name: one of `NAMES`.
        dtype: bfloat16 or float16.
    """
    return _METHODS[name][dtype]()
