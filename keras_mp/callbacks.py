"""Callbacks that log the loss scale while a model trains.

They are for TensorBoard and for pictures.
"""

from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from keras_mp import keras_api, policy
from keras_mp.loss_scale_optimizer import LossScaleOptimizer, wrappers_among
from keras_mp.support import messages
from keras_mp.support.frequency import epoch_or_integer

if TYPE_CHECKING:
    from keras_mp.step.overflow import Overflow


class LossScaleMonitor(keras_api.BaseCallback):
    """Puts `loss_scale` and `steps_skipped` into the logs of `Model.fit`.

    Everything that reads logs then shows them: progress bars, `History`, `CSVLogger`,
    `TensorBoard`, and file names of `ModelCheckpoint` such as
    `"{epoch}-{loss_scale:.0f}.keras"`. Put it first in the list of callbacks: Keras runs them in
    that order, and callbacks before it do not see the values. The progress bar and the `History`
    that `fit` returns run last, unless they are in the list.

    The values are read from the device at the end of each epoch. If `update_freq` is a number, they
    are also read every `update_freq` batches, and the logs of each batch have the values that were
    read last; the batches in between do not wait for the device. The progress bars of Keras 2 and
    of Keras 3 before 3.15 then show the mean of each value over the epoch; with Keras 2, this is
    not so if `callbacks` has a `tf.keras.callbacks.ProgbarLogger("steps",
    stateful_metrics=["loss_scale", "steps_skipped"])`.

    If steps were skipped between two reads, `absl.logging` shows a line at the level "info". It
    names the gradients that were not finite in the last of these steps.

    `evaluate` and `predict` log nothing. If a model trains without loss scaling, its logs stay as
    they are, so a program with a flag for the dtype can always have this callback; there is a
    warning if a layer computes in float16, which needs loss scaling. If a model has several
    optimizers, the first one that scales the loss is shown. The `LossScaleOptimizer` of `tf.keras`
    is not shown, since it does not count skipped steps; there is a warning.

    Args:
        update_freq: `"epoch"` (the default), or an int, the number of batches between reads.

    Attributes:
        history: dict with the lists "step" (int, steps attempted so far, including skipped ones),
            "loss_scale" (float) and "steps_skipped" (int, in total). Each has one entry for the
            start of training and one for each time the values are read. `keras_mp.plots.loss_scale`
            draws it. A second `fit` continues it, unless the model has made fewer steps by then.
        overflows: list of `keras_mp.Overflow`. For each read before which steps were skipped, it
            has the last one of them. It is kept as long as `history`.

    Raises:
        TypeError: `update_freq` is neither a str nor an int.
        ValueError: it is a str other than "epoch", or an int below 1.

    Example:

    >>> model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
    >>> optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD(0.01))
    >>> model.compile(optimizer, "mse")
    >>> monitor = keras_mp.callbacks.LossScaleMonitor()
    >>> history = model.fit(
    ...     tf.ones([8, 1]), tf.ones([8, 1]), 4, epochs=2, callbacks=[monitor], verbose=0
    ... )
    >>> history.history["loss_scale"], history.history["steps_skipped"]
    ([32768.0, 32768.0], [0, 0])
    >>> monitor.history["step"]
    [0, 2, 4]
    """

    def __init__(self, update_freq: str | int = "epoch") -> None:
        super().__init__()
        self.update_freq = epoch_or_integer("update_freq", update_freq)
        self.history: dict[str, list[float]] = {"step": [], "loss_scale": [], "steps_skipped": []}
        self.overflows: list[Overflow] = []
        self._latest: dict[str, float | int] = {}
        self._next_read = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Warns if the model computes in float16 and trains without loss scaling.

        Args:
            logs: not used.
        """
        self._latest = {}
        what = f"LossScaleMonitor has nothing to show of the model {self.model.name!r}"
        layers = keras_api.flatten_layers(self.model)
        _warn_if_unscaled(what, self.model.optimizer, {layer.compute_dtype for layer in layers})

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads the values at the start of training.

        Args:
            epoch: not used.
            logs: not used.
        """
        # Not when training begins: callbacks may restore an interrupted run there.
        if not self._latest:
            self._read()
        self._next_read = 0 if isinstance(self.update_freq, str) else self.update_freq

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the values into the logs, unless only epochs are logged.

        Args:
            batch: int, the number of the batch in the epoch, from 0.
            logs: dict to put them into.
        """
        if isinstance(self.update_freq, str):
            return
        if batch + 1 >= self._next_read:
            self._read()
            self._next_read = batch + 1 + self.update_freq
        if logs is not None:
            logs.update(self._latest)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads the values and puts them into the logs.

        Args:
            epoch: not used.
            logs: dict to put them into.
        """
        self._read()
        if logs is not None:
            logs.update(self._latest)

    def _read(self) -> None:
        optimizer = _scaling(self.model.optimizer)
        if optimizer is None:
            return
        scale, skipped = float(optimizer.loss_scale()), int(optimizer.steps_skipped)
        skipped_before = self._latest.get("steps_skipped", skipped)
        self._latest = {"loss_scale": scale, "steps_skipped": skipped}
        step = int(_steps(optimizer))
        steps = self.history["step"]
        if steps and step < steps[-1]:
            for values in (*self.history.values(), self.overflows):
                values.clear()
        if not steps or step > steps[-1]:
            for name, value in {"step": step, **self._latest}.items():
                self.history[name].append(value)
        overflow = optimizer.last_overflow if skipped > skipped_before else None
        if overflow is not None:
            self.overflows.append(overflow)
            logging.info("%s", overflow.summary)


