"""Objects that hold tensors, such as distributions.

This module needs TensorFlow only.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from keras_mp.support.dtypes import LOW_PRECISION

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
    if type(value) in (list, tuple):
        items = [widened(each, widen, depth + 1) for each in value]
        is_same = all(new is old for new, old in zip(items, value))
        return value if is_same else type(value)(items)
    parameters: Any = value if type(value) is dict else getattr(value, "parameters", None)
    is_distribution = isinstance(parameters, Mapping) and callable(getattr(value, "copy", None))
    if not is_distribution:
        # A layer that an object holds is left as it is.
        is_module = isinstance(value, tf.Module)
        parameters = {} if is_module else getattr(value, "__dict__", {})
    others: dict[Any, Any] = {}
    for name, old in parameters.items():
        new = widened(old, widen, depth + 1)
        if new is not old:
            others[name] = new
    if not others:
        return value
    if type(value) is dict:
        return {**value, **others}
    if is_distribution:
        return value.copy(**others)
    for name, old in parameters.items():
        if isinstance(old, tf.DType) and old in LOW_PRECISION:
            others[name] = tf.float32
    result = copy.copy(value)
    for name, new in others.items():
        object.__setattr__(result, name, new)  # a frozen dataclass, too, takes this
    return result
