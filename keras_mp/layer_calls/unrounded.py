"""Notes what a 16-bit tensor was before a layer or a model rounded it.

Layers that read raw inputs take that tensor (`raw_inputs`), and models return it.
"""

from typing import Any

import tensorflow as tf

from keras_mp.support import marks
from keras_mp.support.dtypes import is_low

# Operations that move the values of their first input, and change none.
_MOVING_OPS = frozenset(
    ("StridedSlice", "Slice", "Reshape", "Squeeze", "ExpandDims", "Transpose", "GatherV2")
)


# Arguments that the functions and the operations call by different names.
_NAMES_OF_ARGUMENTS = {"dim": "axis", "squeeze_dims": "axis"}


def cast(value: Any, dtype: tf.DType) -> Any:
    """Casts an input as `marks.cast` does, and notes the tensor before the cast.

    Args:
        value: a tensor (also a ragged or sparse one) or a variable.
        dtype: the DType to cast to.
    """
    result = marks.cast(value, dtype)
    note(value, result)
    return result


def note(value: Any, rounded: Any) -> None:
    """Notes on a 16-bit tensor what it was before it was rounded."""
    if rounded is value or isinstance(value, tf.Variable):
        return
    if is_low(getattr(rounded, "dtype", None)):
        rounded._keras_mp_unrounded = before_rounding(value)


def copy_note(source: Any, result: Any) -> None:
    """Copies the note about what a tensor was before it was rounded.

    The other tensor takes its place.

    Args:
        source: tensor, with or without a note.
        result: another tensor of the same shape.
    """
    if hasattr(source, "_keras_mp_unrounded"):
        result._keras_mp_unrounded = source._keras_mp_unrounded


def before_rounding(value: Any) -> Any:
    """Returns what a tensor was before a model or layer rounded it, or the tensor.

    Args:
        value: Any.
    """
    noted = getattr(value, "_keras_mp_unrounded", None)
    if noted is not None:
        return noted
    if not isinstance(value, tf.Tensor) or not is_low(value.dtype):
        return value
    is_symbolic = tf.is_symbolic_tensor(value)
    return _moved_before_rounding(value) if is_symbolic else value


def _moved_before_rounding(value: tf.Tensor) -> tf.Tensor:
    """Repeats on the tensor before rounding what a graph did to it, such as slicing.

    An eager tensor does not show what was done to it.
    """
    op = value.op
    if op.type not in _MOVING_OPS or op.graph is not tf.compat.v1.get_default_graph():
        return value
    moved = op.inputs[0]
    before = before_rounding(moved)
    if before is moved:
        return value
    names = [arg.name for arg in op.op_def.input_arg]
    arguments = dict(zip(names, [before, *op.inputs[1:]], strict=True))
    for attribute in op.op_def.attr:
        if attribute.type != "type":
            arguments[attribute.name] = op.get_attr(attribute.name)
    named: dict[str, Any] = {
        str(_NAMES_OF_ARGUMENTS.get(name, name)): value for name, value in arguments.items()
    }
    return getattr(tf.raw_ops, op.type)(**named)
