"""What happens while a model trains? Exponents, and the first operation that is not finite.

While that is looked for, TensorFlow calls back for each operation that runs in eager or becomes a
part of a graph, and it gets a row of a table (`operation_table.py`). When a function returns to
eager, the measurements are read, and it is decided whether to stop.
"""

import contextlib
import dataclasses
import functools
import operator
import threading
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.loss_scale import DynamicLossScale
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.numerics import counting, operation_table, origins, patterns
from keras_mp.numerics.first_bad import READS, NotFiniteError, first_error
from keras_mp.numerics.histogram import EVERYWHERE
from keras_mp.numerics.report import Report
from keras_mp.numerics.results import Result
from keras_mp.support import attributes, function_graphs, kept_casts, messages, op_callbacks
from keras_mp.support.figures import new_figure
from keras_mp.support.frequency import epoch_or_integer
from keras_mp.support.validation import boolean, integer

_Dtype = str | None

# Which operation of the program an error is about.
_place = operator.attrgetter("operation.operation", "operation.layer", "operation.line")
# It has the attribute `is_in_block` in a thread that is in a block.
_thread = threading.local()


class watch(keras_api.BaseCallback, Result):
    """Watches a model while it trains: in `fit`, or in a loop of your own.

    As a callback of `fit`, or by `step` in a loop of your own, it counts the exponents of
    gradients, outputs and weights, on the device, in some of the steps. As a context manager it
    looks at each operation, and raises at the step where the first one is not finite, with its
    layer and line; that takes several times as long. The two go together:

        with keras_mp.numerics.watch(model) as watching:
            model.fit(x, y, callbacks=[watching])

    The block goes on, where `tf.debugging.enable_check_numerics` stops, if

    - gradients overflow and a dynamic loss scale is going to fall for it. Pass the model, the
      optimizer or the `GradScaler`, so that it is known. At the smallest loss scale it stops;
    - what is not finite has no effect: a softmax makes zeros of the -inf of a mask, or `tf.where`
      does not take the logarithm of zero.

    It stops when the function that was called from eager code has returned, at the end of a batch
    of `fit` for example. In eager code it stops at the end of the block, or after some thousand
    operations.

    Functions are watched if they are traced inside of the block; those of the model are traced
    anew, and once more after it. Other functions keep their checks: make them anew when you have
    found what you looked for. Outside of the block nothing is changed, and nothing costs time.
    Replicas are watched one by one.

    Functions with `jit_compile=True` are watched too: the checks are compiled with them. XLA then
    has to keep each result, which it would otherwise have fused with the next one, and which it may
    have kept in float32 meanwhile. So an overflow may be found that does not happen without the
    checks.

    Args:
        model: a model of `tf.keras`. It may be left out where there is a `fit`.
        optimizer: that of a loop of your own, or a list of several, or a `GradScaler`. Defaults to
            the one that the model is compiled with. If there is a strategy, make this object in its
            scope.
        every: int. The first step is counted, and then one in so many. Defaults to 100.
        gradients: bool or iterable of str. Counts the gradients of variables: of all, or of those
            with these paths, which may be patterns such as `"decoder/*"`. Defaults to True.
        outputs: the same for the outputs of layers. Defaults to True.
        output_gradients: the same for the gradients of outputs. Defaults to False.
        weights: the same for trainable variables. Defaults to False.
        read_freq: `"epoch"` (the default), or an int, the number of batches between reads in `fit`.
        include: iterable of str. Which operations may be the first: patterns of their types, such
            as `"Log"`, and of paths of layers, such as `"decoder/*"`. Defaults to None: all.
        exclude: iterable of str. Which operations may not, by the same patterns; those that use
            their results may. Defaults to none.
        raises: bool. Whether it stops the program. If False, it warns, and `found` keeps what was
            found. Defaults to True.

    Attributes:
        history: list of `Report`s, one for each read of something that was counted. A second `fit`
            continues it.
        found: list of `NotFiniteError`s, the first operation of each step that was not finite, each
            operation once.
        planned: int. How many steps had gradients that overflowed as the loss scale expects. With
            several steps per execution, how many executions.

    Raises:
        NotFiniteError: from the block, the first operation that is not finite.
        TypeError: an argument is of another type.
        ValueError: a number or a path is wrong, or a `fit` has two of these callbacks.
        RuntimeError: the block is inside of another one.

    Example:

    >>> layers = [tf.keras.Input([2]), tf.keras.layers.Dense(1, name="dense")]
    >>> model = tf.keras.Sequential(layers)
    >>> model.compile(keras_mp.LossScaleOptimizer("sgd"), "mse")
    >>> watching = keras_mp.numerics.watch(every=1)
    >>> x, y = tf.ones([8, 2]), tf.ones([8, 1])
    >>> _ = model.fit(x, y, 2, callbacks=[watching], verbose=0)
    >>> watching.report().counted
    4
    """

    def __init__(
        self,
        model: tf.keras.Model | None = None,
        optimizer: Any = None,
        *,
        every: int = 100,
        gradients: bool | Iterable[str] = True,
        outputs: bool | Iterable[str] = True,
        output_gradients: bool | Iterable[str] = False,
        weights: bool | Iterable[str] = False,
        read_freq: str | int = "epoch",
        include: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        raises: bool = True,
    ) -> None:
        super().__init__()
        if model is not None:
            keras_api.check_model(model)
        self._watched, self._optimizer = model, optimizer
        self._scaled = [each for each in (model, *tf.nest.flatten(optimizer)) if each is not None]
        for each in self._scaled:
            is_one = isinstance(each, tf.keras.Model) or hasattr(each, "apply_gradients")
            if not (is_one or hasattr(each, "loss_scale")):
                raise TypeError(f"Expected models, optimizers or `GradScaler`s. Received: {each!r}")
        self.read_freq = epoch_or_integer("read_freq", read_freq)
        self.history: list[Report] = []
        self.found: list[NotFiniteError] = []
        self.planned = 0
        self._counting: dict[str, Any] = {"every": integer("every", every)}
        self._counting |= {"gradients": gradients, "weights": weights, "outputs": outputs}
        self._counting["output_gradients"] = output_gradients
        self._histograms: counting.ExponentHistograms | None = None
        if model is not None and optimizer is not None:
            self.step()  # Histograms are made now, in the scope of a strategy, not in a replica.
        # In a `fit`: what counts, the function that runs steps in which it does, and what that
        # replaces in an execution; how many steps were made in it, in it before this epoch, in it
        # when histograms were last read because of `read_freq`, and before this `fit`.
        self._in_fit: Any = None
        self._counting_steps, self._plain_steps = cast(Any, (None, None))
        self._made = self._before_epoch = self._last_read = self._before_fit = 0
        # In a block.
        self._include = patterns.listed("include", ["*"] if include is None else include)
        self._exclude = patterns.listed("exclude", exclude)
        self._raises = boolean("raises", raises)
        self._scales: dict[DynamicLossScale, float] = {}
        self._graphs, self._eager = operation_table.GraphRecorder(), operation_table.EagerRecorder()
        # What is not finite for a reason that is known: functions in which something was found have
        # returned it, or it comes of that.
        self._spoilt = operation_table.ByTensor()
        self._has_seen_any = False
        self._lock = threading.RLock()
        self._block = contextlib.ExitStack()

    # To read what was counted is left to `str`.
    __repr__ = object.__repr__

    def __enter__(self) -> "watch":
        if hasattr(_thread, "is_in_block"):
            raise RuntimeError(
                "Expected one `watch` block at a time, for all operations: pass it all optimizers."
            )
        known = (getattr(each, "optimizer", each) for each in self._scaled)
        owners = (owner for each in known for owner in wrappers_among(each) or [each])
        scales = (getattr(owner, "loss_scale", None) for owner in owners)
        self._scales = {e: float(e()) for e in scales if isinstance(e, DynamicLossScale)}
        if self._watched is not None:
            _forget_traces(self._watched)
            self._block.callback(_forget_traces, self._watched)
            self._block.enter_context(origins.naming(self._watched))
        self._block.enter_context(op_callbacks.observed(self._observe))
        self._block.enter_context(attributes.replaced(_thread, "is_in_block", True))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._block.close()
        if kind is not None:
            return
        self._check()
        if not self._has_seen_any:
            messages.warn(
                "`watch` has seen no operation: create or trace the tf.function inside its block."
            )
        if self._graphs.not_watched:
            messages.warn(
                f"`watch` looks at {operation_table.CAPACITY:,} operations of functions, and has "
                f"found nothing in them. {self._graphs.not_watched:,} that were traced later were "
                "not watched: use it around a part of the program, or a smaller model."
            )

    @op_callbacks.unobserved()
    def _check(self) -> bool:
        """Reads what was measured, and returns whether something was not finite.

        For operations that have run in eager; functions are looked at when they return.

        Raises:
            NotFiniteError: one of them is the first whose result is not finite.
        """
        scales = self._scales
        self._scales = {scale: float(scale()) for scale in scales}
        may_fall = any(before > max(1, of.min_loss_scale) for of, before in scales.items())
        with self._lock:
            reads = [*self._graphs.read(), *self._eager.read()]
        error = first_error(reads, self._is_checked, bool(scales), self._watched is not None)
        if error is None:
            return False
        if error.operation.is_gradient and may_fall:
            self.planned += 1
            return True
        if _place(error) not in map(_place, self.found):
            self.found.append(error)
            if not self._raises:
                messages.warn(str(error))
        if self._raises:
            raise error
        return True

    def _is_checked(self, row: operation_table.Range) -> bool:
        def is_among(chosen: Iterable[str]) -> bool:
            return any(patterns.matches(each, chosen) for each in (row.operation, row.layer))

        return is_among(self._include) and not is_among(self._exclude)

    def _observe(self, kind: Any, inputs: Any, _: Any, outputs: Any, *__: Any, **of: Any) -> None:
        """The callback for TensorFlow."""
        graph = of.get("graph")
        is_ours = function_graphs.is_of_function(graph) if graph else not op_callbacks.are_off()
        if not is_ours:
            return
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if graph is None and kind.startswith(("__inference_", "__forward_", "__backward_")):
            self._eager.use(self._eager.row_of.of(inputs))
            if self._graphs.rows and self._check():
                self._spoil(outputs)
            return
        with self._lock:
            self._has_seen_any = True
            if graph is not None:
                self._graphs.record(graph, kind, inputs, outputs)
                return
            if self._eager.is_full():
                self._check()
            # Metrics, say, keep what a function has made.
            if (self.found and kind in READS) or self._spoilt.of(inputs):
                self._spoil(outputs)
            else:
                self._eager.record(kind, inputs, outputs)

    @op_callbacks.unobserved()
    def _spoil(self, values: Iterable[tf.Tensor]) -> None:
        """Notes those that are not finite, and those that may hold such, such as an `Optional`."""
        for each in values:
            is_bad = each.dtype == tf.variant
            if each.dtype.is_floating:
                is_bad = not tf.reduce_all(kept_casts.is_finite(each))
            self._spoilt.note([each] * is_bad, True)

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager around a step of a loop of your own, which is counted.

        It goes into the function that `strategy.run` runs, if there is a strategy. Gradients are
        counted as a `LossScaleOptimizer` or a `GradScaler` takes them, before they are summed over
        replicas, and as if they had never been scaled.

        Raises:
            ValueError: there is no model, or it is not built.
        """
        if self._watched is None:
            raise ValueError("Expected watch(model), to count its steps. Received: model=None")
        if self._histograms is None:
            with tf.init_scope():
                how = {**self._counting, "optimizer": self._optimizer}
                self._histograms = counting.ExponentHistograms(self._watched, **how)
        return self._histograms.step()

    def report(self) -> Report:
        """Returns a `Report` of what was counted.

        Raises:
            ValueError: nothing was counted yet.
        """
        if (report := self._so_far()) is None:
            raise ValueError("Nothing was read yet: pass the callback to `fit` first.")
        return report

    def _so_far(self) -> Report | None:
        """Reads what was counted since the last time; returns all that was, None for nothing."""
        self._read(self._histograms)
        return functools.reduce(Report.__add__, self.history) if self.history else None

    def _read(self, histograms: counting.ExponentHistograms | None, **changes: int) -> None:
        """Keeps what was counted since the last time."""
        if histograms is not None and (report := histograms.read()).counted:
            self.history.append(dataclasses.replace(report, **changes))

    def _lines(self, rows: int | None) -> list[str]:
        parts = [str(each) for each in self.found]
        if (report := self._so_far()) is not None:
            parts.append(report.to_text(rows=rows))
        return ["\n\n".join(parts) or "Nothing was counted, and all results were finite."]

    def plot(
        self, dtype: _Dtype = None, *, tolerance: float = 0.001, history: Any = None, ax: Any = None
    ) -> Any:
        """Draws the window of loss scales in which nothing is lost, read after read.

        Args:
            dtype: "float16" or "bfloat16". Defaults to the one that was computed in.
            tolerance: float. Which share of a gradient may become zero. Defaults to 0.001.
            history: that of a `keras_mp.callbacks.LossScaleMonitor` of the same `fit`, for the
                loss scale of each step.
            ax: Matplotlib's `Axes`. Defaults to those of a new figure.

        Returns:
            The `Axes`.
        """
        report = self.report()
        dtype = dtype or report.dtype
        steps, scales = zip(*((report.step, report.loss_scale) for report in self.history))
        path: Any = getattr(history, "history", history) or {"step": steps, "loss_scale": scales}
        scales = np.log2(path["loss_scale"])
        windows = [report.window(dtype, tolerance) for report in self.history]
        # An open end is drawn at the edge of the picture.
        ends = [*scales, *(end for each in windows for end in each if abs(end) < EVERYWHERE.high)]
        edges = min(ends) - 2, max(ends) + 2
        low, high = np.clip(np.transpose(windows), *edges)
        ax = new_figure(__name__, (8, 4)).subplots() if ax is None else ax
        ax.plot(steps, low, ".-", color="tab:orange", label="too small below")
        ax.plot(steps, high, ".-", color="tab:red", label="overflows above")
        ax.fill_between(steps, low, high, where=low <= high, color="tab:green", alpha=0.15)
        ax.plot(path["step"], scales, ".-", color="tab:blue", label="loss scale")
        title = f"Loss scales at which {dtype} loses nothing"
        ax.set(ylim=edges, xlabel="step", ylabel="loss scale (exponent of 2)", title=title)
        ax.legend()
        ax.grid(alpha=0.3)
        return ax

    def to_dict(self) -> dict[str, Any]:
        """Returns what was not finite, and the report, as JSON has them."""
        found, report = [str(each) for each in self.found], self._so_far()
        return {"found": found, "report": None if report is None else report.to_dict()}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to count anew.

        Args:
            logs: not used.
        """
        self._in_fit = None
        self._made = 0
        self._before_fit = self.history[-1].step if self.history else 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the epoch begins.

        Args:
            epoch: not used.
            logs: not used.
        """
        self._before_epoch = self._last_read = self._made

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Lets this execution of one or more steps count, if one of them is due.

        Args:
            batch: not used.
            logs: not used.
        """
        model: Any = self.model
        plain = model.train_function
        other = getattr(plain, "__self__", None)
        # All callbacks of a `fit` share their parameters. An error has ended any other `fit`.
        if isinstance(other, watch) and other.params is self.params:
            raise ValueError(
                "Expected one `watch` in a `fit`: each counts in steps of its own. "
                f"Received: {other!r} and {self!r}"
            )
        if not model.built:
            return  # Keras 2 builds a model with its first batch, which is not counted then.
        if self._in_fit is None:
            self._in_fit = counting.ExponentHistograms(model, **self._counting)
            with self._counting_step():
                model.make_train_function(force=True)
            self._counting_steps, model.train_function = model.train_function, plain
        if self._in_fit.is_due(self._made, keras_api.steps_per_execution(model)):
            self._plain_steps, model.train_function = plain, self._count

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads, if that is due after this batch.

        Args:
            batch: not used.
            logs: not used.
        """
        if self._in_fit is not None:
            self._made += keras_api.steps_per_execution(self.model)
        if isinstance(self.read_freq, int) and self._made >= self._last_read + self.read_freq:
            self._last_read = self._made
            self._read(self._in_fit, step=self._before_fit + self._made)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads what was counted in the rest of the epoch.

        Args:
            epoch: not used.
            logs: not used.
        """
        # The last execution of an epoch may have fewer steps than the others.
        in_epoch = (self.params or {}).get("steps")
        if in_epoch is not None:
            self._made = min(self._made, self._before_epoch + in_epoch)
        self._read(self._in_fit, step=self._before_fit + self._made)

    def _counting_step(self) -> contextlib.AbstractContextManager[None]:
        """Wraps the step that Keras makes a function of, while it makes or traces it."""
        # As a decorator, which enters it in each call.
        counted = self._in_fit.step()(self.model.train_step)
        # Keras 3 keeps the method that it finds now, which goes on counting after the block.
        return attributes.replaced(self.model, "train_step", counted)

    def _count(self, iterator: tf.data.Iterator) -> Any:
        """Runs one execution of `fit` that counts; the next one is Keras's own again."""
        self.model.train_function = self._plain_steps
        self._in_fit.go_on_from(self._made)
        with self._counting_step():
            return self._counting_steps(iterator)


def _forget_traces(model: Any) -> None:
    model.train_function = model.test_function = model.predict_function = None
