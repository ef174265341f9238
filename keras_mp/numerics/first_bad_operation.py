"""The first operation whose result is not finite: which one, in which layer, on which line.

While it is looked for, TensorFlow calls back for each operation that runs in eager or becomes a
part of a graph. In a graph each operation then gets a row in a variable, where it notes the range
of what it returned. That is all that a graph needs, so that functions that XLA compiles are watched
as others are. When such a function returns to eager, the rows are read, and it is decided whether
what they show is worth stopping for.
"""

import dataclasses
import itertools
import math
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.loss_scale import DynamicLossScale
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.numerics import operations, running_layers
from keras_mp.support import messages, op_table

# Rows of a variable. Operations that come later are not watched.
_CAPACITY = 2**14

# After so many operations in eager it is looked at them.
_EAGER_ROWS = 2**12

# Of the layers before the first bad operation, how many a message shows.
_HISTORY = 12

# What makes something else of numbers that are not finite: it looks, it does not use them.
_ONLY_LOOKS = op_table.ops("comparisons", "tests", "shapes")

# Classes of graphs. The gradient of a loop takes no variables but those of its forward pass.
_LOOP, _GRADIENT_OF_LOOP = "WhileBodyFuncGraph", "_WhileBodyGradFuncGraph"

# What brings arguments into a graph.
_PASSED_IN = op_table.ops("arguments", "data")

# Results that are not finite where nothing is wrong: what the kernel keeps for the backward pass,
# and what has no value yet.
_NOT_LOOKED_AT = op_table.ops("empty tensors", "variables")
_FIRST_OUTPUT_ONLY = ("FusedBatchNorm",)


@dataclasses.dataclass(frozen=True)
class Range:
    """What an operation returned.

    Attributes:
        operation: str. Its type, "MatMul" say.
        layer: str. The path of its layer, such as "encoder/dense", if the model was passed; of what
            a model computes between its layers, the name of the model; else the name scopes.
        line: str or None. The line it comes from, as "model.py:12".
        dtype: str.
        low: float. The smallest finite number; Inf if there is none.
        high: float. The largest finite number; -Inf if there is none.
        bad: int. How many numbers are Inf or NaN.
        is_gradient: bool. Is it a part of a gradient?
    """

    operation: str
    layer: str
    line: str | None
    dtype: str
    low: float
    high: float
    bad: int
    is_gradient: bool

    def __str__(self) -> str:
        where = f" in {self.layer}" if self.layer else ""
        line = f", {self.line}" if self.line else ""
        bad = f", {self.bad:,} not finite" if self.bad else ""
        numbers = f"{self.low:.3g} to {self.high:.3g}" if self.low <= self.high else "none finite"
        return f"{self.operation}{where} ({self.dtype}{line}): {numbers}{bad}"


class NotFiniteError(ArithmeticError):
    """The first operation whose result is not finite.

    Attributes:
        operation: Range of the operation.
        inputs: list of Range, of what went into it.
        history: list of Range, of each layer before it that which reached furthest; oldest first.
        device: str. On which device it was, where there are several; that tells replicas apart.

    Example:

    >>> step = tf.function(lambda x: tf.sqrt(x - 1))
    >>> try:
    ...     with keras_mp.numerics.FirstBadOperation():
    ...         step(tf.constant(0.0))
    ... except keras_mp.numerics.NotFiniteError as error:
    ...     print(error.operation.operation, error.inputs[0].low)
    Sqrt -1.0
    """

    def __init__(
        self,
        operation: Range,
        inputs: Sequence[Range],
        history: Sequence[Range],
        device: str,
        advice: str,
    ) -> None:
        self.operation, self.inputs, self.history = operation, list(inputs), list(history)
        self.device = device
        way = "backward" if operation.is_gradient else "forward"
        lines = [
            f"The first operation whose result is not finite, in the {way} pass"
            f"{f' on {device}' if device else ''}:",
            f"  {operation}",
        ]
        if self.inputs:
            lines += ["Its inputs, from their smallest to their largest number:"]
            lines += [f"  {each}" for each in self.inputs]
        if self.history:
            lines += ["The layers before it, the last one last:"]
            lines += [f"  {each}" for each in self.history]
        super().__init__("\n".join([*lines, advice] if advice else lines))


