"""The callbacks of `python -m keras_mp`: a recorder of steps, and a progress bar."""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import tensorflow as tf


class StepRecorder(tf.keras.callbacks.Callback):
    """Records each training step, if all batches have one size.

    Attributes:
        losses: list of float, the loss of each batch.
        seconds: list of float, the duration of each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._epoch_total = 0.0
        self._start = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Resets the running total."""
        self._epoch_total = 0.0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock and records the loss."""
        # Keras logs the mean since the start of the epoch. The batch's own loss follows from it.
        # Reading it waits for the device, so this is part of the time.
        total = float((logs or {})["loss"]) * (batch + 1)
        self.seconds.append(time.perf_counter() - self._start)
        self.losses.append(total - self._epoch_total)
        self._epoch_total = total


class ProgressBar(tf.keras.callbacks.Callback):
    """Shows how much of all the training is done, and estimates the time left.

    A terminal shows one line, which is kept up to date; a file gets a line for each epoch.

    Args:
        runs: int. The number of models that are trained.
        steps_per_run: int. The number of steps for each model.
        stream: The output. Defaults to standard output.
        clock: function that returns the time in seconds. Defaults to `time.perf_counter`.
    """

    _WIDTH = 30
    _REFRESH_SECONDS = 0.2

    def __init__(
        self,
        runs: int,
        steps_per_run: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._runs, self._steps_per_run = runs, steps_per_run
        self._stream, self._clock = stream or sys.stdout, clock
        self._is_terminal = self._stream.isatty()
        self._name, self._done = "", 0
        self._started = self._shown = self._clock()
        # The first step of a model takes longer than the others: it traces and compiles.
        self._first_steps: list[float] = []
        self._other_steps: list[float] = []

    def begin(self, name: str) -> None:
        """Starts the next run.

        Args:
            name: str. The name of the run.
        """
        self._name, self._done, self._started = name, 0, self._clock()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the duration of the step."""
        now = self._clock()
        (self._other_steps if self._done else self._first_steps).append(now - self._started)
        self._started = now
        self._done += 1
        if self._is_terminal and now - self._shown >= self._REFRESH_SECONDS:
            self._show("\r", "")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Shows the progress."""
        self._show(*("\r", "") if self._is_terminal else ("", "\n"))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the line after the last run."""
        if self._is_terminal and len(self._first_steps) == self._runs:
            self._stream.write("\n")

    def _show(self, before: str, after: str) -> None:
        self._shown = self._clock()
        done = (len(self._first_steps) - 1) * self._steps_per_run + self._done
        share = done / (self._runs * self._steps_per_run)
        filled = round(share * self._WIDTH)
        bar = "=" * filled + "." * (self._WIDTH - filled)
        self._stream.write(
            f"{before}[{bar}] {share:4.0%}, about {self._seconds_left():.0f} s left: "
            f"{self._name:<14}{after}"
        )
        self._stream.flush()

    def _seconds_left(self) -> float:
        runs_left = self._runs - len(self._first_steps)
        steps_left = self._steps_per_run - self._done + runs_left * (self._steps_per_run - 1)
        per_step = statistics.fmean(self._other_steps or self._first_steps)
        return runs_left * statistics.fmean(self._first_steps) + steps_left * per_step
