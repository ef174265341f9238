"""Finds the first operation whose result is not finite, its layer and its line.

While it is looked for, TensorFlow calls back for each operation that runs in eager or becomes a
part of a graph, and it gets a row of a table: what it is, where it comes from and what uses its
result. What it returned is kept beside the table: `EagerRecorder` measures it at once,
`GraphRecorder` in the graph while it runs, in a row of a variable for each. That is all that a
graph needs, so that functions that XLA compiles are watched as others are. When a function returns
to eager, the measurements are read, and it is decided whether to stop.
"""

import contextlib
import dataclasses
import functools
import math
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.loss_scale import DynamicLossScale
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.numerics import origins, own_thread, patterns
from keras_mp.numerics import results as causes
from keras_mp.numerics.origins import GraphOrigins, Origin
from keras_mp.support import (
    attributes,
    function_graphs,
    kept_casts,
    messages,
    op_callbacks,
    op_table,
    validation,
)

# How many operations run in eager before the rows are read.
_EAGER_ROWS = 2**12

# Rows of a variable. Operations of graphs that come later are not watched.
CAPACITY = 2**14

# Operations that test numbers, and do not compute with them.
_ONLY_LOOKS = op_table.ops("comparisons", "tests", "shapes")

# Operations that bring arguments into a graph.
PASSED_IN = op_table.ops("arguments", "data")

READS = op_table.ops("reads of variables")

# Results that are not finite where nothing is wrong: what the kernel keeps for the backward pass,
# and what has no value yet.
_NOT_CHECKED = op_table.ops("empty tensors", "variables")
_FIRST_OUTPUT_ONLY = ("FusedBatchNorm",)

# Classes of graphs. The gradient of a loop takes no variables but those of its forward pass.
_LOOP, _GRADIENT_OF_LOOP = "WhileBodyFuncGraph", "_WhileBodyGradFuncGraph"

# How many of the layers before the first bad operation a message shows.
_HISTORY = 12

# Which operation of the program an error is about.
_place = operator.attrgetter("operation.operation", "operation.layer", "operation.line")
# It has the attribute `is_in_block` in a thread that is in a block.
_thread = threading.local()


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


