"""Checks the dtype in which float32 gradients are summed over replicas.

RFC 293, "All-reducing in float16", has a bool for it. bfloat16 needs a name; `reduce_dtype` is that
of PyTorch's `MixedPrecision`.
"""

from typing import Any

import tensorflow as tf

from keras_mp.support import validation
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

_CHOICES = (*LOW_PRECISION_NAMES, "float32")


def get(reduce_dtype: Any, choices: tuple[str, ...] = _CHOICES, hint: str = "") -> tf.DType:
    """Converts a `reduce_dtype` argument to a DType.

    Args:
        reduce_dtype: str, or DType.
        choices: tuple of str, the allowed dtypes. Defaults to float16, bfloat16 and float32.
        hint: str, advice for the error. Defaults to none.

    Returns:
        A DType.

    Raises:
        TypeError: it is not a dtype.
        ValueError: it is another dtype.
    """
    try:
        dtype = tf.as_dtype(reduce_dtype)
    except TypeError:
        dtype = None
    if dtype is None or isinstance(reduce_dtype, int):  # TensorFlow numbers its dtypes
        raise TypeError(
            f"`reduce_dtype` must be one of {choices}. Received: reduce_dtype={reduce_dtype!r} "
            f"(of type {type(reduce_dtype)})"
        )
    if dtype.name not in choices:
        raise ValueError(
            f"`reduce_dtype` must be one of {choices}.{hint} Received: "
            f"reduce_dtype={reduce_dtype!r}"
        )
    return dtype


def from_arguments(reduce_dtype: Any, aggregate_in_float16: Any) -> tf.DType:
    """Returns the dtype that two arguments specify together.

    Args:
        reduce_dtype: str, DType, or None, which leaves it to the other argument.
        aggregate_in_float16: bool, or None, which stands for True.

    Returns:
        A DType.

    Raises:
        TypeError: an argument is something else.
        ValueError: they contradict each other.
    """
    in_float16 = aggregate_in_float16
    if in_float16 is not None:
        validation.boolean("aggregate_in_float16", in_float16)
    if reduce_dtype is None:
        return tf.float32 if in_float16 is False else tf.float16
    dtype = get(reduce_dtype)
    if in_float16 is not None and in_float16 != (dtype == tf.float16):
        raise ValueError(
            "`reduce_dtype` and `aggregate_in_float16` contradict each other: the latter is "
            "`reduce_dtype='float16'` if it is True, and any other if it is False. Pass one of "
            f"them. Received: reduce_dtype={reduce_dtype!r}, aggregate_in_float16={in_float16!r}"
        )
    return dtype
