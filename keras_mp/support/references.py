"""References that keep nothing alive, where Python allows that."""

import types
import weakref
from collections.abc import Callable
from typing import Any


def reference(value: Any) -> Callable[[], Any]:
    """Returns a function that returns an object, or None once nobody else has it.

    Args:
        value: the object. A bound method lives as long as the object that it is bound to. An object
            that allows no weak references is kept alive.
    """
    try:
        if isinstance(value, types.MethodType):
            return weakref.WeakMethod(value)
        return weakref.ref(value)
    except TypeError:  # Some objects have slots, but none for weak references.
        return lambda: value
