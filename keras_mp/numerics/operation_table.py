"""A table of the operations that run in eager or become a part of a graph, with their numbers.

It is for `first_bad`. Each operation has a row: what it is, where it comes from and what uses its
result. What it returned is kept beside the table: `EagerRecorder` measures it at once,
`GraphRecorder` in the graph while it runs, in a row of a variable for each. That is all that a
graph needs, so that functions that XLA compiles are watched as others are.
"""

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.numerics import origins, own_thread
from keras_mp.numerics.origins import GraphOrigins, Origin
from keras_mp.support import function_graphs, kept_casts, op_table

# How many operations run in eager before the rows are read.
_EAGER_ROWS = 2**12

# Rows of a variable. Operations of graphs that come later are not watched.
CAPACITY = 2**14

# Operations that test numbers, and do not compute with them.
_ONLY_LOOKS = op_table.ops("comparisons", "tests", "shapes")

# Results that are not finite where nothing is wrong: what the kernel keeps for the backward pass,
# and what has no value yet.
_NOT_CHECKED = op_table.ops("empty tensors", "variables")
_FIRST_OUTPUT_ONLY = ("FusedBatchNorm",)

# Classes of graphs. The gradient of a loop takes no variables but those of its forward pass.
_LOOP, _GRADIENT_OF_LOOP = "WhileBodyFuncGraph", "_WhileBodyGradFuncGraph"


@dataclasses.dataclass
class Range:
    """An operation, and the range of the numbers that it returned.

    Attributes:
        operation: str. Its type, "MatMul" say.
        layer: str. The path of its layer, such as "encoder/dense", if the model was passed; the
            name of the model for what it computes between its layers; else the name scopes.
        line: str or None. The line that it comes from, such as "model.py:12".
        dtype: str. The dtype of the numbers.
        is_gradient: bool. Whether it is a part of a gradient.
        low: float. The smallest finite number; Inf if there is none.
        high: float. The largest finite number; -Inf if there is none.
        bad: int. How many numbers are Inf or NaN.
        inputs: the rows of the operations whose results it takes.
        is_given: whether its result was there before: an argument, a weight, a constant.
        is_used: whether an operation with a row uses its result, or it is given to a function,
            which has rows of its own.
        is_used_elsewhere: whether an operation without a row uses its result.
    """

    operation: str
    layer: str
    line: str | None
    dtype: str
    is_gradient: bool
    low: float = math.inf
    high: float = -math.inf
    bad: int = 0
    inputs: list[int] = dataclasses.field(default_factory=list)
    is_given: bool = False
    is_used: bool = False
    is_used_elsewhere: bool = False

    @property
    def size(self) -> float:
        """The largest magnitude of a finite number; 0 if there is none."""
        return max(-self.low, self.high, 0.0) if self.low <= self.high else 0.0

    def __str__(self) -> str:
        where = f" in {self.layer}" if self.layer else ""
        line = f", {self.line}" if self.line else ""
        bad = f", {self.bad:,} not finite" if self.bad else ""
        numbers = f"{self.low:.3g} to {self.high:.3g}" if self.low <= self.high else "none finite"
        return f"{self.operation}{where} ({self.dtype}{line}): {numbers}{bad}"


# A device, its operations, and an array of what was measured of each: how many values were not
# finite, the smallest and the largest finite one, and whether something began to be so here.
Read = tuple[str, list[Range], np.ndarray]

_Tensors = Sequence[tf.Tensor]


class ByTensor:
    """What is known of tensors, for as long as each of them is there."""

    def __init__(self) -> None:
        self._tensors: weakref.WeakValueDictionary[int, tf.Tensor] = weakref.WeakValueDictionary()
        self._known: dict[int, Any] = {}

    def note(self, tensors: Iterable[tf.Tensor], what: object) -> None:
        """Notes something about tensors."""
        for each in tensors:
            self._tensors[id(each)], self._known[id(each)] = each, what

    def of(self, tensors: Iterable[tf.Tensor]) -> list[Any]:
        """Returns what was noted about those of which something was."""
        return [self._known[id(each)] for each in tensors if id(each) in self._tensors]


