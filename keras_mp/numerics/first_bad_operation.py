"""Finds the first operation whose result is not finite, its layer and its line.

While it is looked for, TensorFlow calls back for each operation that runs in eager or becomes a
part of a graph, and `operation_rows` and `graph_recorder` measure what each returned. When a
function returns to eager, the measurements are read, and it is decided whether to stop.
"""

import contextlib
import fnmatch
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.loss_scale import DynamicLossScale
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.numerics import graph_recorder, watching
from keras_mp.numerics.not_finite import NotFiniteError, Range
from keras_mp.numerics.operation_rows import PASSED_IN, EagerRecorder, OperationRow, first_bad
from keras_mp.support import attributes, messages, op_callbacks, validation

# How many of the layers before the first bad operation a message shows.
_HISTORY = 12


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
    ...     with keras_mp.numerics.FirstBadOperation():
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
        self._include = None if include is None else _patterns("include", include)
        self._exclude = _patterns("exclude", exclude)
        self._raises = validation.boolean("raises", raises)
        self._has_seen_any = False
        self._models = [each for each in scaled if isinstance(each, tf.keras.Model)]
        self._scaled = scaled
        self._scales: list[tuple[DynamicLossScale, float]] = []
        self._graphs = graph_recorder.GraphRecorder()
        self._eager = EagerRecorder()
        self._lock = threading.RLock()
        self._block = contextlib.ExitStack()

    def __enter__(self) -> "FirstBadOperation":
        if _thread.is_in_block:
            raise RuntimeError(
                "Expected one block of a FirstBadOperation at a time: what one looks with, another "
                "would look at. Pass all models and optimizers to one of them."
            )
        self._scales = [(scale, float(scale())) for scale in _dynamic_scales(self._scaled)]
        self._forget_traces()
        self._block.callback(self._forget_traces)
        self._block.enter_context(watching.naming(self._models))
        self._block.enter_context(op_callbacks.observed(self._observe))
        self._block.enter_context(attributes.replaced(_thread, "is_in_block", True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._block.close()
        if kind is None:
            self.check()
            if not self._has_seen_any:
                messages.warn(
                    "FirstBadOperation has seen no operation. Functions are watched that are "
                    "traced inside of its block: make the tf.function, or trace it, in there."
                )
            if self._graphs.not_watched:
                messages.warn(
                    f"FirstBadOperation watches {graph_recorder.CAPACITY:,} operations of "
                    f"functions, and has found nothing in them. {self._graphs.not_watched:,} that "
                    "were traced later were not watched: use it around a part of the program, or "
                    "a smaller model."
                )

    def check(self) -> None:
        """Looks at the operations that have run since the last time; functions do when they return.

        Raises:
            NotFiniteError: one of them is the first whose result is not finite.
        """
        with op_callbacks.unobserved():
            self._look()

    def _look(self) -> None:
        scales = self._scales
        self._scales = [(scale, float(scale())) for scale, _ in scales]
        may_fall = any(before > scale.min_loss_scale for scale, before in scales)
        found = [
            (first, device, rows, measured)
            for device, rows, measured in self._read()
            if (first := first_bad(rows, measured, self._is_checked)) is not None
        ]
        if not found:
            return
        # What replicas do together comes after what each of them has done.
        first, device, rows, measured = min(found, key=lambda each: each[0])
        if rows[first].is_gradient and may_fall:
            self.planned += 1
            return
        error = self._error(device, rows, measured, first)
        if not any(_is_same(error, each) for each in self.found):
            self.found.append(error)
            if not self._raises:
                messages.warn(str(error))
        if self._raises:
            raise error

    def _is_checked(self, row: OperationRow) -> bool:
        names = row.operation, row.layer
        is_included = self._include is None or _match(names, self._include)
        return is_included and not _match(names, self._exclude)

    def _read(self) -> list[tuple[str, list[OperationRow], np.ndarray]]:
        """Returns each device, its operations and what was measured of them since the last time."""
        with self._lock:
            read = [(device, self._graphs.rows, found) for device, found in self._graphs.read()]
            if self._eager.rows:
                read.append(("", self._eager.rows, np.array(self._eager.measured)))
                self._eager = EagerRecorder()
            return read

    def _error(
        self, device: str, rows: list[OperationRow], measured: np.ndarray, first: int
    ) -> NotFiniteError:
        row = rows[first]
        inputs = [rows[i].range(measured[i]) for i in row.inputs]
        layers: dict[str, Range] = {}
        for i in range(first):
            seen = rows[i].range(measured[i])
            has_not_run = not (seen.low or seen.high)
            if seen.layer == row.layer or has_not_run or seen.bad or rows[i].is_given:
                continue
            before = layers.pop(seen.layer, seen)
            layers[seen.layer] = max(before, seen, key=lambda each: max(-each.low, each.high))
        advice = ""
        if row.operation in PASSED_IN:
            advice = "It was not finite already when it was passed in."
        elif row.is_gradient and not self._scales:
            advice = (
                "If a dynamic loss scale is to fall for it, pass the model or the optimizer to "
                "FirstBadOperation, which then goes on."
            )
        history = list(layers.values())[-_HISTORY:]
        return NotFiniteError(row.range(measured[first]), inputs, history, device, advice)

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
            self._eager.pass_on(inputs)
            if self._graphs.rows:
                self.check()
            return
        with self._lock:
            if graph is None:
                self._has_seen_any = True
                if self._eager.is_full():
                    self.check()
                self._eager.record(kind, inputs, outputs)
            elif isinstance(graph, tf.__internal__.FuncGraph):
                self._has_seen_any = True
                self._graphs.record(graph, kind, inputs, outputs, op_name)


class _ThreadState(threading.local):
    """Whether a thread is in a block."""

    is_in_block = False


_thread = _ThreadState()


def _is_same(one: NotFiniteError, other: NotFiniteError) -> bool:
    """Whether both are about the same operation of the program."""
    a, b = one.operation, other.operation
    return (a.operation, a.layer, a.line) == (b.operation, b.layer, b.line)


def _patterns(name: str, patterns: Iterable[str]) -> list[str]:
    found = [patterns] if isinstance(patterns, str) else list(patterns)
    if not all(isinstance(each, str) for each in found):
        raise TypeError(
            f"Expected types of operations and paths of layers, or patterns of them, for `{name}`. "
            f"Received: {patterns!r}"
        )
    return found


def _match(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _dynamic_scales(scaled: Iterable[Any]) -> Iterator[DynamicLossScale]:
    """Yields the dynamic loss scales of models, optimizers and `GradScaler`s."""
    for each in scaled:
        for owner in wrappers_among(getattr(each, "optimizer", each)) or [each]:
            scale = getattr(owner, "loss_scale", None)
            if isinstance(scale, DynamicLossScale):
                yield scale
