"""Whether the code that runs in this thread is that of keras_mp's users, and in which dtype.

A layer with a 16-bit policy of keras_mp is, while it is called; so are a region of `autocast`, an
`autocast_scope` of 16 bits, what an object of keras_mp does, and the gradient functions of all
operations that were made there (`kernels/backward.py`). Whatever keras_mp replaces in TensorFlow
and Keras asks here, and elsewhere behaves as if keras_mp did not exist. This module needs
TensorFlow only.
"""

import threading
from typing import NamedTuple

import tensorflow as tf


class Region(NamedTuple):
    """A region: the arguments of `keras_mp.autocast`.

    Attributes:
        dtype: DType, bfloat16 or float16.
        allow: names of operations that run in it in any case.
        deny: names of operations that do not.
        gradients_only: bool. Whether operations run in float32, and only the gradients of those
            that would run in 16 bits are computed in 16 bits.
    """

    dtype: tf.DType
    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    gradients_only: bool = False


class _Reach(threading.local):
    """All that a replaced function asks of its thread.

    Attributes:
        dtype: the 16-bit DType of code that is ours, or None.
        is_decided: bool. Whether keras_mp has decided the dtype of operations, not the program.
        region: the Region of `autocast` that is in force, or None. It has a dtype of reach, too.
    """

    dtype: tf.DType | None = None
    is_decided: bool = False
    region: Region | None = None


# What runs for each operation reads it; everything else calls the functions.
thread = _Reach()


def current() -> tf.DType | None:
    """Returns the 16-bit DType of the innermost layer or object of ours, or None elsewhere."""
    return thread.dtype


def region() -> Region | None:
    """Returns the region that is in force in this thread; None where nothing is autocast."""
    return thread.region


def state() -> tuple[Region | None, tf.DType | None]:
    """Returns the region and the dtype of this thread, which are the arguments of `in_region`."""
    return thread.region, thread.dtype


def is_decided() -> bool:
    """Whether this thread makes operations whose dtype keras_mp has decided, not the program."""
    return thread.is_decided


class entered:
    """A context manager for code of ours in this thread.

    Args:
        dtype: DType of 16 bits, or None for code that is not ours.
    """

    # A generator would take several times as long, and each layer enters.
    __slots__ = ("_before", "_dtype")

    def __init__(self, dtype: tf.DType | None) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before, thread.dtype = thread.dtype, self._dtype

    def __exit__(self, *error: object) -> None:
        thread.dtype = self._before


class in_region:
    """A context manager for code in a region, and in reach of its dtype.

    Args:
        region: Region, or None for code that is in none.
        dtype: DType of 16 bits of the reach, or None. Defaults to that of the region.
    """

    __slots__ = ("_before", "_state")

    def __init__(self, region: Region | None, dtype: tf.DType | None = None) -> None:
        self._state = region, dtype or (region and region.dtype)

    def __enter__(self) -> None:
        self._before = thread.region, thread.dtype
        thread.region, thread.dtype = self._state

    def __exit__(self, *error: object) -> None:
        thread.region, thread.dtype = self._before


def without_region() -> in_region:
    """Returns a context manager that stops autocasting, for code that has chosen its dtypes."""
    return in_region(None, thread.dtype)


class decided:
    """A context manager for operations that keras_mp computes in float32 inside."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, thread.is_decided = thread.is_decided, True

    def __exit__(self, *error: object) -> None:
        thread.is_decided = self._before
