"""Trains one small model in float32 and mixed precision, and compares them.

It is a convolutional model of scikit-learn's digits. A table and a picture compare the loss, the
loss scale and the time under each policy. For a saved model of your own:

python -m keras_mp check MODEL.keras BATCH.npz
python -m keras_mp watch MODEL.keras BATCHES.npz
python -m keras_mp tune MODEL.keras BATCHES.npz --output MIXED.keras
python -m keras_mp profile MODEL.keras BATCH.npz
"""

import argparse
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import keras_mp
from keras_mp.numerics import commands
from keras_mp.support import text_tables

_COMMANDS = ("check", "watch", "tune", "profile")
_SEED, _BATCH_SIZE = 0, 32
# The default of 2000 good steps is for runs of many thousand steps. In the few hundred steps of
# this run, the scale would never move. With a short period, it grows until gradients overflow.
_INCREMENT_PERIOD = 20
# The first step traces the graph and builds the optimizer; the next two warm caches up.
_WARM_UP_STEPS = 3
# A smaller gain in speed is not worth another dtype, and may be noise.
_LEAST_GAIN = 1.1
_SMOOTHED_STEPS = 15
# The policies, and their lines. Of two that cover each other, both can be seen if one is dashed.
_LINES: dict[str, dict[str, Any]] = {
    "float32": {"color": "black", "linewidth": 2.2, "alpha": 0.45},
    "mixed_float16": {"color": "tab:red", "linewidth": 1.2},
    "mixed_bfloat16": {"color": "tab:blue", "linewidth": 1.2, "linestyle": "--"},
}
_HEADER = ("policy", "test accuracy", "loss scale at end", "steps skipped", "ms per step")
_NOTES = f"""
ms per step: median, without the first steps, which trace.
activation bytes: all layers' outputs for one batch of {_BATCH_SIZE}, by tensors' shapes and dtypes.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Trains under each policy, prints the comparison and writes the picture.

    Args:
        argv: Arguments of the command line; None for the process's own.

    Returns:
        The exit status: 0, or that of the command that the arguments begin with.

    Raises:
        SystemExit: an option is wrong, or matplotlib or scikit-learn is missing.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in _COMMANDS:
        return commands.main(argv)
    options = _parse(argv)
    data = _load_digits()
    strategies = {"none": tf.distribute.get_strategy, "mirrored": _mirrored_strategy}
    strategy, best = strategies[options.strategy](), keras_mp.hardware.best_policy
    policies = dict.fromkeys(best() if name == "best" else name for name in options.policy)
    runs = [_Run(name, data, options.epochs, strategy) for name in policies]
    rows = [(*_HEADER, "activation bytes"), *(run.cells() for run in runs)]
    print(_NOTES, *text_tables.aligned(rows), sep="\n")
    _compare_times({run.policy: run.milliseconds for run in runs})
    _plot(runs, options.output)
    print(f"\nThe picture is in {options.output.resolve()}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m keras_mp", None, __doc__, formatter_class=as_it_is)
    add = parser.add_argument
    for_policy = "may be repeated (default: all three); best: the fastest on this machine"
    add("--policy", action="append", choices=(*_LINES, "best"), help=for_policy)
    # After so many epochs, every policy is within a percent of the accuracy that more would give.
    add("--epochs", type=int, default=5, help="default: %(default)s")
    for_strategy = "mirrored: MirroredStrategy on all GPUs, or on two halves of the CPU"
    add("--strategy", choices=("none", "mirrored"), default="none", help=for_strategy)
    path, for_output = "keras_mp_digits.png", "the picture, a PNG (default: %(default)s)"
    add("--output", type=pathlib.Path, default=path, metavar="PATH", help=for_output)
    options = parser.parse_args(argv)
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1, received {options.epochs}")
    if options.output.is_dir() or not options.output.parent.is_dir():
        parser.error(f"--output must be a file in an existing folder, received {options.output}")
    options.policy = options.policy or tuple(_LINES)
    return options


def _mirrored_strategy() -> tf.distribute.Strategy:
    if not tf.config.list_physical_devices("GPU"):
        # One CPU would make one replica, with nothing to reduce.
        [cpu, *_] = tf.config.list_physical_devices("CPU")
        halves = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, halves)
    strategy = tf.distribute.MirroredStrategy()
    print(f"MirroredStrategy with {strategy.num_replicas_in_sync} replicas")
    return strategy


def _load_digits() -> list[Any]:
    """Returns training images, test images, training labels and test labels."""
    try:
        import matplotlib  # noqa: F401
        from sklearn import datasets, model_selection
    except ImportError as error:
        sys.exit(
            f"python -m keras_mp needs matplotlib and scikit-learn ({error}). Install them with\n"
            '    pip install "keras-mp[tutorials]"'
        )
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    return model_selection.train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=_SEED
    )


class _Run(tf.keras.callbacks.Callback):
    """Trains a model under a policy, and records each step's loss and seconds."""

    def __init__(self, policy: str, data: list[Any], epochs: int, strategy: Any) -> None:
        super().__init__()
        train_images, test_images, train_labels, test_labels = data
        self.policy, self.losses, self.seconds, self.sum = policy, [], [], 0.0
        self.monitors, loss_scale = [], None
        if policy == "mixed_float16":
            self.monitors = [keras_mp.callbacks.LossScaleMonitor(update_freq=1)]
            loss_scale = keras_mp.DynamicLossScale(increment_period=_INCREMENT_PERIOD)
        # Every policy gets the same initial weights and the same order of batches.
        tf.keras.utils.set_random_seed(_SEED)
        images = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
        shuffled = images.shuffle(len(train_labels), seed=_SEED)
        # Endless, since MirroredStrategy takes most of a second to start a data set anew.
        batches = shuffled.batch(_BATCH_SIZE, drop_remainder=True).repeat()
        steps = len(train_labels) // _BATCH_SIZE
        how: Any = {"epochs": epochs, "steps_per_epoch": steps, "callbacks": [self, *self.monitors]}
        with keras_mp.policy_scope(keras_mp.Policy(policy, loss_scale=loss_scale)):
            with strategy.scope():
                model = _compiled_model(epochs * steps)
            model.fit(batches, shuffle=False, verbose=0, **how)
            size = len(test_labels)
            scores: Any = model.evaluate(test_images, test_labels, batch_size=size, verbose=0)
        self.accuracy = scores[1]
        self.milliseconds = 1000 * statistics.median(self.seconds[_WARM_UP_STEPS:])
        self.activation_bytes = _activation_bytes(model, train_images[:_BATCH_SIZE])

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.sum = self.sum if batch else 0.0
        self.seconds.append(-time.perf_counter())

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Keras logs the mean since the start of the epoch. The batch's own loss follows from it.
        # Reading it waits for the device, so this is part of the time.
        before, self.sum = self.sum, float((logs or {})["loss"]) * (batch + 1)
        self.seconds[-1] += time.perf_counter()
        self.losses.append(self.sum - before)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        print(f"{self.policy}, epoch {epoch + 1}: loss {(logs or {})['loss']:.4f}", flush=True)

    def cells(self) -> tuple[str, ...]:
        """Returns the row of the table."""
        scale, skipped = "none", 0
        for monitor in self.monitors:
            scale = f"{monitor.history['loss_scale'][-1]:.0f}"
            skipped = monitor.history["steps_skipped"][-1]
        steps = f"{skipped} of {len(self.losses)}"
        measured = (f"{self.milliseconds:.2f}", f"{self.activation_bytes}")
        return (self.policy, f"{self.accuracy:.4f}", scale, steps, *measured)


