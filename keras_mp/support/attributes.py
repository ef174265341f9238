"""Temporary attributes of objects. This module needs nothing but Python."""

import contextlib
from collections.abc import Iterator

_NOTHING = object()


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Gives an object an attribute inside of the block.

    It bypasses `__setattr__`, by which Keras and layers of keras_mp track attributes. An attribute
    of a `threading.local` is replaced in this thread only.

    Args:
        owner: object with a `__dict__`.
        name: str.
        value: the value inside of the block.

    Example:

    >>> from keras_mp.support.attributes import replaced
    >>> layer = tf.keras.layers.Dense(1)
    >>> with replaced(layer, "call", lambda x: -x):
    ...     float(layer.call(1.0))
    -1.0
    >>> "call" in vars(layer)
    False
    """
    attributes = vars(owner)
    before = attributes.get(name, _NOTHING)
    attributes[name] = value
    try:
        yield
    finally:
        if before is _NOTHING:
            del attributes[name]
        else:
            attributes[name] = before
