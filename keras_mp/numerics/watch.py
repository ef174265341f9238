"""What happens while a model trains? Exponents, and the first operation that is not finite."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.numerics.counting import ExponentHistograms
from keras_mp.numerics.first_bad import FirstBadOperation
from keras_mp.numerics.histogram import EVERYWHERE
from keras_mp.numerics.report import Report
from keras_mp.numerics.results import Result
from keras_mp.support import attributes, validation
from keras_mp.support.figures import new_figure

_TrainFunction = Callable[[tf.data.Iterator], Mapping[str, tf.Tensor]]

# More marks in a picture would cover each other.
_MOST_MARKED = 50


class watch(FirstBadOperation, keras_api.BaseCallback, Result):
    """Watches a model while it trains: in `fit`, or in a loop of your own.

    As a callback of `fit`, or by `step` in a loop of your own, it counts the exponents of
    gradients, outputs and weights, on the device, in some of the steps. As a context manager it
    looks at each operation, and raises at the step where the first one is not finite, with its
    layer and line; that takes several times as long. The two go together:

        with keras_mp.numerics.watch(model) as watching:
            model.fit(x, y, callbacks=[watching])

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
        include: patterns of operations and layers that the context manager looks at. Defaults to
            all.
        exclude: patterns of those that it does not look at.
        raises: bool. Whether it stops the program. If False, it warns, and `found` keeps what was
            found. Defaults to True.

    Attributes:
        history: list of `Report`s, one for each read of something that was counted. A second `fit`
            continues it.
        found: list of `NotFiniteError`s, the first operation of each step that was not finite, each
            operation once.
        planned: int. How many steps had gradients that overflowed as the loss scale expects.

    Raises:
        NotFiniteError: from the block, the first operation that is not finite.
        TypeError: an argument is of another type.
        ValueError: a number or a path is wrong, or a `fit` has two of these callbacks.

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
        keras_api.BaseCallback.__init__(self)
        if model is not None:
            keras_api.check_model(model)
        self.read_freq = validation.epoch_or_integer("read_freq", read_freq)
        self.history: list[Report] = []
        self._optimizer = optimizer
        self._counting: dict[str, Any] = {"every": validation.integer("every", every)}
        self._counting |= {"gradients": gradients, "weights": weights, "outputs": outputs}
        self._counting["output_gradients"] = output_gradients
        scaled = [each for each in (model, *tf.nest.flatten(optimizer)) if each is not None]
        super().__init__(*scaled, include=include, exclude=exclude, raises=raises)
        # Made now, in the scope of a strategy, and not in a replica.
        self._histograms = None if model is None or optimizer is None else self._made_histograms()
        # In a `fit`: what counts, the function that runs steps in which it does, and what that
        # replaces in an execution; how many steps were made in it, in it before this epoch, in it
        # when histograms were last read because of `read_freq`, and before this `fit`.
        self._in_fit: ExponentHistograms | None = None
        self._counting_steps: _TrainFunction | None = None
        self._plain_steps: _TrainFunction | None = None
        self._made = self._before_epoch = self._last_read = self._before_fit = 0

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager around a step of a loop of your own, which is counted.

        It goes into the function that `strategy.run` runs, if there is a strategy. Gradients are
        counted as a `LossScaleOptimizer` or a `GradScaler` takes them, before they are summed over
        replicas, and as if they had never been scaled.

        Raises:
            ValueError: there is no model, or it is not built.
        """
        if self._histograms is None:
            with tf.init_scope():
                self._histograms = self._made_histograms()
        return self._histograms.step()

    def _made_histograms(self) -> ExponentHistograms:
        if self._watched is None:
            raise ValueError(
                "Expected the model whose steps are counted: watch(model). Received: model=None"
            )
        return ExponentHistograms(self._watched, optimizer=self._optimizer, **self._counting)

    def report(self) -> Report:
        """Returns a `Report` of what was counted.

        Raises:
            ValueError: nothing was counted yet.
        """
        self._read_own_steps()
        if not self.history:
            raise ValueError("Nothing was read yet: pass the callback to `fit` first.")
        return functools.reduce(Report.__add__, self.history)

    def _read_own_steps(self) -> None:
        """Keeps what was counted in a loop of the program's since the last time."""
        if self._histograms is not None:
            self._keep(self._histograms.read())

    def _keep(self, report: Report) -> None:
        if report.counted:
            self.history.append(report)

    def _lines(self, rows: int | None) -> list[str]:
        parts = [str(each) for each in self.found]
        self._read_own_steps()
        if self.history:
            parts.append(self.report().to_text(rows=rows))
        return ["\n\n".join(parts) or "Nothing was counted, and all results were finite."]

    def plot(
        self,
        dtype: str | None = None,
        *,
        tolerance: float = 0.001,
        history: Any = None,
        ax: Any = None,
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
        self._read_own_steps()
        if not self.history:
            raise ValueError("Expected at least one report. Received: []")
        steps = [report.step for report in self.history]
        dtype = dtype or self.history[-1].dtype
        windows = [report.window(dtype, tolerance) for report in self.history]
        ax = new_figure(__name__, (8, 4)).subplots() if ax is None else ax
        path: Any = getattr(history, "history", history)
        if path is None:
            path = {"step": steps, "loss_scale": [report.loss_scale for report in self.history]}
        scales = np.log2(path["loss_scale"])
        # An open end is drawn at the edge of the picture.
        ends = [end for each in windows for end in each if abs(end) < EVERYWHERE.high]
        bottom, top = min([*scales, *ends]) - 2, max([*scales, *ends]) + 2
        low, high = np.clip(np.transpose(windows), bottom, top)
        marker = "." if len(steps) <= _MOST_MARKED else None
        ax.plot(steps, low, color="tab:orange", label="too small below", marker=marker)
        ax.plot(steps, high, color="tab:red", label="overflows above", marker=marker)
        ax.fill_between(steps, low, high, where=low <= high, color="tab:green", alpha=0.15)
        ax.plot(path["step"], scales, color="tab:blue", label="loss scale", marker=marker)
        title = f"Loss scales at which {dtype} loses nothing"
        ax.set(ylim=(bottom, top), xlabel="step", ylabel="loss scale (exponent of 2)", title=title)
        ax.legend()
        ax.grid(alpha=0.3)
        return ax

    def to_dict(self) -> dict[str, Any]:
        """Returns what was not finite, and the report, as JSON has them."""
        self._read_own_steps()
        found = [str(each) for each in self.found]
        return {"found": found, "report": self.report().to_dict() if self.history else None}

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
        other = getattr(model.train_function, "__self__", None)
        # All callbacks of a `fit` share their parameters. An error has ended any other `fit`.
        if isinstance(other, watch) and other.params is self.params:
            raise ValueError(
                "Expected one `watch` in a `fit`: each counts in steps of its own. "
                f"Received: {other!r} and {self!r}"
            )
        if not model.built:
            return  # Keras 2 builds a model with its first batch, which is not counted then.
        plain = model.train_function
        if self._in_fit is None:
            self._in_fit = ExponentHistograms(model, **self._counting)
            with self._counting_step(self._in_fit):
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
            self._read()

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
        self._read()

    def _counting_step(
        self, histograms: ExponentHistograms
    ) -> contextlib.AbstractContextManager[None]:
        """Wraps the step that Keras makes a function of, while it makes or traces it."""
        # As a decorator, which enters it in each call.
        counted = histograms.step()(self.model.train_step)
        # Keras 3 keeps the method that it finds now, which goes on counting after the block.
        return attributes.replaced(self.model, "train_step", counted)

    def _count(self, iterator: tf.data.Iterator) -> Mapping[str, tf.Tensor]:
        """Runs one execution of `fit` that counts; the next one is Keras's own again."""
        self.model.train_function = self._plain_steps
        histograms, steps = cast(Any, self._in_fit), cast(_TrainFunction, self._counting_steps)
        histograms.go_on_from(self._made)
        with self._counting_step(histograms):
            return steps(iterator)

    def _read(self) -> None:
        if self._in_fit is not None:
            report = self._in_fit.read()
            report.step = self._before_fit + self._made
            self._keep(report)
