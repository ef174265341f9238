"""Measures the results of a graph's operations while it runs, in a row of a variable for each.

That is all that a graph needs, so that functions that XLA compiles are watched as others are.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.numerics import own_thread
from keras_mp.numerics.operation_rows import PASSED_IN, READS, OperationTable, Read
from keras_mp.numerics.origins import GraphOrigins, Origin
from keras_mp.support import function_graphs, kept_casts
from keras_mp.support.dtypes import LOW_PRECISION

# Rows of a variable. Operations that come later are not watched.
CAPACITY = 2**14

# Classes of graphs. The gradient of a loop takes no variables but those of its forward pass.
_LOOP, _GRADIENT_OF_LOOP = "WhileBodyFuncGraph", "_WhileBodyGradFuncGraph"


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
            _clear(handle)
            yield device, self.rows, state[: len(self.rows)]

    def record(
        self,
        graph: tf.Graph,
        kind: str,
        inputs: Sequence[tf.Tensor],
        outputs: Sequence[tf.Tensor],
        name: str | None,
    ) -> None:
        """Records an operation that becomes a part of a graph.

        Args:
            graph: that of a `tf.function`.
            kind: the type of the operation.
            inputs: what it takes, as tensors of that graph.
            outputs: what it returns.
            name: its name in the graph, if it has one.
        """
        if _is_inside(graph, _GRADIENT_OF_LOOP):
            return
        checked = self.outputs_to_check(kind, inputs, outputs)
        if not checked:
            return
        if len(self.rows) + len(inputs) >= CAPACITY:
            self.not_watched += 1
            return
        origin = self._origins.of(outputs[0].op, name or "")
        if origin.is_data or origin.is_of_a_tool:
            return
        for value in inputs:
            if not value.dtype.is_floating or self.row_of.of([value]):
                continue
            taken = value
            if value.op.type == "Cast" and value.op.inputs[0].dtype in LOW_PRECISION:
                value = value.op.inputs[0]  # The door widens what the program has.
                if found := self.row_of.of([value]):
                    self.row_of.note([taken], found[0])
                    continue
            before = []
            source = value.op.inputs[0] if value.op.type == "Cast" else None
            while source is not None and source.op.type == "Identity":
                source = source.op.inputs[0]
            was_there = source is not None and source.op.type in PASSED_IN | READS
            if source is not None and was_there and source.dtype.is_floating:
                # Was it the cast that overflowed, or was it not finite before?
                if not self.row_of.of([source]):
                    self._measure(graph, source.op.type, origin, [source], [], is_given=True)
                before = self.row_of.of([source])
            self._measure(graph, value.op.type, origin, [value], before, is_given=True)
            self.row_of.note([taken], self.row_of.of([value])[0])
        self._measure(graph, kind, origin, checked, self.row_of.of(inputs))

    def _measure(
        self,
        graph: tf.Graph,
        kind: str,
        origin: Origin,
        values: Sequence[tf.Tensor],
        inputs: list[int],
        is_given: bool = False,
    ) -> None:
        """Gives an operation a row, which is measured when the graph runs."""
        index = self.add(kind, origin, values, inputs, is_given)
        # Tensors of another graph cannot be used.
        found = [self._bad[i] for i in set(inputs) if i in self._bad]
        before = [bad for bad in found if bad.graph is graph]
        dtypes = tuple(value.dtype for value in values)
        measured = _measuring(dtypes, len(before), _is_inside(graph, _LOOP))
        self._bad[index] = measured(self._state(values[0].device), index, *values, *before)

    def _state(self, device: str) -> tf.Tensor:
        """Returns the handle of the variable with the rows of a device."""
        if device not in self._states:
            with tf.init_scope(), tf.device(device or None):
                handle = own_thread.variable(tf.float32, [CAPACITY, 4])
                _clear(handle)
            self._states[device] = handle
        return self._states[device]


@functools.cache
def _measuring(dtypes: tuple[tf.DType, ...], inputs: int, is_in_loop: bool) -> Callable[..., Any]:
    """Returns a function that writes what an operation returned into its row of the variable.

    It is traced once: to call it adds one operation to a graph, and not twenty.

    Args:
        dtypes: of the tensors that the operation returned.
        inputs: of how many tensors that go in it is known how many numbers are not finite.
        is_in_loop: whether the operation may run several times before the row is read.

    Returns:
        A function of the handle of the variable, the number of the row, the tensors, and for each
        input that number. It returns how many numbers are not finite.
    """
    any_shape: Any = None
    values = [tf.TensorSpec(any_shape, dtype) for dtype in dtypes]
    counts = [tf.TensorSpec([], tf.float32)] * inputs
    signature = [tf.TensorSpec([], tf.resource), tf.TensorSpec([], tf.int32), *values, *counts]

    @tf.function(input_signature=signature, autograph=False)
    def measured(state: tf.Tensor, index: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
        values, before = tensors[: len(dtypes)], tensors[len(dtypes) :]
        finite = _joined(map(kept_casts.is_finite, values))
        numbers = _joined(map(kept_casts.as_float32, values))
        count = tf.reduce_sum(tf.cast(tf.logical_not(finite), tf.float32))
        begins_here = count > 0
        if before:
            begins_here = tf.logical_and(begins_here, tf.equal(tf.add_n(before), 0))
        low = tf.reduce_min(tf.where(finite, numbers, math.inf))
        high = tf.reduce_max(tf.where(finite, numbers, -math.inf))
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


def _clear(handle: tf.Tensor) -> None:
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([CAPACITY, 4]))
