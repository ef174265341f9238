"""Notes that a graph makes of its operations while it runs: a row of a variable for each of them.

That is all that a graph needs, so that functions that XLA compiles are watched as others are.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.numerics import operations, watching
from keras_mp.numerics.operation_rows import (
    ONLY_LOOKS,
    PASSED_IN,
    OperationRow,
    append,
    checked_outputs,
    layers_of_scope,
)

# Rows of a variable. Operations that come later are not watched.
CAPACITY = 2**14

# Classes of graphs. The gradient of a loop takes no variables but those of its forward pass.
_LOOP, _GRADIENT_OF_LOOP = "WhileBodyFuncGraph", "_WhileBodyGradFuncGraph"


class GraphRecorder:
    """Watches the operations of graphs.

    Attributes:
        rows: list of OperationRow, of all graphs.
        not_watched: int. How many operations found no row.
    """

    def __init__(self) -> None:
        self.rows: list[OperationRow] = []
        self.not_watched = 0
        # Rows by the tensor that they are about. In a graph tensors live as long as the graph does.
        self._row_of: dict[int, int] = {}
        self._held: list[Any] = []
        # How many bad numbers a row's operation returned, in the graph that it is in.
        self._bad: dict[int, tf.Tensor] = {}
        # Of the operations of a forward pass, the layer and the line, by name; and the layers of
        # the scopes that they are in.
        self._forward: dict[str, tuple[str, str | None]] = {}
        self._layer_of_scope: dict[str, str] = {}
        # By device: each replica has one.
        self._states: dict[str, tf.Tensor] = {}

    @property
    def has_rows(self) -> bool:
        """Whether a graph notes anything."""
        return bool(self._states)

    def take(self) -> Iterator[tuple[str, list[OperationRow], np.ndarray]]:
        """Reads what the graphs have noted on each device, and clears it."""
        for device, handle in self._states.items():
            state = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).numpy()
            _clear(handle)
            yield device, self.rows, state[: len(self.rows)]

    def see(
        self,
        graph: Any,
        kind: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        name: str | None,
    ) -> None:
        """Takes note of an operation that becomes a part of a graph.

        Args:
            graph: of `tf.function`.
            kind: str. The type of the operation.
            inputs: what it takes, as tensors of that graph.
            outputs: what it returns.
            name: str or None. Its name in the graph.
        """
        if _is_inside(graph, _GRADIENT_OF_LOOP):
            return
        checked = checked_outputs(kind, outputs)
        known = [self._row_of[id(value)] for value in inputs if id(value) in self._row_of]
        if kind in operations.SAFE:
            # The result is as good as what goes in.
            if known:
                self._row_of.update((id(value), known[0]) for value in outputs)
                self._held.extend(outputs)
        elif not checked:
            for i in known if kind not in ONLY_LOOKS else ():
                self.rows[i].is_used_elsewhere = True
        elif len(self.rows) + len(inputs) >= CAPACITY:
            self.not_watched += 1
        else:
            stack = ((each.filename, each.lineno) for each in reversed(outputs[0].op.traceback))
            place = operations.place_in(stack)
            if place.is_data or place.is_of_a_tool:
                return
            layer, line = self._origin(kind, layers_of_scope(name or ""), place)
            place = place._replace(line=line)
            given = [v for v in inputs if v.dtype.is_floating and id(v) not in self._row_of]
            for value in given:
                before = []
                source = value.op.inputs[0] if value.op.type == "Cast" else None
                if source is not None and source.op.type in PASSED_IN and source.dtype.is_floating:
                    # Was it the cast that overflowed, or was it not finite before?
                    if id(source) not in self._row_of:
                        self._add(graph, source.op.type, layer, place, [source], [], is_given=True)
                    before = [self._row_of[id(source)]]
                self._add(graph, value.op.type, layer, place, [value], before, is_given=True)
            known = [self._row_of[id(v)] for v in inputs if id(v) in self._row_of]
            self._add(graph, kind, layer, place, checked, known)

    def _origin(self, kind: str, name: str, place: operations.CallSite) -> tuple[str, str | None]:
        """The layer and the line of an operation of a graph; of a gradient, of what it is of."""
        scope = name.rpartition("/")[0]
        if not place.is_gradient:
            layer = watching.running_layer()
            if layer:
                self._layer_of_scope[scope] = layer
            self._forward[name] = layer or scope, place.line
            return self._forward[name]
        # The name scope of a gradient is the name of the operation that it is of.
        found, running = self._forward.get(scope), watching.running_layer()
        if found is None and running:
            # A custom gradient, whose operations have no scope of the forward pass.
            return running, place.line
        # Or the two are next to each other, SqrtGrad and Sqrt.
        beside = f"{scope}/{kind.removesuffix('Grad')}".strip("/")
        found = found or self._forward.get(beside)
        around = scope
        while found is None and around:
            around = around.rpartition("/")[0]
            if around in self._layer_of_scope:
                found = self._layer_of_scope[around], place.line
        return found or (scope, place.line)

    def _add(
        self,
        graph: tf.Graph,
        kind: str,
        layer: str,
        place: operations.CallSite,
        values: Sequence[tf.Tensor],
        known: list[int],
        is_given: bool = False,
    ) -> None:
        """Gives an operation a row, which is written when the graph runs."""
        index = append(self.rows, kind, layer, place, values[0], known, is_given)
        self._row_of.update((id(value), index) for value in values)
        self._held.extend(values)
        # Of the same graph only: they cannot be used in another.
        found = [self._bad[i] for i in set(known) if i in self._bad]
        before = [bad for bad in found if bad.graph is graph]
        self._bad[index] = _note(self._state(values[0].device), index, values, before)

    def _state(self, device: str) -> tf.Tensor:
        """The variable with the rows of a device."""
        if device not in self._states:
            with tf.init_scope(), tf.device(device or None):
                # Not a `tf.Variable`, which a strategy would make one for all replicas of.
                handle = tf.raw_ops.VarHandleOp(
                    dtype=tf.float32, shape=[CAPACITY, 4], shared_name=f"keras_mp_{next(_names)}"
                )
                _clear(handle)
            self._states[device] = handle
        return self._states[device]


_names = itertools.count()


def _note(
    state: tf.Tensor, index: int, values: Sequence[tf.Tensor], before: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Writes into the row what an operation of the graph returned.

    Args:
        state: the variable.
        index: of the row.
        values: what was returned.
        before: how many of the numbers that went in were bad.

    Returns:
        How many bad numbers there are.
    """
    bad, low, high = [], [], []
    for value in values:
        finite = tf.math.is_finite(value)
        numbers = tf.cast(value, tf.float32)
        bad.append(tf.reduce_sum(tf.cast(tf.logical_not(finite), tf.float32)))
        low.append(tf.reduce_min(tf.where(finite, numbers, math.inf)))
        high.append(tf.reduce_max(tf.where(finite, numbers, -math.inf)))
    if len(values) > 1:
        bad, low, high = [tf.add_n(bad)], [tf.reduce_min(low)], [tf.reduce_max(high)]
    begins_here = bad[0] > 0
    if before:
        begins_here = tf.logical_and(begins_here, tf.equal(tf.add_n(before), 0))
    row = tf.stack([bad[0], low[0], high[0], tf.cast(begins_here, tf.float32)])
    if _is_inside(bad[0].graph, _LOOP):
        # What comes round again is bad in the next iteration already. And a step that is bad may be
        # followed by one that is not: what it led to is to be known, and not only where it began.
        old = tf.raw_ops.ResourceGather(resource=state, indices=index, dtype=tf.float32)
        row = tf.where(tf.logical_and(old[0] > 0, old[3] >= row[3]), old, row)
    tf.raw_ops.ResourceScatterUpdate(resource=state, indices=index, updates=row)
    return bad[0]


def _is_inside(graph: tf.Graph, kind: str) -> bool:
    """Whether it is a graph of that class, or inside of one."""
    while isinstance(graph, tf.__internal__.FuncGraph):
        if any(cls.__name__ == kind for cls in type(graph).__mro__):
            return True
        graph = graph.outer_graph
    return False


def _clear(handle: tf.Tensor) -> None:
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([CAPACITY, 4]))
