"""Gives objects that stand for a number a tensor's operators and conversion.

This module needs TensorFlow only.
"""

import operator
from typing import Any

import tensorflow as tf

_REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


def give_operators(cls: type) -> None:
    """Gives a class the operators of a tensor.

    Args:
        cls: type. Its instances return a float32 scalar tensor when they are called.
    """
    for name in (*_REFLECTED, "neg", "abs", "lt", "le", "gt", "ge"):
        _give_operator(cls, name)
    tf.register_tensor_conversion_function(cls, _to_tensor)


def _give_operator(cls: type, name: str) -> None:
    fn = getattr(operator, name)

    def operate(self: Any, *others: Any) -> Any:
        # The number takes the tensor's dtype, as it does if the tensor is the left operand.
        dtype = others[0].dtype if others and tf.is_tensor(others[0]) else None
        return fn(tf.convert_to_tensor(self, dtype), *others)

    def operate_reflected(self: Any, other: Any) -> Any:
        return fn(tf.convert_to_tensor(other, tf.float32), self())

    setattr(cls, f"__{name}__", operate)
    if name in _REFLECTED:
        setattr(cls, f"__r{name}__", operate_reflected)


def _to_tensor(value: Any, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
    del name, as_ref
    number = value()
    return number if dtype is None else tf.cast(number, dtype)