class NotFiniteError(ArithmeticError):
    """The first operation whose result is not finite.

    Attributes:
        operation: Range of the operation.
        inputs: list of Range, of the operations whose results it takes.
        history: list of Range, for each layer before it the operation with the largest numbers,
            oldest first.
        device: str. The device that it ran on, which tells replicas apart; "" in eager.

    Example:

    >>> step = tf.function(lambda x: tf.sqrt(x - 1))
    >>> try:
    ...     with keras_mp.numerics.watch():
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


# A device, its operations, and an array of what was measured of each: how many values were not
# finite, the smallest and the largest finite one, and whether something began to be so here.
Read = tuple[str, list[Range], np.ndarray]


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

    def outputs_to_check(
        self, kind: str, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
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
        checked = [value for value in outputs if value.dtype.is_floating]
        if kind in _NOT_CHECKED:
            checked = []
        elif kind.startswith(_FIRST_OUTPUT_ONLY):
            checked = checked[:1]
        if not checked and kind not in _ONLY_LOOKS:
            for i in known:
                self.rows[i].is_used_elsewhere = True
        return checked

    def use(self, rows: Iterable[int]) -> None:
        """Notes that the results of operations are used."""
        for i in rows:
            self.rows[i].is_used = True

    def add(
        self,
        kind: str,
        origin: Origin,
        values: Sequence[tf.Tensor],
        inputs: list[int],
        is_given: bool = False,
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
        index = len(self.rows)
        # What is made of gradients, such as their sum over replicas, overflows as they do.
        is_gradient = origin.is_gradient or any(self.rows[i].is_gradient for i in inputs)
        dtype, line = values[0].dtype.name, origin.line and origin.line.short
        row = Range(kind, origin.layer, line, dtype, is_gradient, inputs=inputs, is_given=is_given)
        self.rows.append(row)
        self.use(inputs)
        self.row_of.note(values, index)
        return index


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

    def record(self, kind: str, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]) -> None:
        """Records an operation that has run."""
        checked = self.outputs_to_check(kind, inputs, outputs)
        if not checked:
            return
        origin = origins.running()
        if origin.is_of_a_tool:
            return
        known = self.row_of.of(inputs)
        self.add(kind, origin, checked, known)
        numbers = np.concatenate([value.numpy().ravel() for value in checked])
        numbers = numbers.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        bad = numbers.size - finite.size
        low, high = finite.min(initial=math.inf), finite.max(initial=-math.inf)
        begins_here = bad > 0 and not any(self.measured[i][0] for i in known)
        self.measured.append((bad, low, high, begins_here))

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
        # What it takes may get a row, and so may what that was cast from.
        if len(self.rows) + 2 * len(inputs) >= CAPACITY:
            self.not_watched += 1
            return
        origin = self._origins.of(outputs[0].op, name or "")
        if origin.is_data or origin.is_of_a_tool:
            return
        for value in inputs:
            self._give(graph, origin, value)
        self._measure(graph, kind, origin, checked, self.row_of.of(inputs))

    def _give(self, graph: tf.Graph, origin: Origin, value: tf.Tensor) -> list[int]:
        """Returns the row of what an operation takes; what was there before has one from now on."""
        if not value.dtype.is_floating:
            return []
        if known := self.row_of.of([value]):
            return known
        kind, before = value.op.type, []
        if kind in ("Cast", "Identity"):
            source = value.op.inputs[0]
            before = self._give(graph, origin, source)
            if before and value.dtype.size >= source.dtype.size:
                self.row_of.note([value], before[0])
                return before
        # A cast to fewer bits may overflow, where what it takes was finite.
        return [self._measure(graph, kind, origin, [value], before, is_given=True)]

    def _measure(
        self,
        graph: tf.Graph,
        kind: str,
        origin: Origin,
        values: Sequence[tf.Tensor],
        inputs: list[int],
        is_given: bool = False,
    ) -> int:
        """Gives an operation a row, which is measured when the graph runs; returns its number."""
        index = self.add(kind, origin, values, inputs, is_given)
        # Tensors of another graph cannot be used.
        found = [self._bad[i] for i in set(inputs) if i in self._bad]
        before = [bad for bad in found if bad.graph is graph]
        dtypes = tuple(value.dtype for value in values)
        measured = _measuring(dtypes, len(before), _is_inside(graph, _LOOP))
        self._bad[index] = measured(self._state(values[0].device), index, *values, *before)
        return index

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


class FirstBadOperation:
    """Stops at the first operation whose result is Inf or NaN, and says what led to it.

    It is a context manager around `fit` or a training loop of your own.
    `tf.debugging.enable_check_numerics` stops at everything that is not finite. This one goes on if

    - gradients overflow and a dynamic loss scale is going to fall for it. Pass the model, the
      optimizer or the `GradScaler`, so that it is known. At the smallest loss scale it stops;
    - what is not finite has no effect: a softmax makes zeros of the -inf of a mask, or `tf.where`
      does not take the logarithm of zero.

    It stops when the function that was called from eager code has returned, at the end of a batch
    of `fit` for example, and raises a `NotFiniteError`. In eager code it stops at the end of the
    block, when `check` is called, or after some thousand operations.

    Functions are watched if they are traced inside of the block; those of the model are traced
    anew, and once more after it. Other functions keep their checks: make them anew when you have
    found what you looked for. Outside of the block nothing is changed, and nothing costs time.
    Inside, each operation takes several times as long. Replicas are watched one by one.

    Functions with `jit_compile=True` are watched too: the checks are compiled with them. XLA then
    has to keep each result, which it would otherwise have fused with the next one, and which it may
    have kept in float32 meanwhile. So an overflow may be found that does not happen without the
    checks.

    Args:
        *scaled: models, optimizers or `GradScaler`s whose loss scale may have to fall.
        include: iterable of str. Which operations may be the first: patterns of their types, such
            as `"Log"`, and of paths of layers, such as `"decoder/*"`. Defaults to None: all.
        exclude: iterable of str. Which operations may not, by the same patterns; those that use
            their results may. Defaults to none.
        raises: bool. Whether to stop. Defaults to True. If False, the program goes on: a warning
            says what was found, once for each operation, and `found` keeps it.

    Attributes:
        planned: int. How many steps had gradients that overflowed as the loss scale expects. With
            several steps per execution, how many executions.
        found: list of NotFiniteError, the first of each step, each operation once.

    Raises:
        NotFiniteError: an operation was found, see above.
        TypeError: something else was passed, or patterns that are no str.
        RuntimeError: the block is inside of another one.

    Example:

    >>> @tf.function
    ... def step(x):
    ...     masked = tf.where(x > 0, tf.math.log(x), 0.0)
    ...     return tf.reduce_sum(tf.exp(masked * 100))
    >>> try:
    ...     with keras_mp.numerics.first_bad.FirstBadOperation():
    ...         print(step(tf.constant([0.0, 1.0])).numpy())
    ...         step(tf.constant([0.0, 3.0]))
    ... except keras_mp.numerics.NotFiniteError as error:
    ...     print(error.operation.operation, error.inputs[0].operation, error.inputs[0].high > 100)
    2.0
    Exp Mul True
    """

    def __init__(
        self,
        *scaled: Any,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        raises: bool = True,
    ) -> None:
        for each in scaled:
            optimizer = getattr(each, "optimizer", each)
            is_one = hasattr(optimizer, "apply_gradients") or hasattr(each, "loss_scale")
            if not (is_one or isinstance(each, tf.keras.Model)):
                raise TypeError(
                    "Expected models, optimizers or `GradScaler`s, whose loss scale may fall. "
                    f"Received: {each!r} (of type {type(each)})"
                )
        self.planned = 0
        self.found: list[NotFiniteError] = []
        self._include = None if include is None else patterns.listed("include", include)
        self._exclude = patterns.listed("exclude", exclude)
        self._raises = validation.boolean("raises", raises)
        self._has_seen_any = False
        self._models = [each for each in scaled if isinstance(each, tf.keras.Model)]
        self._scaled = scaled
        self._scales: list[tuple[DynamicLossScale, float]] = []
        self._graphs = GraphRecorder()
        self._eager = EagerRecorder()
        # What is not finite for a reason that is known: functions in which something was found have
        # returned it, or it comes of that.
        self._spoilt = ByTensor()
        self._lock = threading.RLock()
        self._block = contextlib.ExitStack()

    def __enter__(self) -> "FirstBadOperation":
        if hasattr(_thread, "is_in_block"):
            raise RuntimeError(
                "Expected one `watch` block at a time, since each would also check the "
                "operations of the other. Pass all models and optimizers to one of them."
            )
        self._scales = [(scale, float(scale())) for scale in _dynamic_scales(self._scaled)]
        self._forget_traces()
        self._block.callback(self._forget_traces)
        self._block.enter_context(origins.naming(self._models))
        self._block.enter_context(op_callbacks.observed(self._observe))
        self._block.enter_context(attributes.replaced(_thread, "is_in_block", True))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._block.close()
        if kind is None:
            self.check()
            if not self._has_seen_any:
                messages.warn(
                    "`watch` has seen no operation. It watches only functions that are "
                    "traced inside of its block: create or trace the tf.function there."
                )
            if self._graphs.not_watched:
                messages.warn(
                    f"`watch` looks at {CAPACITY:,} operations of "
                    f"functions, and has found nothing in them. {self._graphs.not_watched:,} that "
                    "were traced later were not watched: use it around a part of the program, or "
                    "a smaller model."
                )

    @op_callbacks.unobserved()
    def check(self) -> bool:
        """Reads what was measured, and returns whether something was not finite.

        For operations that have run in eager; functions are looked at when they return.

        Raises:
            NotFiniteError: one of them is the first whose result is not finite.
        """
        scales = self._scales
        self._scales = [(scale, float(scale())) for scale, _ in scales]
        may_fall = any(before > max(1, scale.min_loss_scale) for scale, before in scales)
        with self._lock:
            reads = [*self._graphs.read(), *self._eager.read()]
        firsts = [(self._first(*read[1:]), read) for read in reads]
        found = [(first, read) for first, read in firsts if first is not None]
        if not found:
            return False
        # What replicas do together comes after what each of them has done.
        first, read = min(found, key=operator.itemgetter(0))
        if read[1][first].is_gradient and may_fall:
            self.planned += 1
            return True
        error = self._error(first, *read)
        if _place(error) not in map(_place, self.found):
            self.found.append(error)
            if not self._raises:
                messages.warn(str(error))
        if self._raises:
            raise error
        return True

    def _is_checked(self, row: Range) -> bool:
        def is_among(chosen: list[str]) -> bool:
            return any(patterns.matches(each, chosen) for each in (row.operation, row.layer))

        is_included = self._include is None or is_among(self._include)
        return is_included and not is_among(self._exclude)

    def _first(self, rows: list[Range], measured: np.ndarray) -> int | None:
        """Returns the first row where something begins to be not finite and reaches what matters.

        Args:
            rows: list of Range.
            measured: array with a row for each, as `Read` has it.
        """
        bad, begins_here = measured[:, 0] > 0, measured[:, 3] > 0
        for i in map(int, np.flatnonzero(bad)):
            # What comes of an operation that may not be the first can be.
            sources = [j for j in rows[i].inputs if bad[j]]
            came_unchecked = bool(sources) and not any(self._is_checked(rows[j]) for j in sources)
            begins_here[i] = self._is_checked(rows[i]) and (begins_here[i] or came_unchecked)
        ends = [row.is_used_elsewhere or not row.is_used for row in rows]
        culprits = causes.begun([row.inputs for row in rows], bad, np.array(ends), begins_here)
        # What is given to a graph inside of another one, to a loop's body, was computed outside.
        results = [i for i in culprits if not rows[i].is_given]
        return min(results or culprits, default=None)

    def _error(
        self, first: int, device: str, rows: list[Range], measured: np.ndarray
    ) -> NotFiniteError:
        ranges = [
            dataclasses.replace(row, low=low, high=high, bad=int(bad))
            for row, (bad, low, high, _) in zip(rows[: first + 1], measured.tolist())
        ]
        found, layers = ranges[first], dict[str, Range]()
        for seen in ranges:
            has_run = seen.low or seen.high
            if seen.layer != found.layer and has_run and not seen.bad and not seen.is_given:
                before = layers.pop(seen.layer, seen)
                layers[seen.layer] = max(before, seen, key=lambda each: each.size)
        history = list(layers.values())[-_HISTORY:]
        inputs = [ranges[i] for i in found.inputs]
        behind = [found, *inputs, *(ranges[j] for each in inputs for j in each.inputs)]
        return NotFiniteError(found, inputs, history, device, self._advice(found, inputs, behind))

    def _advice(self, found: Range, inputs: list[Range], behind: list[Range]) -> str:
        """Returns what the numbers of an operation, and of those behind it, say about the cause."""
        weights = [each for each in behind if each.operation in READS]
        size = max((math.inf if each.bad else each.size for each in weights), default=0.0)
        cause = "unknown"
        if found.operation in PASSED_IN:
            cause = "passed in"
        elif found.is_gradient and not self._scales:
            cause = "unscaled"
        elif size >= causes.LARGE_WEIGHTS:
            cause = "weights"
        elif found.operation == "Cast" and any(each.operation in PASSED_IN for each in inputs):
            cause = "an input"
        elif found.operation in op_table.ops("constants"):
            cause = "a constant"
        elif not self._models:
            return ""
        are = f"reach {size:.3g}" if math.isfinite(size) else "are not finite"
        return causes.SAID[cause].format(dtype=found.dtype, are=are)

    @op_callbacks.unobserved()
    def _spoil(self, values: Sequence[tf.Tensor]) -> None:
        """Notes those that are not finite, and those that may hold such, such as an `Optional`."""
        bad = [
            each
            for each in values
            if each.dtype == tf.variant
            or (each.dtype.is_floating and not tf.reduce_all(kept_casts.is_finite(each)))
        ]
        self._spoilt.note(bad, True)

    def _forget_traces(self) -> None:
        for model in self._models:
            model.train_function = model.test_function = model.predict_function = None

    def _observe(
        self,
        kind: str | bytes,
        inputs: Sequence[tf.Tensor],
        attrs: Sequence[Any] | None,
        outputs: Sequence[tf.Tensor],
        op_name: str | None = None,
        graph: tf.Graph | None = None,
    ) -> None:
        """The callback for TensorFlow."""
        del attrs
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if graph is None and kind.startswith(("__inference_", "__forward_", "__backward_")):
            self._eager.use(self._eager.row_of.of(inputs))
            if self._graphs.rows and self.check():
                self._spoil(outputs)
            return
        with self._lock:
            if graph is None:
                self._has_seen_any = True
                if self._eager.is_full():
                    self.check()
                # Metrics, say, keep what a function has made.
                is_read = bool(self.found) and kind in READS
                if is_read or self._spoilt.of(inputs):
                    self._spoil(outputs)
                else:
                    self._eager.record(kind, inputs, outputs)
            elif function_graphs.is_of_function(graph):
                self._has_seen_any = True
                self._graphs.record(graph, kind, inputs, outputs, op_name)


def _dynamic_scales(scaled: Iterable[Any]) -> Iterator[DynamicLossScale]:
    """Yields the dynamic loss scales of models, optimizers and `GradScaler`s."""
    for each in scaled:
        for owner in wrappers_among(getattr(each, "optimizer", each)) or [each]:
            scale = getattr(owner, "loss_scale", None)
            if isinstance(scale, DynamicLossScale):
                yield scale