def write_loss_scale(
    optimizer: tf.keras.optimizers.Optimizer, step: int | tf.Tensor | None = None
) -> None:
    """Writes `loss_scale` and `steps_skipped` for TensorBoard.

    It is for a training loop of your own, and writes scalars of these names to the default writer
    of `tf.summary`. In a `tf.function` nothing waits for the device. Like everything in
    `tf.summary`, it needs the package tensorboard, does not run in functions that XLA compiles, and
    belongs outside `strategy.run`. Without loss scaling, it writes nothing. There is a warning if
    the global policy is "mixed_float16", which needs loss scaling, or if the optimizer is the
    `LossScaleOptimizer` of `tf.keras`, which does not count skipped steps.

    Args:
        optimizer: A `keras_mp.LossScaleOptimizer`, or an optimizer that wraps one.
        step: int or int64 scalar tensor. Defaults to TensorFlow's default step
            (`tf.summary.experimental.set_step`) and, if that is not set, to the number of steps
            attempted so far, including skipped ones.

    Raises:
        TypeError: `optimizer` is not an optimizer of `tf.keras`.

    Example:

    >>> import tempfile
    >>> optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD(0.01))
    >>> v = tf.Variable(1.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with tf.summary.create_file_writer(folder).as_default():
    ...         for _ in range(3):
    ...             _ = optimizer.minimize(lambda: v**2, [v])
    ...             keras_mp.callbacks.write_loss_scale(optimizer)
    """
    if not isinstance(optimizer, keras_api.OPTIMIZER_BASES):
        raise TypeError(
            f"Expected an optimizer of `tf.keras`, which is {keras_api.ROOT_PACKAGE} in this "
            f"process. Received: optimizer={optimizer!r} (of type {type(optimizer)})"
        )
    dtypes = {policy.global_policy().compute_dtype}
    _warn_if_unscaled("write_loss_scale has nothing to write", optimizer, dtypes)
    scaling = _scaling(optimizer)
    if scaling is None:
        return
    if step is None:
        step = tf.summary.experimental.get_step()
    if step is None:
        step = _steps(scaling)
    tf.summary.scalar("loss_scale", scaling.loss_scale(), step=step)
    tf.summary.scalar("steps_skipped", scaling.steps_skipped, step=step)


def _warn_if_unscaled(what: str, optimizer: Any, dtypes: set[str]) -> None:
    is_kerass_own = isinstance(optimizer, keras_api.KerasLossScaleOptimizer)
    if _scaling(optimizer) is None and ("float16" in dtypes or is_kerass_own):
        messages.warn(
            f"{what}: the optimizer is not a keras_mp.LossScaleOptimizer, which float16 needs. "
            "Wrap it in one, as Model.compile does under "
            f'keras_mp.set_global_policy("mixed_float16"). Received: optimizer={optimizer!r}'
        )


def _scaling(optimizers: tf.keras.optimizers.Optimizer | None) -> LossScaleOptimizer | None:
    """Returns the first optimizer that scales the loss, if there is one."""
    return next(iter(wrappers_among(optimizers)), None)


def _steps(optimizer: LossScaleOptimizer) -> tf.Tensor:
    """Returns how many steps were attempted.

    A skipped one does not advance `iterations`.
    """
    return tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.int64) + optimizer.steps_skipped
