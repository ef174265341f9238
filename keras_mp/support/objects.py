"""Objects that hold tensors, such as distributions.

This module needs TensorFlow only.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from keras_mp.support.dtypes import is_low

# A distribution is made of others, and these are made of tensors.
_DEPTH = 5
_NO_OBJECTS = (tf.Variable, tf.TypeSpec, tf.DType, tf.TensorShape, type, str, bytes)


def widened(value: Any, widen: Callable[[Any], Any], depth: int = 0) -> Any:
    """Returns an object with float32 tensors in the place of 16-bit ones.

    Args:
        value: Any.
        widen: takes a tensor, or a ragged or sparse one, and returns another or the same.
        depth: int. How many objects this one is inside of.

    Returns:
        `value` if it holds no such tensor. Otherwise a new object: a distribution is made again
        (like every object with `parameters` and `copy`); anything else is a shallow copy with other
        attributes.
    """
    if isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
        return widen(value)
    if depth == _DEPTH or isinstance(value, _NO_OBJECTS):
        return value
    kind: Any = type(value)
    parts: Any = getattr(value, "parameters", None)
    copied: Any = getattr(value, "copy", None)
    is_distribution = isinstance(parts, Mapping) and callable(copied)
    if kind in (dict, list, tuple):
        parts = value if kind is dict else dict(enumerate(value))
    elif not is_distribution:
        # A layer that an object holds is left as it is.
        parts = {} if isinstance(value, tf.Module) else getattr(value, "__dict__", {})
    wide = {name: widened(old, widen, depth + 1) for name, old in parts.items()}
    others = {name: new for name, new in wide.items() if new is not parts[name]}
    if not others:
        return value
    if kind in (dict, list, tuple):
        return wide if kind is dict else kind(wide.values())
    if is_distribution:
        return copied(**others)
    others |= {name: tf.float32 for name, old in parts.items() if is_low(old)}
    result = copy.copy(value)
    for name, new in others.items():
        object.__setattr__(result, name, new)  # a frozen dataclass, too, takes this
    return result
