"""Layers whose `call` assigns to their weights.

Inside of a layer a float32 weight is read in 16 bits. What is computed from that and assigned to
the weight takes its digits away, and with them the small updates of all steps before. Nothing shows
what a value was computed from when it is assigned. But the code of a layer shows that it assigns.
"""

import dis
import inspect
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterator

_ASSIGN = {"assign", "scatter_update", "scatter_nd_update", "batch_scatter_update"}
# They keep the digits of what they add to. But a moving average adds what it computes from itself.
_ADD = {"assign_add", "assign_sub"}
_LIBRARIES = ("keras", "tf_keras", "tensorflow", "keras_mp", "numpy")


def assigns_weights(cls: type) -> bool:
    """Whether `call` of a layer of the user, or a function that it calls, assigns to a variable.

    Args:
        cls: class of layers. Those of Keras keep what they assign to in float32 themselves.
    """
    waiting, visited = [inspect.getattr_static(cls, "call", None)], set()
    while waiting:
        function = _function(waiting.pop())
        if function is None or function in visited:
            continue
        visited.add(function)
        for code in _codes(function.__code__):
            if _assigns(code):
                return True
            for name in code.co_names:
                waiting.append(inspect.getattr_static(cls, name, None))
                waiting.append(function.__globals__.get(name))
    return False


def _assigns(code: types.CodeType) -> bool:
    """Whether a code assigns to attributes, or adds to some that it reads, too."""
    if _ASSIGN & {*code.co_names}:
        return True
    if not _ADD & {*code.co_names}:
        return False
    loaded = [step.argval for step in dis.get_instructions(code) if step.argval in code.co_names]
    added_to = Counter(owner for owner, method in itertools.pairwise(loaded) if method in _ADD)
    return any(loaded.count(name) > times for name, times in added_to.items())


def _function(value: object) -> Callable[..., object] | None:
    """Returns the function of an attribute, a method or a property, if it is not a library's."""
    value = value.fget if isinstance(value, property) else value
    value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    if isinstance(value, types.FunctionType):
        value = inspect.unwrap(value)
    if not isinstance(value, types.FunctionType):
        return None
    return None if value.__module__.partition(".")[0] in _LIBRARIES else value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the code of a function and of those that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