@dataclasses.dataclass
class _Row:
    """What is known of an operation while it is not run."""

    operation: str
    layer: str
    line: str | None
    dtype: str
    is_gradient: bool
    inputs: list[int]
    # Was it there before: an argument, a weight, a constant?
    is_given: bool = False
    # Of those who use its result, the rows; and does anybody use it who has no row?
    users: list[int] = dataclasses.field(default_factory=list)
    is_used_elsewhere: bool = False
    # Is it given to a function, which sees for itself what comes of it?
    is_passed_on: bool = False

    def seen(self, values: Sequence[float]) -> Range:
        bad, low, high, _ = values
        return Range(
            self.operation,
            self.layer,
            self.line,
            self.dtype,
            float(low),
            float(high),
            int(bad),
            self.is_gradient,
        )


class FirstBadOperation:
    """Stops at the first operation whose result is Inf or NaN, and says what led to it.

    A context manager, around `fit` or a training loop of your own. Where
    `tf.debugging.enable_check_numerics` stops at anything that is not finite, this one goes on

    - where gradients overflow and a dynamic loss scale is going to fall for it. Pass the model, the
      optimizer or the `GradScaler`, so that it is known. At the smallest loss scale it stops;
    - where what is not finite goes nowhere: the -inf of a mask that a softmax makes zeros of, or a
      logarithm of zero that `tf.where` does not take.

    It stops when the function that was called from eager code has returned, at the end of a batch
    of `fit` for example, and raises a `NotFiniteError`. In eager code it stops where the block
    ends, where `check` is called, or else after some thousand operations.

    Functions are watched that are traced inside of the block; those of the model are traced anew,
    and once more after it. Other functions keep their checks: make them anew when you have
    found what you looked for. Outside of the block nothing is changed, and nothing costs time.
    Inside, each operation takes several times as long. Replicas are watched one by one.

    Functions with `jit_compile=True` are watched too: the checks are compiled with them. XLA then
    has to keep each result, which it would otherwise have fused with the next, and which it may
    have kept in float32 meanwhile. So an overflow inside of what it would have fused may be found
    that does not happen without the checks.

    Args:
        *scaled: models, optimizers or `GradScaler`s whose loss scale may have to fall.

    Attributes:
        planned: int. How many steps had gradients that overflowed as the loss scale expects; of
            several steps per execution, how many executions.

    Raises:
        NotFiniteError: see above.
        TypeError: something else was passed.
        RuntimeError: the block is inside of another one.

    Example:

    >>> @tf.function
    ... def step(x):
    ...     masked = tf.where(x > 0, tf.math.log(x), 0.0)
    ...     return tf.reduce_sum(tf.exp(masked * 100))
    >>> try:
    ...     with keras_mp.numerics.FirstBadOperation():
    ...         print(step(tf.constant([0.0, 1.0])).numpy())
    ...         step(tf.constant([0.0, 3.0]))
    ... except keras_mp.numerics.NotFiniteError as error:
    ...     print(error.operation.operation, error.inputs[0].operation, error.inputs[0].high > 100)
    2.0
    Exp Mul True
    """

    def __init__(self, *scaled: Any) -> None:
        for each in scaled:
            optimizer = getattr(each, "optimizer", each)
            is_one = hasattr(optimizer, "apply_gradients") or hasattr(each, "loss_scale")
            if not (is_one or isinstance(each, tf.keras.Model)):
                raise TypeError(
                    "Expected models, optimizers or `GradScaler`s, whose loss scale may fall. "
                    f"Received: {each!r} (of type {type(each)})"
                )
        self.planned = 0
        self._has_seen_any = False
        self._not_watched = 0
        self._models = [each for each in scaled if isinstance(each, tf.keras.Model)]
        self._naming: Any = None
        self._scaled = scaled
        self._scales: list[tuple[Any, float]] = []
        self._rows: list[_Row] = []
        # Rows by the tensor that they are about. In a graph tensors live as long as the graph does.
        self._row_of: dict[int, int] = {}
        self._held: list[Any] = []
        self._eager = _Eager()
        # How many bad numbers a row's operation returned, in the graph that it is in.
        self._bad: dict[int, tf.Tensor] = {}
        # Of the operations of a forward pass, the layer and the line, by name; and the layers of
        # the scopes that they are in.
        self._forward: dict[str, tuple[str, str | None]] = {}
        self._layer_of_scope: dict[str, str] = {}
        # By device: each replica has one.
        self._states: dict[str, tf.Tensor] = {}
        self._lock = threading.RLock()
        self._mine = _Mine()
        self._observing: Any = None

    def __enter__(self) -> "FirstBadOperation":
        if _blocks.is_in_one:
            raise RuntimeError(
                "Expected one block of a FirstBadOperation at a time: what one looks with, another "
                "would look at. Pass all models and optimizers to one of them."
            )
        self._scales = [(scale, float(scale())) for scale in _dynamic_scales(self._scaled)]
        self._forget_traces()
        self._naming = running_layers.named(self._models)
        self._naming.__enter__()
        self._observing = operations.observed(self._see)
        self._observing.__enter__()
        _blocks.is_in_one = True
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        _blocks.is_in_one = False
        self._observing.__exit__(None, None, None)
        self._naming.__exit__(None, None, None)
        self._forget_traces()
        if kind is None:
            self.check()
            if not self._has_seen_any:
                messages.warn(
                    "FirstBadOperation has seen no operation. Functions are watched that are "
                    "traced inside of its block: make the tf.function, or trace it, in there."
                )
            if self._not_watched:
                messages.warn(
                    f"FirstBadOperation watches {_CAPACITY:,} operations of functions, and has "
                    f"found nothing in them. {self._not_watched:,} that were traced later were not "
                    "watched: use it around a part of the program, or a smaller model."
                )

    def check(self) -> None:
        """Looks at what has run since the last time. Functions do so when they return.

        Raises:
            NotFiniteError: as the class says.
        """
        self._mine.is_looking = True
        try:
            self._look()
        finally:
            self._mine.is_looking = False

    def _look(self) -> None:
        scales = self._scales
        self._scales = [(scale, float(scale())) for scale, _ in scales]
        may_fall = any(before > scale.min_loss_scale for scale, before in scales)
        taken = [
            (_first(rows, values), (device, rows, values)) for device, rows, values in self._take()
        ]
        found = [(first, rest) for first, rest in taken if first is not None]
        if not found:
            return
        # What replicas have in common comes after what each of them has done.
        first, (device, rows, values) = min(found, key=lambda each: each[0])
        if rows[first].is_gradient and may_fall:
            self.planned += 1
            return
        raise self._error(device, rows, values, first)

    def _take(self) -> Iterable[tuple[str, list[_Row], np.ndarray]]:
        with self._lock:
            taken = []
            for device, handle in self._states.items():
                state = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).numpy()
                _clear(handle)
                taken.append((device, self._rows, state[: len(self._rows)]))
            if self._eager.rows:
                taken.append(("", *self._eager.take()))
            return taken

    def _error(
        self, device: str, rows: list[_Row], values: np.ndarray, first: int
    ) -> NotFiniteError:
        row = rows[first]
        inputs = [rows[i].seen(values[i]) for i in row.inputs]
        layers: dict[str, Range] = {}
        for i in range(first):
            seen = rows[i].seen(values[i])
            has_not_run = not (seen.low or seen.high)
            if seen.layer == row.layer or has_not_run or seen.bad or rows[i].is_given:
                continue
            before = layers.pop(seen.layer, seen)
            layers[seen.layer] = max(before, seen, key=lambda each: max(-each.low, each.high))
        advice = ""
        if row.operation in _PASSED_IN:
            advice = "It was not finite already when it was passed in."
        elif row.is_gradient and not self._scales:
            advice = (
                "If a dynamic loss scale is to fall for it, pass the model or the optimizer to "
                "FirstBadOperation, which then goes on."
            )
        history = list(layers.values())[-_HISTORY:]
        return NotFiniteError(row.seen(values[first]), inputs, history, device, advice)

    def _forget_traces(self) -> None:
        for model in self._models:
            model.train_function = model.test_function = model.predict_function = None

    def _see(
        self,
        kind: Any,
        inputs: Sequence[Any],
        attrs: Any,
        outputs: Sequence[Any],
        op_name: str | None = None,
        graph: Any = None,
    ) -> None:
        """What TensorFlow calls back."""
        del attrs
        if self._mine.is_looking:
            return
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if isinstance(graph, tf.__internal__.FuncGraph):
            self._has_seen_any = True
            with self._lock:
                self._see_in_graph(graph, kind, inputs, outputs, op_name)
        elif graph is None and kind.startswith(("__inference_", "__forward_", "__backward_")):
            self._eager.pass_on(inputs)
            if self._states:
                self.check()
        elif graph is None:
            self._has_seen_any = True
            with self._lock:
                if self._eager.is_full():
                    self.check()
                self._eager.see(kind, inputs, outputs)

    def _see_in_graph(
        self,
        graph: Any,
        kind: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        name: str | None,
    ) -> None:
        if _is_inside(graph, _GRADIENT_OF_LOOP):
            return
        looked_at = _looked_at(kind, outputs)
        known = [self._row_of[id(value)] for value in inputs if id(value) in self._row_of]
        if kind in operations.SAFE:
            # The result is as good as what goes in.
            if known:
                self._row_of.update((id(value), known[0]) for value in outputs)
                self._held.extend(outputs)
        elif not looked_at:
            for i in known if kind not in _ONLY_LOOKS else ():
                self._rows[i].is_used_elsewhere = True
        elif len(self._rows) + len(inputs) >= _CAPACITY:
            self._not_watched += 1
        else:
            stack = ((each.filename, each.lineno) for each in reversed(outputs[0].op.traceback))
            place = operations.place_in(stack)
            if place.is_data or place.is_of_a_tool:
                return
            layer, line = self._origin(kind, _tidy(name or ""), place)
            place = place._replace(line=line)
            given = [v for v in inputs if v.dtype.is_floating and id(v) not in self._row_of]
            for value in given:
                before = []
                source = value.op.inputs[0] if value.op.type == "Cast" else None
                if source is not None and source.op.type in _PASSED_IN and source.dtype.is_floating:
                    # Was it the cast that overflowed, or was it not finite before?
                    if id(source) not in self._row_of:
                        self._add(graph, source.op.type, layer, place, [source], [], is_given=True)
                    before = [self._row_of[id(source)]]
                self._add(graph, value.op.type, layer, place, [value], before, is_given=True)
            known = [self._row_of[id(v)] for v in inputs if id(v) in self._row_of]
            self._add(graph, kind, layer, place, looked_at, known)

    def _origin(self, kind: str, name: str, place: operations.Place) -> tuple[str, str | None]:
        """The layer and the line of an operation of a graph; of a gradient, of what it is of."""
        scope = name.rpartition("/")[0]
        if not place.is_gradient:
            layer = running_layers.running_layer()
            if layer:
                self._layer_of_scope[scope] = layer
            self._forward[name] = layer or scope, place.line
            return self._forward[name]
        # The name scope of a gradient is the name of the operation that it is of, or the two are
        # next to each other, SqrtGrad and Sqrt.
        beside = f"{scope}/{kind.removesuffix('Grad')}".strip("/")
        found = self._forward.get(scope) or self._forward.get(beside)
        around = scope
        while found is None and around:
            around = around.rpartition("/")[0]
            if around in self._layer_of_scope:
                found = self._layer_of_scope[around], place.line
        return found or (scope, place.line)

    def _add(
        self,
        graph: Any,
        kind: str,
        layer: str,
        place: operations.Place,
        values: Sequence[tf.Tensor],
        known: list[int],
        is_given: bool = False,
    ) -> None:
        """Gives an operation of a graph a row, and has it written when the graph runs."""
        index = _append(self._rows, kind, layer, place, values[0], known, is_given)
        self._row_of.update((id(value), index) for value in values)
        self._held.extend(values)
        # Of the same graph only: nobody else can use them.
        found = [self._bad[i] for i in set(known) if i in self._bad]
        before = [bad for bad in found if bad.graph is graph]
        self._bad[index] = _note(self._state(values[0].device), index, values, before)

    def _state(self, device: str) -> tf.Tensor:
        """The variable with the rows of a device."""
        if device not in self._states:
            with tf.init_scope(), tf.device(device or None):
                # Not a `tf.Variable`, which a strategy would make one for all replicas of.
                handle = tf.raw_ops.VarHandleOp(
                    dtype=tf.float32, shape=[_CAPACITY, 4], shared_name=f"keras_mp_{next(_names)}"
                )
                _clear(handle)
            self._states[device] = handle
        return self._states[device]


