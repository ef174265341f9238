"""Nested structures of tensors, as a loss gets them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_SCALARS = (bool, int, float, complex, str, bytes, np.generic)


def map_tensors(function: Callable[[tf.Tensor], Any], structure: Any) -> Any:
    """Applies a function to the tensors, or what becomes one, of a structure.

    Args:
        function: of a tensor.
        structure: nest of tensors, arrays and None, which stays. Nested lists of numbers are one
            tensor.

    Returns:
        The same structure of what the function returned.
    """
    leaves = tf.nest.flatten(structure)
    if tf.nest.is_nested(structure) and all(_is_scalar(leaf) for leaf in leaves):
        structure = tf.convert_to_tensor(structure)

    def apply(leaf: Any) -> Any:
        if leaf is None:
            return None
        return function(leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf))

    return tf.nest.map_structure(apply, structure)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, _SCALARS) or (tf.is_tensor(value) and value.shape.rank == 0)
