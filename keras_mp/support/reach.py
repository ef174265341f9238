"""Whether the code that runs in this thread is that of keras_mp's users, and in which dtype.

A layer with a 16-bit policy of keras_mp is, while it is called; so are a region of `autocast`, an
`autocast_scope` of 16 bits, what an object of keras_mp does, and the gradient functions of all
operations that were made there (`kernels/backward.py`). Whatever keras_mp replaces in TensorFlow
and Keras asks here, and elsewhere behaves as if keras_mp did not exist. This module needs
TensorFlow only.
"""

import threading

import tensorflow as tf


class _Reach(threading.local):
    """The dtype in which the code of this thread is ours, and whether keras_mp decides another."""

    dtype: tf.DType | None = None
    is_decided: bool = False


# What runs for each operation reads it; everything else calls the functions.
thread = _Reach()


def current() -> tf.DType | None:
    """Returns the 16-bit DType of the innermost layer or object of ours, or None elsewhere."""
    return thread.dtype


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


def is_decided() -> bool:
    """Whether this thread makes operations whose dtype keras_mp has decided, not the program."""
    return thread.is_decided


class decided:
    """A context manager for operations that keras_mp computes in float32 inside."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, thread.is_decided = thread.is_decided, True

    def __exit__(self, *error: object) -> None:
        thread.is_decided = self._before
