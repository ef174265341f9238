"""Histograms of exponents in `fit`: a callback that reads what `ExponentHistograms` counts."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.numerics.histograms import ExponentHistograms
from keras_mp.numerics.reports import Report
from keras_mp.support import attributes, validation

_TrainFunction = Callable[[tf.data.Iterator], Mapping[str, tf.Tensor]]


class _Attached(NamedTuple):
    """The objects that the monitor uses while a `fit` runs.

    Attributes:
        histograms: what counts.
        plain: runs one execution of `fit`, of one or more steps, as Keras made it.
        counting: runs an execution in which the histograms count.
    """

    histograms: ExponentHistograms
    plain: _TrainFunction
    counting: _TrainFunction


class ExponentMonitor(keras_api.BaseCallback):
    """Gathers histograms of exponents in `Model.fit`.

    They are gathered as `ExponentHistograms` says, and read at the end of each epoch, or after a
    number of batches. Steps that are not counted run the function that `fit` runs without this
    callback; those that are counted run another one, which is traced, or compiled by XLA, beside
    it.

    Args:
        every: int. The first step is counted, and then one in so many. Defaults to 100.
        gradients: bool or iterable of str. Counts the gradients of variables: of all, or of those
            with these paths. Paths may be patterns such as `"decoder/*"`. Defaults to True.
        outputs: bool or iterable of str. The same for the outputs of layers. Defaults to True.
        output_gradients: bool or iterable of str. The same for the gradients of outputs. Defaults
            to False.
        read_freq: `"epoch"` (the default), or an int, the number of batches between reads.
        all_workers: bool. Whether to read what the replicas of all workers have counted. Then all
            of them need this callback, as they wait for each other. Defaults to False: each worker
            reads what its own replicas have counted.
        inputs: bool or iterable of str. The same as `gradients` for what layers are called with.
            Defaults to False.
        weights: bool or iterable of str. The same as `gradients` for trainable variables, as they
            are when they are read, with all digits that a `MasterWeightOptimizer` keeps. Defaults
            to False.
        updates: bool or iterable of str. The same for what a step adds to them, relative to each
            weight: how much of it would arrive in variables of 16 bits, and at which learning
            rates. Defaults to False.
        first_step: int. The first step of a `fit` that is counted, from 0. Defaults to 0.
        last_step: int or None. The last step that may be counted. Defaults to None: no limit.

    Attributes:
        history: list of `Report`s, one for each read of something that was counted. A second `fit`
            continues it.

    Raises:
        TypeError: `read_freq` is neither a str nor an int.
        ValueError: it is a str other than "epoch", a number is below 1, or a `fit` has two of these
            callbacks.

    Example:

    >>> model = tf.keras.Sequential(
    ...     [tf.keras.Input([2]), tf.keras.layers.Dense(1, name="dense")]
    ... )
    >>> model.compile(keras_mp.LossScaleOptimizer("sgd"), "mse")
    >>> monitor = keras_mp.numerics.exponent_monitor.ExponentMonitor(every=2)
    >>> _ = model.fit(
    ...     tf.ones([8, 2]), tf.ones([8, 1]), 2, epochs=2, callbacks=[monitor], verbose=0
    ... )
    >>> [(report.step, report.counted) for report in monitor.history]
    [(4, 2), (8, 2)]
    >>> monitor.report().window("bfloat16").is_empty
    False
    """

    def __init__(
        self,
        every: int = 100,
        gradients: bool | Iterable[str] = True,
        outputs: bool | Iterable[str] = True,
        output_gradients: bool | Iterable[str] = False,
        read_freq: str | int = "epoch",
        all_workers: bool = False,
        *,
        inputs: bool | Iterable[str] = False,
        weights: bool | Iterable[str] = False,
        updates: bool | Iterable[str] = False,
        first_step: int = 0,
        last_step: int | None = None,
    ) -> None:
        super().__init__()
        self.read_freq = validation.epoch_or_integer("read_freq", read_freq)
        self.all_workers = validation.boolean("all_workers", all_workers)
        self.history: list[Report] = []
        self._arguments = {
            "every": validation.integer("every", every),
            "gradients": gradients,
            "outputs": outputs,
            "output_gradients": output_gradients,
            "inputs": inputs,
            "weights": weights,
            "updates": updates,
            "first_step": first_step,
            "last_step": last_step,
        }
        self._attached: _Attached | None = None
        # How many steps were made: in this `fit`, in it before this epoch, in it when histograms
        # were last read because of `read_freq`, and before this `fit`.
        self._made = self._before_epoch = self._last_read = self._before_fit = 0
        self._is_called = False

    def report(self) -> Report:
        """Returns the sum of what was read so far.

        Raises:
            ValueError: nothing was read yet.
        """
        if not self.history:
            raise ValueError("Nothing was read yet: pass the callback to `fit` first.")
        return functools.reduce(Report.__add__, self.history)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Attaches the monitor to the training step.

        Args:
            logs: not used.
        """
        self._detach()  # if an error has ended the `fit` before
        if self.model.built:
            self._attach()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the epoch begins.

        Args:
            epoch: not used.
            logs: not used.
        """
        self._before_epoch = self._last_read = self._made

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that the next steps belong to a `fit` with this callback.

        Args:
            batch: not used.
            logs: not used.
        """
        self._is_called = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads, if that is due after this batch.

        Args:
            batch: not used.
            logs: not used.
        """
        if self._attached is None:
            # Keras 2 builds a model with its first batch, which is not counted then.
            self._attach()
        elif isinstance(self.read_freq, int) and self._made >= self._last_read + self.read_freq:
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

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the training step back as it was.

        Args:
            logs: not used.
        """
        self._detach()

    def _attach(self) -> None:
        model = self.model
        other = getattr(model.train_function, "__self__", None)
        if isinstance(other, ExponentMonitor):
            # All callbacks of a `fit` share their parameters. An error has ended any other `fit`.
            if other.params is self.params:
                raise ValueError(
                    "Expected one `watch` in a `fit`: each counts in steps of its own. "
                    f"Received: {other!r} and {self!r}"
                )
            other._detach()
        histograms = ExponentHistograms(model, **self._arguments)
        self._made = self._before_epoch = self._last_read = 0
        self._before_fit = self.history[-1].step if self.history else 0
        plain = model.train_function
        with self._counting_steps(histograms):
            model.make_train_function(force=True)
        self._attached = _Attached(histograms, plain, model.train_function)
        model.train_function = self._execute

    def _detach(self) -> None:
        if self._attached is not None:
            model = self._attached.histograms.model
            if model.train_function == self._execute:  # unless it was compiled meanwhile
                model.train_function = self._attached.plain
            self._attached = None

    def _counting_steps(
        self, histograms: ExponentHistograms
    ) -> contextlib.AbstractContextManager[None]:
        """Wraps the step that Keras makes a function of, while it makes or traces it."""
        # As a decorator, which enters it in each call.
        counted = histograms.step()(self.model.train_step)
        # Keras 3 keeps the method that it finds now, which goes on counting after the block.
        return attributes.replaced(self.model, "train_step", counted)

    def _execute(self, iterator: tf.data.Iterator) -> Mapping[str, tf.Tensor]:
        """Runs one execution of `fit`, with the function that counts if one of its steps is due."""
        histograms, plain, counting = cast(_Attached, self._attached)
        if not self._is_called:  # An error has ended the `fit` that had this callback.
            self._detach()
            return plain(iterator)
        self._is_called = False
        steps = keras_api.steps_per_execution(self.model)
        if not histograms.is_due(self._made, steps):
            logs = plain(iterator)
        else:
            histograms.go_on_from(self._made)
            with self._counting_steps(histograms):
                logs = counting(iterator)
        self._made += steps
        return logs

    def _read(self) -> None:
        if self._attached is not None:
            report = self._attached.histograms.read(self.all_workers)
            report.step = self._before_fit + self._made
            if report.counted:
                self.history.append(report)
