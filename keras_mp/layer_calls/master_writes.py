"""Finds layers whose `call` assigns to their weights.

Inside of a layer, a float32 weight is read in 16 bits. If something that is computed from this is
assigned to the weight, the weight loses its further digits, and with them the small updates of all
steps before. When a value is assigned, nothing shows what it was computed from. But the code of a
layer shows that it assigns.
"""

import dis
import functools
import inspect
import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_mp.support.dtypes import parse

_ASSIGN = {"assign", "scatter_update", "scatter_nd_update", "batch_scatter_update"}
# These methods keep the digits of what they add to. But a moving average adds what it computes from
# the weight itself.
_ADD = {"assign_add", "assign_sub"}
_LIBRARIES = ("keras", "tf_keras", "tensorflow", "keras_mp", "numpy")

# The attributes that lead from a layer to the object that is assigned to; empty if they are not
# known.
_Path = tuple[str, ...]
_owners: weakref.WeakKeyDictionary[type, frozenset[_Path]] = weakref.WeakKeyDictionary()
# By layer, so that what `build` makes does not change the dtype of a layer after its first call.
_answers: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def assigns_weights(layer: Any) -> bool:
    """Whether a user's layer assigns to a variable in `call`.

    A function that `call` calls may do so as well.

    Args:
        layer: the layer. Keras's own layers keep what they assign to in float32 themselves.
    """
    if layer not in _answers:
        _answers[layer] = any(_may_be_weight(layer, path) for path in owners(type(layer)))
    return _answers[layer]


def owners(cls: type) -> frozenset[_Path]:
    """Returns what `call` of a class assigns to.

    Some of it may be no variable, since any object may have a method of that name.

    Args:
        cls: class of layers.
    """
    if cls not in _owners:
        _owners[cls] = frozenset(_find(cls))
    return _owners[cls]


def _may_be_weight(layer: Any, path: _Path) -> bool:
    """Whether there may be a floating-point variable behind some attributes."""
    value = functools.reduce(lambda owner, name: getattr(owner, name, None), path, layer)
    if value is None or not path:
        return True
    dtype: Any = parse(getattr(value, "dtype", None) or tf.string)
    return dtype is not None and dtype.is_floating


def _find(cls: type) -> Iterator[_Path]:
    waiting, visited = [inspect.getattr_static(cls, "call", None)], set()
    while waiting:
        function = _function(waiting.pop())
        if function is None or function in visited:
            continue
        visited.add(function)
        for code in _codes(function.__code__):
            yield from _assigned_to(code)
            for name in code.co_names:
                waiting.append(inspect.getattr_static(cls, name, None))
                waiting.append(function.__globals__.get(name))


def _assigned_to(code: types.CodeType) -> Iterator[_Path]:
    """Yields what a code assigns to.

    What it adds to counts if the code reads it, too.
    """
    if not (_ASSIGN | _ADD) & {*code.co_names}:
        return
    steps = list(dis.get_instructions(code))
    loaded = [step.argval for step in steps if step.argval in code.co_names]
    added_to = Counter(owner for owner, method in itertools.pairwise(loaded) if method in _ADD)
    for i, step in enumerate(steps):
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            continue
        if step.argval in _ASSIGN:
            yield _path(steps[:i])
        elif step.argval in _ADD:
            owner = steps[i - 1].argval
            if loaded.count(owner) > added_to[owner] > 0:
                yield _path(steps[:i])


def _path(steps: list[dis.Instruction]) -> _Path:
    """Returns the attributes of `self` that the last steps read.

    There are none if the object is another one.
    """
    names: list[str] = []
    while steps and steps[-1].opname == "LOAD_ATTR":
        names.insert(0, steps.pop().argval)
    last = steps[-1] if steps else None
    is_self = last is not None and last.opname.startswith("LOAD_FAST")
    loaded = last.argval if last is not None else None
    is_self = is_self and (loaded[-1] if isinstance(loaded, tuple) else loaded) == "self"
    return tuple(names) if is_self else ()


def _function(value: object) -> Callable[..., object] | None:
    """Returns the function of an attribute, a method or a property.

    It is None if the function belongs to a library.
    """
    value = value.fget if isinstance(value, property) else value
    value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    if isinstance(value, types.FunctionType):
        value = inspect.unwrap(value)
    if not isinstance(value, types.FunctionType):
        return None
    # A function that `exec` has made may have no module.
    module: str | None = value.__module__
    return None if (module or "").partition(".")[0] in _LIBRARIES else value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the code of a function and of those that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
