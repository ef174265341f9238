"""The dtype that variables are cast to, which is kept where Keras keeps it.

So the scopes of each of the two cast the other's variables as well. This module needs TensorFlow
only.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import tensorflow as tf


class SharedScope(NamedTuple):
    """How the dtype is read and set.

    Attributes:
        dtype: returns the DType in force in this thread, or None.
        enter: takes a DType or None and returns the context manager that puts it in force.
    """

    dtype: Callable[[], tf.DType | None]
    enter: Callable[[tf.DType | None], AbstractContextManager[None]]


# `keras_mp.layers` sets it.
scope: SharedScope