def _compiled_model(total_steps: int) -> tf.keras.Model:
    layers = tf.keras.layers
    conv = functools.partial(layers.Conv2D, kernel_size=3, padding="same", activation="relu")
    hidden = [conv(16), conv(32), layers.MaxPooling2D(), conv(32), layers.Flatten()]
    # dtype="float32" is not needed at the end: the model returns float32, and so does the loss.
    model = tf.keras.Sequential([layers.Input((8, 8, 1)), *hidden, layers.Dense(10)])
    # The rate decays, so that the accuracy at the end is not an accident of the last few batches.
    rate = tf.keras.optimizers.schedules.CosineDecay(3e-3, total_steps)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


def _activation_bytes(model: tf.keras.Model, batch: np.ndarray) -> int:
    outputs, tensor = [model(batch)], batch  # the logits as the model returns them, in float32
    for layer in model.layers[:-1]:
        tensor = layer(tensor)
        outputs.append(tensor)
    return sum(each.dtype.size * int(tf.size(each)) for each in outputs)


def _compare_times(by_policy: dict[str, float]) -> None:
    """Says what 16 bits bring on this machine; nothing if float32 was not run."""
    float32 = by_policy.pop("float32", None)
    if float32 is None or not by_policy:
        return
    speeds = {policy: float32 / milliseconds for policy, milliseconds in by_policy.items()}
    measured = " and ".join(f"{policy} ran at {speed:.2f}" for policy, speed in speeds.items())
    faster = [policy for policy, speed in speeds.items() if speed >= _LEAST_GAIN]
    gain = f"16 bits pay off with {' and '.join(faster)}" if faster else "16 bits bring no gain"
    print(
        f"\nOn this machine {measured} times the speed of float32: for this small model {gain}. "
        "`python -m keras_mp.hardware` measures larger ones."
    )


def _plot(runs: Sequence[_Run], path: pathlib.Path) -> None:
    # A figure without pyplot is drawn with Agg, and leaves the process's own backend alone.
    from matplotlib.figure import Figure

    monitors = [monitor for run in runs for monitor in run.monitors]
    figure = Figure(figsize=(9, 7 if monitors else 4), layout="constrained")
    axes = figure.subplots(2 if monitors else 1, sharex=True, squeeze=False)[:, 0]
    window = np.full(_SMOOTHED_STEPS, 1 / _SMOOTHED_STEPS)
    for run in runs:
        smoothed = np.convolve(run.losses, window, mode="valid")
        steps = np.arange(len(smoothed)) + _SMOOTHED_STEPS
        label = f"{run.policy}, test accuracy {run.accuracy:.1%}"
        axes[0].plot(steps, smoothed, label=label, **_LINES[run.policy])
    axes[0].set_title("Scikit-learn's digits: the same model under each policy")
    axes[0].set(yscale="log", ylabel=f"training loss\n(mean of {_SMOOTHED_STEPS} steps)")
    axes[0].legend(loc="upper right")
    axes[0].grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    for monitor in monitors:
        keras_mp.plots.loss_scale(monitor, axes[1])
    figure.savefig(path, format="png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