_names = itertools.count()


class _Blocks(threading.local):
    """Is a thread in a block?"""

    is_in_one = False


_blocks = _Blocks()


class _Mine(threading.local):
    """What a thread is doing."""

    is_looking = False


class _Eager:
    """What runs in eager."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self._values: list[tuple[float, ...]] = []
        self._row_of: dict[int, int] = {}
        self._held: list[Any] = []

    def see(self, kind: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        known = [self._row_of[id(value)] for value in inputs if id(value) in self._row_of]
        looked_at = _looked_at(kind, outputs)
        if kind in operations.SAFE:
            if known:
                self._row_of.update((id(value), known[0]) for value in outputs)
                self._held.extend(outputs)
            return
        if not looked_at:
            for i in known if kind not in _ONLY_LOOKS else ():
                self.rows[i].is_used_elsewhere = True
            return
        place = operations.place()
        if place.is_of_a_tool:
            return
        layer = running_layers.running_layer() or _tidy(tf.get_current_name_scope())
        index = _append(self.rows, kind, layer, place, looked_at[0], known)
        self._row_of.update((id(value), index) for value in looked_at)
        self._held.extend(outputs)
        numbers = np.concatenate([value.numpy().ravel() for value in looked_at])
        numbers = numbers.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        bad = numbers.size - finite.size
        low, high = finite.min(initial=math.inf), finite.max(initial=-math.inf)
        begins_here = bad > 0 and not any(self._values[i][0] for i in known)
        self._values.append((bad, low, high, begins_here))

    def is_full(self) -> bool:
        """Is it time to look? Not where nobody has used yet what has just been computed."""
        return len(self.rows) >= _EAGER_ROWS and not self._values[-1][0]

    def pass_on(self, inputs: Sequence[Any]) -> None:
        for value in inputs:
            if id(value) in self._row_of:
                self.rows[self._row_of[id(value)]].is_passed_on = True

    def take(self) -> tuple[list[_Row], np.ndarray]:
        rows, values = self.rows, np.array(self._values)
        self.__init__()
        return rows, values


def _dynamic_scales(scaled: Iterable[Any]) -> Iterable[DynamicLossScale]:
    for each in scaled:
        optimizer = getattr(each, "optimizer", each)
        scale = getattr(each, "loss_scale", None) if optimizer is each else None
        found = [scale] if scale is not None else []
        found += [wrapper.loss_scale for wrapper in wrappers_among(optimizer)] if not found else []
        yield from (scale for scale in found if isinstance(scale, DynamicLossScale))


def _append(
    rows: list[_Row],
    kind: str,
    layer: str,
    place: operations.Place,
    value: Any,
    known: list[int],
    is_given: bool = False,
) -> int:
    index = len(rows)
    # What is made of gradients, such as their sum over replicas, overflows as they do.
    is_gradient = place.is_gradient or any(rows[i].is_gradient for i in known)
    row = _Row(kind, layer, place.line, value.dtype.name, is_gradient, known, is_given)
    rows.append(row)
    for i in set(known):
        rows[i].users.append(index)
    return index


def _looked_at(kind: str, outputs: Sequence[Any]) -> list[Any]:
    if kind in _NOT_LOOKED_AT:
        return []
    floating = [value for value in outputs if value.dtype.is_floating]
    return floating[:1] if kind.startswith(_FIRST_OUTPUT_ONLY) else floating


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


def _is_inside(graph: Any, kind: str) -> bool:
    """Is it a graph of that class, or inside of one?"""
    while isinstance(graph, tf.__internal__.FuncGraph):
        if any(cls.__name__ == kind for cls in type(graph).__mro__):
            return True
        graph = graph.outer_graph
    return False


def _clear(handle: tf.Tensor) -> None:
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([_CAPACITY, 4]))


def _first(rows: list[_Row], values: np.ndarray) -> int | None:
    """The first row where something begins to be bad that goes on to somewhere that matters."""
    bad, begins_here = values[:, 0] > 0, values[:, 3] > 0
    reaches = np.zeros(len(rows), bool)
    for i in reversed(range(len(rows))):
        if bad[i]:
            row = rows[i]
            is_last = not row.users and not row.is_passed_on
            reaches[i] = row.is_used_elsewhere or is_last or reaches[row.users].any()
    culprits = [int(i) for i in np.flatnonzero(reaches & begins_here)]
    # What is given to a graph inside of another one, to a loop's body, has been computed outside.
    made = [i for i in culprits if not rows[i].is_given]
    return min(made or culprits, default=None)


def _tidy(scope: str) -> str:
    """The layers of a name scope; that of a gradient is the one of its forward pass."""
    return re.sub(r"(^|/)(gradient_tape|replica_\d+)(?=/|$)", "", scope).strip("/")
