"""Finds the first operation whose result is not finite, its layer and its line.

While it is looked for, TensorFlow calls back for each operation that runs in eager or becomes a
part of a graph, and it gets a row of a table (`operation_table.py`). When a function returns to
eager, the measurements are read, and it is decided whether to stop.
"""

import contextlib
import dataclasses
import math
import operator
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from keras_mp.loss_scale import DynamicLossScale
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.numerics import operation_table, origins, patterns
from keras_mp.numerics import results as causes
from keras_mp.numerics.operation_table import ByTensor, EagerRecorder, GraphRecorder, Range
from keras_mp.support import (
    attributes,
    features,
    function_graphs,
    kept_casts,
    messages,
    op_callbacks,
    op_table,
    validation,
)
from keras_mp.tensorflow_api import operations
from keras_mp.tensorflow_api.features import UNOBSERVED

# Operations that bring arguments into a graph.
PASSED_IN = op_table.ops("arguments", "data")

READS = op_table.ops("reads of variables")

_Block = TypeVar("_Block", bound="FirstBadOperation")

# How many of the layers before the first bad operation a message shows.
_HISTORY = 12

# Which operation of the program an error is about.
_place = operator.attrgetter("operation.operation", "operation.layer", "operation.line")
# It has the attribute `is_in_block` in a thread that is in a block.
_thread = threading.local()


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
        *scaled: a model, optimizers or `GradScaler`s whose loss scale may have to fall.
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
        self._watched = next((each for each in scaled if isinstance(each, tf.keras.Model)), None)
        self._scaled = scaled
        self._scales: list[tuple[DynamicLossScale, float]] = []
        self._graphs = GraphRecorder()
        self._eager = EagerRecorder()
        # What is not finite for a reason that is known: functions in which something was found have
        # returned it, or it comes of that.
        self._spoilt = ByTensor()
        self._lock = threading.RLock()
        self._block = contextlib.ExitStack()

    def __enter__(self: _Block) -> _Block:
        if hasattr(_thread, "is_in_block"):
            raise RuntimeError(
                "Expected one `watch` block at a time, since each would also check the "
                "operations of the other. Pass all optimizers to one of them."
            )
        self._scales = [(scale, float(scale())) for scale in _dynamic_scales(self._scaled)]
        self._forget_traces()
        self._block.callback(self._forget_traces)
        if self._watched is not None:
            self._block.enter_context(origins.naming(self._watched))
        self._block.enter_context(op_callbacks.observed(self._observe))
        self._block.enter_context(attributes.replaced(_thread, "is_in_block", True))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._block.close()
        if kind is None:
            self._check()
            if not self._has_seen_any:
                messages.warn(
                    "`watch` has seen no operation. It watches only functions that are "
                    "traced inside of its block: create or trace the tf.function there."
                )
            if self._graphs.not_watched:
                messages.warn(
                    f"`watch` looks at {operation_table.CAPACITY:,} operations of "
                    f"functions, and has found nothing in them. {self._graphs.not_watched:,} that "
                    "were traced later were not watched: use it around a part of the program, or "
                    "a smaller model."
                )

    @op_callbacks.unobserved()
    def _check(self) -> bool:
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
        elif self._watched is None:
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
        if (model := self._watched) is not None:
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
        del attrs, op_name
        # Whether callbacks are off, TensorFlow asks in graphs only.
        is_off = features.is_on(UNOBSERVED) and operations.context().invoking_op_callbacks
        if graph is None and is_off:
            return
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if graph is None and kind.startswith(("__inference_", "__forward_", "__backward_")):
            self._eager.use(self._eager.row_of.of(inputs))
            if self._graphs.rows and self._check():
                self._spoil(outputs)
            return
        with self._lock:
            if graph is None:
                self._has_seen_any = True
                if self._eager.is_full():
                    self._check()
                # Metrics, say, keep what a function has made.
                is_read = bool(self.found) and kind in READS
                if is_read or self._spoilt.of(inputs):
                    self._spoil(outputs)
                else:
                    self._eager.record(kind, inputs, outputs)
            elif function_graphs.is_of_function(graph):
                self._has_seen_any = True
                self._graphs.record(graph, kind, inputs, outputs)


def _dynamic_scales(scaled: Iterable[Any]) -> Iterator[DynamicLossScale]:
    """Yields the dynamic loss scales of models, optimizers and `GradScaler`s."""
    for each in scaled:
        for owner in wrappers_among(getattr(each, "optimizer", each)) or [each]:
            scale = getattr(owner, "loss_scale", None)
            if isinstance(scale, DynamicLossScale):
                yield scale
