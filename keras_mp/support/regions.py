"""The region of `autocast` that is in force in this thread. `op_autocast` acts on it.

It is below all subpackages, so that any code that chooses its dtypes itself can leave the region.
This module needs TensorFlow only.
"""

import contextlib
import threading
from typing import NamedTuple

import tensorflow as tf

from keras_mp.support.attributes import replaced


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


class _CurrentRegion(threading.local):
    """The region of this thread."""

    region: Region | None = None


_thread = _CurrentRegion()


def current() -> Region | None:
    """Returns the region that is in force in this thread; None where nothing is autocast."""
    return _thread.region


def in_force(region: Region | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that sets the region of this thread, without any hooks.

    Args:
        region: Region, or None, which stops autocasting.
    """
    return replaced(_thread, "region", region)


def none() -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that stops autocasting, for code that has chosen its dtypes."""
    return in_force(None)
