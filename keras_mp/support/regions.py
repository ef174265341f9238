"""The region of `autocast` that is in force in this thread. `op_autocast` acts on it.

It is here, below all subpackages, so that code that chooses its dtypes itself can leave it. This
module needs TensorFlow only.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf


class Region(NamedTuple):
    """What `keras_mp.autocast` has put in force.

    Attributes:
        dtype: DType, bfloat16 or float16.
        allow: names of operations that run in it in any case.
        deny: names of operations that do not.
        gradients_only: bool. Whether results are those of float32, and only the gradients of what
            would run in 16 bits are computed there.
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


@contextlib.contextmanager
def entered(region: Region | None) -> Iterator[None]:
    """Puts a region in force, or None, which stops autocasting.

    Args:
        region: Region or None.
    """
    before = _thread.region
    _thread.region = region
    try:
        yield
    finally:
        _thread.region = before


def none() -> contextlib.AbstractContextManager[None]:
    """Stops autocasting, for code that has chosen its dtypes."""
    return entered(None)
