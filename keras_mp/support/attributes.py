"""Attributes that one object has for a while, in the place of those of its class.

This module needs nothing but Python.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

_NOTHING = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object an attribute inside of the block.

    Keras, and layers of keras_mp, track what is set on them. This goes past that. What a
    `threading.local` has is replaced for this thread.

    Args:
        owner: object with a `__dict__`.
        name: str.
        value: what the attribute is meanwhile.

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