class OperationTable:
    """Operations, in the order in which they ran or became part of a graph.

    Attributes:
        rows: list of Range, without the numbers.
        row_of: ByTensor, the number of the row that a tensor is the result of.
    """

    def __init__(self) -> None:
        self.rows: list[Range] = []
        self.row_of = ByTensor()

    def outputs_to_check(self, kind: str, inputs: _Tensors, outputs: _Tensors) -> _Tensors:
        """Returns those results of an operation that should be finite; if there are any, add it.

        Args:
            kind: the type of the operation.
            inputs: what it takes.
            outputs: what it returns.
        """
        known = self.row_of.of(inputs)
        if origins.is_safe(kind, outputs):
            # The result is as good as what goes in.
            if known:
                self.row_of.note(outputs, known[0])
            return []
        checked = [each for each in outputs if each.dtype.is_floating and kind not in _NOT_CHECKED]
        if not checked and kind not in _ONLY_LOOKS:
            for i in known:
                self.rows[i].is_used_elsewhere = True
        return checked[: 1 if kind.startswith(_FIRST_OUTPUT_ONLY) else None]

    def use(self, rows: Iterable[int]) -> None:
        """Notes that the results of operations are used."""
        for i in rows:
            self.rows[i].is_used = True

    def add(
        self, kind: str, origin: Origin, values: _Tensors, inputs: list[int], is_given: bool = False
    ) -> int:
        """Adds an operation.

        Args:
            kind: its type.
            origin: where it comes from.
            values: tensors that it returned.
            inputs: the rows of what went in.
            is_given: as in `Range`.

        Returns:
            The number of the row.
        """
        # What is made of gradients, such as their sum over replicas, overflows as they do.
        is_gradient = origin.is_gradient or any(self.rows[i].is_gradient for i in inputs)
        dtype, line = values[0].dtype.name, origin.line and origin.line.short
        self.use(inputs)
        self.row_of.note(values, len(self.rows))
        row = Range(kind, origin.layer, line, dtype, is_gradient, inputs=inputs, is_given=is_given)
        self.rows.append(row)
        return len(self.rows) - 1


class EagerRecorder(OperationTable):
    """Watches the operations that run in eager.

    Attributes:
        measured: list of what each row's operation returned, as `Read` has it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.measured: list[tuple[float, ...]] = []

    def read(self) -> Iterator[Read]:
        """Yields what was measured since the last time."""
        if self.rows:
            yield "", self.rows, np.array(self.measured)
            self.rows, self.measured, self.row_of = [], [], ByTensor()

    def record(self, kind: str, inputs: _Tensors, outputs: _Tensors) -> None:
        """Records an operation that has run."""
        checked = self.outputs_to_check(kind, inputs, outputs)
        if not checked:
            return
        known = self.row_of.of(inputs)
        self.add(kind, origins.running(), checked, known)
        numbers = np.concatenate([value.numpy().ravel() for value in checked]).astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        bad = numbers.size - finite.size
        begins_here = bad > 0 and not any(self.measured[i][0] for i in known)
        row = bad, finite.min(initial=math.inf), finite.max(initial=-math.inf), begins_here
        self.measured.append(row)

    def is_full(self) -> bool:
        """Whether to read the rows, but not before what is not finite may have been used."""
        return len(self.rows) >= _EAGER_ROWS and not self.measured[-1][0]


class GraphRecorder(OperationTable):
    """Watches the operations of graphs. Its table grows for as long as it is used.

    Attributes:
        not_watched: int. How many operations found no row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.not_watched = 0
        # How many numbers that are not finite a row's operation returned, as a tensor of its graph.
        self._bad: dict[int, tf.Tensor] = {}
        self._origins = GraphOrigins()
        # By device: each replica has one.
        self._states: dict[str, tf.Tensor] = {}

    def read(self) -> Iterator[Read]:
        """Yields what the graphs have measured on each device since the last time."""
        for device, handle in self._states.items():
            state = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).numpy()
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([CAPACITY, 4]))
            yield device, self.rows, state[: len(self.rows)]

    def record(self, graph: tf.Graph, kind: str, inputs: _Tensors, outputs: _Tensors) -> None:
        """Records an operation that becomes a part of a graph.

        Args:
            graph: that of a `tf.function`.
            kind: the type of the operation.
            inputs: what it takes, as tensors of that graph.
            outputs: what it returns.
        """
        if _is_inside(graph, _GRADIENT_OF_LOOP):
            return
        checked = self.outputs_to_check(kind, inputs, outputs)
        if not checked:
            return
        # What it takes may get a row, and so may what that was cast from.
        if len(self.rows) + 2 * len(inputs) >= CAPACITY:
            self.not_watched += 1
            return
        origin = self._origins.of(outputs[0].op)
        if origin.is_data:
            return
        for value in inputs:
            self._give(origin, value)
        self._measure(origin, checked, self.row_of.of(inputs))

    def _give(self, origin: Origin, value: tf.Tensor) -> None:
        """Gives what an operation takes, and was there before, a row, unless it has one."""
        if not value.dtype.is_floating or self.row_of.of([value]):
            return
        sources = list(value.op.inputs) if value.op.type in ("Cast", "Identity") else []
        for source in sources:
            self._give(origin, source)
        before = self.row_of.of(sources)
        if before and value.dtype.size >= sources[0].dtype.size:
            self.row_of.note([value], before[0])
        else:
            # A cast to fewer bits may overflow, where what it takes was finite.
            self._measure(origin, [value], before, is_given=True)

    def _measure(
        self, origin: Origin, values: _Tensors, inputs: list[int], is_given: bool = False
    ) -> None:
        """Gives an operation a row, which is measured when the graph runs."""
        graph, device = values[0].graph, values[0].device
        index = self.add(values[0].op.type, origin, values, inputs, is_given)
        # Tensors of another graph cannot be used.
        found = [self._bad[i] for i in set(inputs) if i in self._bad]
        before = tf.add_n([bad for bad in found if bad.graph is graph] or [tf.constant(0.0)])
        measured = _measuring(tuple(value.dtype for value in values), _is_inside(graph, _LOOP))
        if device not in self._states:
            with tf.init_scope(), tf.device(device or None):
                self._states[device] = own_thread.variable(tf.zeros([CAPACITY, 4]))
        state = _captured(graph, self._states[device])
        self._bad[index] = measured(state, index, before, *values)


