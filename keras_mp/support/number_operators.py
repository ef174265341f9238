"""Gives objects that stand for a number a tensor's operators and conversion.

This module needs TensorFlow only.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


def give_operators(cls: type) -> None:
    """Gives a class the operators of a tensor.

    Args:
        cls: type. Its instances return a float32 scalar tensor when they are called.
    """
    for name in (*_REFLECTED, *map("r{}".format, _REFLECTED), "neg", "abs", "lt", "le", "gt", "ge"):
        setattr(cls, f"__{name}__", _operator(f"__{name}__"))
    tf.register_tensor_conversion_function(cls, _to_tensor)


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: Any, *others: Any) -> Any:
        # The number takes the tensor's dtype, as it does if the tensor is the left operand.
        dtype = others[0].dtype if others and tf.is_tensor(others[0]) else None
        return getattr(tf.convert_to_tensor(self, dtype), name)(*others)

    return operate


def _to_tensor(value: Any, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
    del name, as_ref
    return value() if dtype is None else tf.cast(value(), dtype)
