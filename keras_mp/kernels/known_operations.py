"""What the door knows about TensorFlow's operations.

It is from their definitions and from the tables. This module needs TensorFlow only.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.kernels import convolutions, slow, sums
from keras_mp.kernels.trials import shape_of, usual_device
from keras_mp.support import op_table, registered_kernels
from keras_mp.support.dtypes import LOW_PRECISION
from keras_mp.tensorflow_api import operations
from keras_mp.variables import scope

FLOAT32, _RESOURCE = tf.float32.as_datatype_enum, tf.resource.as_datatype_enum
_LOW = {dtype.as_datatype_enum: dtype for dtype in LOW_PRECISION}
# The dtype of the results of `IsotonicRegression` is an attribute of its own.
RESULT = "output_dtype"
# What TensorFlow makes one tensor of.
_LISTS: Any = (list, tuple, tf.TensorShape, np.ndarray)
# The tables of kernels that may be wrong, by operations.
TRIED = {op: table for table in (sums.TABLE, convolutions.TABLE) for op in table.kernels}
# In bfloat16 TensorFlow loses their gradients (seen with 2.21 on an H200: training learns nothing).
# Its kernel casts to float32 for cuDNN, so an operation in float32 is no slower.
_OF_CUDNN = frozenset(op for op in op_table.ops("recurrent cells") if op.startswith("Cudnn"))


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """What the door knows about an operation.

    Attributes:
        name: str. Its type.
        kind: str, "exact", "other", "product", "low", "cast", "read" or "draw".
        inputs: names of all its inputs.
        positions: the positions of those inputs that share the dtype.
        others: dict of the DTypes of other inputs that are one tensor each, by their positions;
            None where several are allowed.
        has_list: bool. Whether one of these is a list.
        attribute: str. The attribute that is the dtype.
        outputs: positions of the outputs in this dtype; None stands for all.
        is_one: bool. Whether it has just one output.
        refuses: 16-bit DTypes in which TensorFlow does not compute it, or not its gradient.
        is_move: bool. Whether it moves numbers and changes none.
        doubtful_in: the 16-bit DTypes in which its kernel may be wrong (`kernels/trials.py`), or be
            slow on a CPU (`kernels/slow.py`).
    """

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    positions: tuple[int, ...] = ()
    others: Mapping[int, tf.DType | None] = dataclasses.field(default_factory=dict)
    has_list: bool = False
    attribute: str = ""
    outputs: tuple[int, ...] | None = ()
    is_one: bool = True
    refuses: frozenset[tf.DType] = frozenset()
    is_move: bool = False
    doubtful_in: frozenset[tf.DType] = frozenset()

    def as_tensor(self, position: int, value: Any) -> Any:
        """Returns an input of another dtype as a tensor, if it is a list or may change.

        Given lists, TensorFlow takes its slower way in eager, which does not come through the door.

        Args:
            position: int. The position of the input.
            value: the input.
        """
        if isinstance(value, tf.Tensor) or position not in self.others:
            return value
        if not isinstance(value, _LISTS):
            return scope.read(value)
        # An empty list, such as the shape of a scalar, does not say what it is a list of.
        is_empty = isinstance(value, list | tuple) and not value
        dtype = self.others[position] or (tf.int32 if is_empty else None)
        return tf.convert_to_tensor(value, dtype)


def _find(name: str) -> Operation | None:
    """Returns what the door needs to know about an operation; None if that is nothing."""
    op_def = operations.definition(name)
    is_doubtful = name in TRIED or name in slow.OPS
    is_left = name in op_table.LOW - op_table.PRODUCTS - _OF_CUDNN and not is_doubtful
    if op_def is None or is_left:
        return None
    if any(arg.type == _RESOURCE for arg in op_def.input_arg):
        return None  # A variable decides.
    for attr in op_def.attr:
        allowed = {*attr.allowed_values.list.type}
        if attr.type != "type" or (allowed and FLOAT32 not in allowed):
            continue
        # The threshold of a sparse sum has the real dtype of its numbers, under another name.
        has_dtype = [arg.type_attr in (attr.name, "Treal") for arg in op_def.input_arg]
        is_of_results = [arg.type_attr == attr.name for arg in op_def.output_arg]
        if any(is_of_results if name in op_table.DRAWS else has_dtype):
            refuses = frozenset(
                dtype
                for low, dtype in _LOW.items()
                if (allowed and low not in allowed) or not _has_kernel(name, attr.name, low)
            )
            if name in _OF_CUDNN:
                refuses |= {tf.bfloat16}
            # What cuDNN keeps for its gradient is not rounded.
            outputs = [
                arg.type_attr in (attr.name, RESULT) and arg.name != "reserve_space"
                for arg in op_def.output_arg
            ]
            return _described(op_def, attr.name, has_dtype, outputs, refuses)
        if FLOAT32 in allowed and allowed.isdisjoint(_LOW):
            # Its inputs hide their dtype, such as those of a product of sparse matrices.
            refuses = frozenset(LOW_PRECISION)
            described = _described(op_def, attr.name, has_dtype, is_of_results, refuses)
            return dataclasses.replace(described, kind="draw")
    has_dtype = [arg.type == FLOAT32 for arg in op_def.input_arg]
    if not any(has_dtype):
        return None
    outputs = [arg.type == FLOAT32 for arg in op_def.output_arg]
    return _described(op_def, "", has_dtype, outputs, frozenset(LOW_PRECISION))


def _described(
    op_def: Any,
    attribute: str,
    has_dtype: Sequence[bool],
    outputs: Sequence[bool],
    refuses: frozenset[tf.DType],
) -> Operation:
    """Returns what the definition of an operation and the tables say about it."""
    name, args = op_def.name, list(enumerate(op_def.input_arg))
    has_lists = any(arg.number_attr or arg.type_list_attr for arg in op_def.output_arg)
    return Operation(
        name=name,
        kind=_kind_of(name),
        inputs=tuple(arg.name for _, arg in args),
        positions=tuple(i for i, _ in args if has_dtype[i]),
        others={
            i: tf.as_dtype(arg.type) if arg.type else None
            for i, arg in args
            if not (has_dtype[i] or arg.number_attr or arg.type_list_attr)
        },
        has_list=any(arg.number_attr for i, arg in args if has_dtype[i]),
        attribute=attribute,
        outputs=None if has_lists else tuple(i for i, each in enumerate(outputs) if each),
        is_one=len(outputs) == 1 and not has_lists,
        refuses=refuses,
        is_move=name in op_table.MOVES,
        doubtful_in=frozenset(
            dtype for dtype in LOW_PRECISION if name in TRIED or slow.may_be_slow(name, dtype)
        ),
    )


def _kind_of(name: str) -> str:
    if name in op_table.LOW:
        return "product" if name in op_table.PRODUCTS else "low"
    if name == "Cast":
        return "cast"
    if name in op_table.DRAWS:
        return "draw"
    return "exact" if name in op_table.EXACT else "other"


def _has_kernel(op: str, attribute: str, low: int) -> bool:
    """Whether an operation has a kernel in 16 bits, or has none in float32 either."""
    device = usual_device()
    of_float32 = registered_kernels.has_kernel(op, {attribute: FLOAT32}, device)
    return registered_kernels.has_kernel(op, {attribute: low}, device) or not of_float32


class _Operations(dict[str, Any]):
    """What is known about operations, by their types."""

    def __missing__(self, name: str) -> Operation | None:
        self[name] = Operation(name, "read") if name in op_table.READS else _find(name)
        return self[name]


BY_NAME = _Operations()


def attribute_of(name: str, low: tf.DType) -> str | None:
    """Returns the attribute by which inputs are float32 or 16 bits, or None.

    Args:
        name: str. The operation's type.
        low: DType of 16 bits.
    """
    op_def = operations.definition(name)
    if op_def is None:
        return None
    wanted = {FLOAT32, low.as_datatype_enum}
    allowed = {attr.name: {*attr.allowed_values.list.type} for attr in op_def.attr}
    for arg in op_def.input_arg:
        if arg.type_attr and (not allowed[arg.type_attr] or wanted <= allowed[arg.type_attr]):
            return arg.type_attr
    return None


def taking(name: str, low: tf.DType) -> Operation | None:
    """Returns what is known of any operation that takes float32 and 16 bits, or None.

    Args:
        name: str. The operation's type.
        low: DType of 16 bits.
    """
    op_def, attribute = operations.definition(name), attribute_of(name, low)
    if op_def is None or attribute is None:
        return None
    has_dtype = [arg.type_attr == attribute for arg in op_def.input_arg]
    outputs = [arg.type_attr == attribute for arg in op_def.output_arg]
    return _described(op_def, attribute, has_dtype, outputs, frozenset())


def sums_nothing(values: Sequence[Any], pairs: Sequence[Any]) -> bool:
    """Whether a product of matrices is an outer one, and so multiplications.

    Args:
        values: its inputs that share a dtype.
        pairs: names and values of its attributes in turn.
    """
    attributes = dict(zip(pairs[::2], pairs[1::2]))
    if "equation" in attributes:
        inputs, _, output = tf.compat.as_str(attributes["equation"]).partition("->")
        return set(inputs) - {",", ".", " "} <= set(output)
    is_transposed = attributes.get("transpose_a", attributes.get("adj_x"))
    shape = shape_of(values[0])
    return (
        is_transposed is not None and bool(shape.rank) and shape[-2 if is_transposed else -1] == 1
    )
