"""Positional arguments of optimizers' methods, whose order differs among the classes of Keras."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def of_apply_gradients(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets `apply_gradients` of a wrapper take what that of the inner optimizer takes by position.

    Args:
        method: takes the pairs, the name, and all else by keyword.
    """

    @functools.wraps(method)
    def apply_gradients(
        self: Any, grads_and_vars: Any, name: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(name, bool):  # as of Keras's own LossScaleOptimizer, which has no name
            name, args = None, (name, *args)
        names = (self._adapter.third_argument,)
        if len(args) > len(names):
            raise TypeError(
                f"Pass all but the pairs, the name and {names[0]} by keyword. Received: {args!r}"
            )
        return method(self, grads_and_vars, name, **dict(zip(names, args)), **kwargs)

    return apply_gradients


def of_minimize(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets `minimize` of a wrapper take its optional arguments in any order: each has a type.

    Args:
        method: takes the loss, the variables, the tape, the gradient of the loss, and the name.
    """

    @functools.wraps(method)
    def minimize(self: Any, loss: Any, var_list: Any, *args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if arg is None:
                continue
            if isinstance(arg, tf.GradientTape):
                name = "tape"
            else:
                name = "name" if isinstance(arg, str) else "grad_loss"
            if kwargs.get(name) is not None:
                raise TypeError(f"`{name}` is given twice. Received: {kwargs[name]!r} and {arg!r}")
            kwargs[name] = arg
        return method(self, loss, var_list, **kwargs)

    return minimize