@functools.cache
def _measuring(dtypes: tuple[tf.DType, ...], is_in_loop: bool) -> Callable[..., tf.Tensor]:
    """Returns a function that writes what an operation returned into its row of the variable.

    It is traced once: to call it adds one operation to a graph, and not twenty.

    Args:
        dtypes: of the tensors that the operation returned.
        is_in_loop: whether the operation may run several times before the row is read.

    Returns:
        A function of the handle of the variable, the number of the row, how many numbers of the
        inputs are not finite, and the tensors. It returns how many of theirs are not.
    """
    any_shape: Any = None
    signature = [tf.TensorSpec([], dtype) for dtype in (tf.resource, tf.int32, tf.float32)]
    signature += [tf.TensorSpec(any_shape, dtype) for dtype in dtypes]

    @tf.function(input_signature=signature, autograph=False)
    def measured(state: Any, index: Any, before: Any, *values: tf.Tensor) -> tf.Tensor:
        finite = _joined(map(kept_casts.is_finite, values))
        numbers = _joined(map(kept_casts.as_float32, values))
        count = tf.reduce_sum(tf.cast(tf.logical_not(finite), tf.float32))
        low = tf.reduce_min(tf.where(finite, numbers, math.inf))
        high = tf.reduce_max(tf.where(finite, numbers, -math.inf))
        begins_here = tf.logical_and(count > 0, tf.equal(before, 0))
        row = tf.stack([count, low, high, tf.cast(begins_here, tf.float32)])
        if is_in_loop:
            # In later iterations, what an iteration has computed is not finite from the start: the
            # row keeps where it began. And if several steps are made in a loop, a later one may be
            # finite.
            old = tf.raw_ops.ResourceGather(resource=state, indices=index, dtype=tf.float32)
            row = tf.where(tf.logical_and(old[0] > 0, old[3] >= row[3]), old, row)
        tf.raw_ops.ResourceScatterUpdate(resource=state, indices=index, updates=row)
        return count

    with tf.init_scope():
        return measured.get_concrete_function()


def _joined(values: Iterable[tf.Tensor]) -> tf.Tensor:
    """Returns one vector. Where the rank is known, to reduce it takes fewer operations."""
    return tf.concat([tf.reshape(value, [-1]) for value in values], 0)


def _is_inside(graph: tf.Graph, kind: str) -> bool:
    """Whether a graph is of that class, or inside of one that is."""
    while function_graphs.is_of_function(graph):
        if any(cls.__name__ == kind for cls in type(graph).__mro__):
            return True
        graph = graph.outer_graph
    return False


def _captured(graph: Any, handle: tf.Tensor) -> tf.Tensor:
    """Returns the handle of a variable in a graph.

    The gradient of a branch takes tensors from the graph around it, and none of eager code.
    """
    if not function_graphs.is_of_function(graph):
        return handle
    return graph.capture(_captured(graph.outer_graph, handle))
