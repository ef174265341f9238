"""Whether the code that runs in this thread is in reach, and in which dtype.

Code is "in reach" if it belongs to users of keras_mp: while a layer with a 16-bit policy of
keras_mp is called, in a region of `autocast` or an `autocast_scope` of 16 bits, while an object of
keras_mp works, and in the gradient functions of all operations that were made there
(`kernels/backward.py`). Whatever keras_mp replaces in TensorFlow and Keras asks here first, and out
of reach behaves as if keras_mp did not exist. This module needs TensorFlow only.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.hooks.once import once
from keras_mp.support import observers


class Region(NamedTuple):
    """A region: the arguments of `keras_mp.autocast`.

    Attributes:
        dtype: DType, bfloat16 or float16.
        allow: names of operations that run in this dtype in any case.
        deny: names of operations that do not run in it.
        gradients_only: bool. Whether operations run in float32, and only the gradients of those
            that would run in 16 bits are computed in 16 bits.
    """

    dtype: tf.DType
    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    gradients_only: bool = False


class _Reach(threading.local):
    """The state of a thread: all that a replaced function asks for.

    Attributes:
        dtype: the 16-bit DType of code in reach, or None.
        is_decided: bool. Whether keras_mp has decided the dtype of operations, not the program.
        region: the Region of `autocast` that is in force, or None. Inside it, `dtype` is set too.
        in_gradient: bool. Whether a gradient function of TensorFlow runs.
        is_strict: bool. Whether mixtures of dtypes are errors, as without keras_mp.
        is_exact: bool. Whether a layer runs that makes outputs of a model, which are exact.
        has_left: bool. Whether a 16-bit tensor has left the reach in eager.
        make: makes the float32 face of an output of a layer once more, where a model returns it;
            takes the 16-bit tensor, and returns a float32 one or None. None elsewhere.
        watches: int. How often a tape has begun to watch tensors.
        scopes: the context managers of the `autocast`s that were entered and not left.
    """

    dtype: tf.DType | None = None
    is_decided: bool = False
    region: Region | None = None
    in_gradient: bool = False
    is_strict: bool = False
    is_exact: bool = False
    has_left: bool = False
    make: Callable[[Any], Any] | None = None
    watches: int = 0
    scopes: tuple[contextlib.AbstractContextManager[None], ...] = ()


# Functions that run for each operation read it directly; everything else calls the functions below.
thread = _Reach()


@once
def begins() -> None:
    """Tells observers, once, that the process will compute in reach."""
    observers.tell(observers.Observer.reach_begins)


def current() -> tf.DType | None:
    """Returns the 16-bit DType of the innermost layer or object in reach, or None."""
    return thread.dtype


def region() -> Region | None:
    """Returns the region that is in force in this thread, or None without `autocast`."""
    return thread.region


def state() -> tuple[Region | None, tf.DType | None]:
    """Returns the region and the dtype of this thread, to pass to `in_region`."""
    return thread.region, thread.dtype


class entered:
    """A context manager for code that is in reach in this thread.

    Args:
        dtype: DType of 16 bits, or None for code that is not in reach.
        is_exact: bool. Whether whatever it computes is exact, though its products have gradients in
            16 bits. Defaults to False.
    """

    # A generator would take several times as long, and every call of a layer enters one.
    __slots__ = ("_before", "_state")

    def __init__(self, dtype: tf.DType | None, is_exact: bool = False) -> None:
        self._state = dtype, is_exact

    def __enter__(self) -> None:
        self._before = thread.dtype, thread.is_exact
        thread.dtype, thread.is_exact = self._state

    def __exit__(self, *error: object) -> None:
        thread.dtype, thread.is_exact = self._before


class in_region:
    """A context manager for code in a region, and in reach with a dtype.

    Args:
        region: Region, or None for code outside of all regions.
        dtype: the 16-bit DType that is in reach, or None. Defaults to the region's.
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
    """Returns a context manager that stops autocasting.

    It is for code that has chosen its own dtypes.
    """
    return in_region(None, thread.dtype)


class decided:
    """A context manager for operations that keras_mp computes in float32 internally."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, thread.is_decided = thread.is_decided, True

    def __exit__(self, *error: object) -> None:
        thread.is_decided = self._before
