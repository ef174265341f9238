"""What happens while a model trains? Exponents, and the first operation that is not finite."""

import contextlib
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.numerics import figures
from keras_mp.numerics.advice import Advice
from keras_mp.numerics.advise import advise
from keras_mp.numerics.exponent_monitor import ExponentMonitor
from keras_mp.numerics.first_bad_operation import FirstBadOperation
from keras_mp.numerics.histograms import ExponentHistograms
from keras_mp.numerics.not_finite import NotFiniteError
from keras_mp.numerics.reports import Report
from keras_mp.numerics.results import Result
from keras_mp.support import text_tables


class watch(ExponentMonitor, Result):
    """Watches a model while it trains: in `fit`, or in a loop of your own.

    As a callback of `fit`, or by `step` in a loop of your own, it counts the exponents of
    gradients, outputs, weights and updates, on the device, in some of the steps. As a context
    manager it looks at each operation, and raises at the step where the first one is not finite,
    with its layer and line; that takes several times as long. The two go together:

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
        inputs: the same for what layers are called with. Defaults to False.
        weights: the same for trainable variables. Defaults to False.
        updates: the same for what a step adds to them. Defaults to False.
        first_step: int. The first step that is counted, from 0. Defaults to 0.
        last_step: int or None. The last step that may be counted. Defaults to None: no limit.
        read_freq: `"epoch"` (the default), or an int, the number of batches between reads in `fit`.
        all_workers: bool. Whether to read what the replicas of all workers have counted.
        include: patterns of operations and layers that the context manager looks at. Defaults to
            all.
        exclude: patterns of those that it does not look at.
        raises: bool. Whether it stops the program. If False, it warns, and `found` keeps what was
            found. Defaults to True.

    Raises:
        NotFiniteError: from the block, the first operation that is not finite.
        TypeError: an argument is of another type.
        ValueError: a number or a path is wrong.

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
        inputs: bool | Iterable[str] = False,
        weights: bool | Iterable[str] = False,
        updates: bool | Iterable[str] = False,
        first_step: int = 0,
        last_step: int | None = None,
        read_freq: str | int = "epoch",
        all_workers: bool = False,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        raises: bool = True,
    ) -> None:
        if model is not None:
            keras_api.check_model(model)
        self._watched, self._optimizer = model, optimizer
        super().__init__(
            every,
            gradients,
            outputs,
            output_gradients,
            read_freq,
            all_workers,
            inputs=inputs,
            weights=weights,
            updates=updates,
            first_step=first_step,
            last_step=last_step,
        )
        # Made now, in the scope of a strategy, and not in a replica.
        self._histograms = None if model is None or optimizer is None else self._made_histograms()
        scaled = [each for each in (model, *tf.nest.flatten(optimizer)) if each is not None]
        self._first_bad = FirstBadOperation(
            *scaled, include=include, exclude=exclude, raises=raises
        )

    @property
    def found(self) -> list[NotFiniteError]:
        """The operations that were not finite, each once, the first of each step."""
        return self._first_bad.found

    @property
    def planned(self) -> int:
        """How many steps had gradients that overflowed as the loss scale expects."""
        return self._first_bad.planned

    def __enter__(self) -> "watch":
        self._first_bad.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._first_bad.__exit__(kind, error, traceback)

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
        return ExponentHistograms(self._watched, optimizer=self._optimizer, **self._arguments)

    def report(self) -> Report:
        """Returns a `Report` of what was counted.

        Raises:
            ValueError: nothing was counted yet.
        """
        self._read_own_steps()
        return super().report()

    def _read_own_steps(self) -> None:
        """Keeps what was counted in a loop of the program's since the last time."""
        if self._histograms is not None:
            read = self._histograms.read(self.all_workers)
            if read.counted:
                self.history.append(read)

    def advice(self, dtype: str = "float16", tolerance: float = 0.001) -> Advice:
        """Returns what follows from the report: a loss scale, and layers that need float32.

        Args:
            dtype: "float16" (the default) or "bfloat16".
            tolerance: float. Which share of a gradient may become zero. Defaults to 0.001.
        """
        return advise(self.report(), dtype, tolerance)

    def to_text(self, rows: int | None = text_tables.MOST) -> str:
        """Returns what `print` shows: what was not finite, and the report.

        Args:
            rows: int. How many rows of the report are shown at most; None for all. Defaults to 10.
        """
        parts = [str(each) for each in self.found]
        self._read_own_steps()
        if self.history:
            parts.append(self.report().to_text(rows=rows))
        return "\n\n".join(parts) or "Nothing was counted, and all results were finite."

    def plot(
        self,
        dtype: str = "float16",
        *,
        tolerance: float = 0.001,
        history: Any = None,
        ax: Any = None,
    ) -> Any:
        """Draws the window of loss scales in which nothing is lost, read after read.

        Args:
            dtype: "float16" (the default), "bfloat16", "float8_e4m3fn" or "float8_e5m2".
            tolerance: float. Which share of a gradient may become zero. Defaults to 0.001.
            history: that of a `keras_mp.callbacks.LossScaleMonitor` of the same `fit`, for the
                loss scale of each step.
            ax: Matplotlib's `Axes`. Defaults to those of a new figure.

        Returns:
            The `Axes`.
        """
        self._read_own_steps()
        return figures.window(self.history, dtype, tolerance=tolerance, history=history, ax=ax)

    def to_dict(self) -> dict[str, Any]:
        """Returns what was not finite, and the report, as JSON has them."""
        self._read_own_steps()
        found = [str(each) for each in self.found]
        return {"found": found, "report": self.report().to_dict() if self.history else None}
