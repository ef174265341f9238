"""Trains one small model in float32 and mixed precision, and compares them.

python -m keras_mp [--policy NAME|best ...] [--epochs N] [--strategy none|mirrored] [--output PATH]

It also looks at a saved model:

python -m keras_mp check MODEL.keras BATCH.npz
python -m keras_mp watch MODEL.keras BATCHES.npz
python -m keras_mp tune MODEL.keras BATCHES.npz --output MIXED.keras
python -m keras_mp profile MODEL.keras BATCH.npz
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import keras_mp
from keras_mp.callbacks import LossScaleMonitor
from keras_mp.numerics import commands
from keras_mp.support import text_tables

_POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
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
# Of two lines that cover each other, both can be seen if one is dashed and lies on a solid one.
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
    data, strategy = _load_digits(), _make_strategy(options.strategy)
    best = keras_mp.hardware.best_policy() if "best" in options.policy else ""
    policies = dict.fromkeys(best if name == "best" else name for name in options.policy)
    runs = [_Run(name, data, options.epochs, strategy) for name in policies]
    rows = [(*_HEADER, "activation bytes"), *(run.cells() for run in runs)]
    print(_NOTES, *text_tables.aligned(rows), *_compare_times(runs), sep="\n")
    _plot(runs, options.output)
    print(f"\nThe picture is in {options.output.resolve()}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m keras_mp",
        description="Trains one small convolutional model on scikit-learn's digits under each "
        "policy, prints a comparison and draws the loss and the loss scale.",
        epilog="For a model of your own: python -m keras_mp check --help; likewise watch, tune and "
        "profile.",
    )
    add = parser.add_argument
    for_policy = "may be repeated (default: all three); best: the fastest on this machine"
    add("--policy", action="append", choices=(*_POLICIES, "best"), help=for_policy)
    # After so many epochs, every policy is within a percent of the accuracy that more would give.
    add("--epochs", type=_positive_integer, default=5, help="default: %(default)s")
    for_strategy = "mirrored: MirroredStrategy on all GPUs, or on two halves of the CPU"
    add("--strategy", choices=("none", "mirrored"), default="none", help=for_strategy)
    path, for_output = "keras_mp_digits.png", "the picture, a PNG (default: %(default)s)"
    add("--output", type=_path_in_existing_folder, default=path, metavar="PATH", help=for_output)
    options = parser.parse_args(argv)
    options.policy = options.policy or _POLICIES
    return options


def _positive_integer(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, received {text}")
    return int(text)


def _path_in_existing_folder(text: str) -> pathlib.Path:
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in an existing folder, received {text}")
    return path


def _make_strategy(name: str) -> tf.distribute.Strategy | None:
    if name == "none":
        return None
    if not tf.config.list_physical_devices("GPU"):
        # One CPU would make one replica, with nothing to reduce.
        [cpu, *_] = tf.config.list_physical_devices("CPU")
        halves = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, halves)
    strategy = tf.distribute.MirroredStrategy()
    print(f"MirroredStrategy with {strategy.num_replicas_in_sync} replicas")
    return strategy


def _load_digits() -> list[np.ndarray]:
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
    parts = model_selection.train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=_SEED
    )
    return [np.asarray(part) for part in parts]


class _Steps(tf.keras.callbacks.Callback):
    """Records the loss and the seconds of each step, and says how far the training is."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._name, self._total, self._start = name, 0.0, 0.0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._total = self._total if batch else 0.0
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Keras logs the mean since the start of the epoch. The batch's own loss follows from it.
        # Reading it waits for the device, so this is part of the time.
        total = float((logs or {})["loss"]) * (batch + 1)
        self.seconds.append(time.perf_counter() - self._start)
        self.losses.append(total - self._total)
        self._total = total

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        print(f"{self._name}, epoch {epoch + 1}: loss {(logs or {})['loss']:.4f}", flush=True)


class _Run:
    """Trains a model under a policy."""

    def __init__(
        self,
        policy: str,
        data: list[np.ndarray],
        epochs: int,
        strategy: tf.distribute.Strategy | None,
    ) -> None:
        train_images, test_images, train_labels, test_labels = data
        # Every policy gets the same initial weights and the same order of batches.
        tf.keras.utils.set_random_seed(_SEED)
        images = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
        shuffled = images.shuffle(len(train_labels), seed=_SEED)
        # Endless, since MirroredStrategy takes most of a second to start a data set anew.
        batches = shuffled.batch(_BATCH_SIZE, drop_remainder=True).repeat()
        steps_per_epoch = len(train_labels) // _BATCH_SIZE
        self.policy, self.steps, self.monitor = policy, _Steps(policy), None
        loss_scale = None
        if policy == "mixed_float16":
            self.monitor = LossScaleMonitor(update_freq=1)
            loss_scale = keras_mp.DynamicLossScale(increment_period=_INCREMENT_PERIOD)
        with keras_mp.policy_scope(keras_mp.Policy(policy, loss_scale=loss_scale)):
            with strategy.scope() if strategy else contextlib.nullcontext():
                model = _make_compiled_model(epochs * steps_per_epoch)
            model.fit(
                batches,
                epochs=epochs,
                steps_per_epoch=steps_per_epoch,
                shuffle=False,
                callbacks=[self.steps, *([self.monitor] if self.monitor else [])],
                verbose=0,
            )
            size = len(test_labels)
            scores: Any = model.evaluate(test_images, test_labels, batch_size=size, verbose=0)
        self.accuracy = scores[1]
        self.milliseconds = 1000 * statistics.median(self.steps.seconds[_WARM_UP_STEPS:])
        self.activation_bytes = _activation_bytes(model, train_images[:_BATCH_SIZE])

    def cells(self) -> tuple[str, ...]:
        """Returns the row of the table."""
        scale, skipped = "none", 0
        if self.monitor is not None:
            history = self.monitor.history
            scale, skipped = f"{history['loss_scale'][-1]:.0f}", history["steps_skipped"][-1]
        steps = f"{skipped} of {len(self.steps.losses)}"
        measured = (f"{self.milliseconds:.2f}", f"{self.activation_bytes}")
        return (self.policy, f"{self.accuracy:.4f}", scale, steps, *measured)


def _make_compiled_model(total_steps: int) -> tf.keras.Model:
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Flatten(),
            # dtype="float32" is not needed here: the model returns float32, and so does the loss.
            layers.Dense(10),
        ]
    )
    # The rate decays, so that the accuracy at the end is not an accident of the last few batches.
    rate = tf.keras.optimizers.schedules.CosineDecay(3e-3, total_steps)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


def _activation_bytes(model: tf.keras.Model, batch: np.ndarray) -> int:
    outputs, tensor = [], batch
    for layer in model.layers[:-1]:
        tensor = layer(tensor)
        outputs.append(tensor)
    outputs.append(model(batch))  # The logits as the model returns them, in float32.
    return sum(each.dtype.size * int(tf.size(each)) for each in outputs)


def _compare_times(runs: Sequence[_Run]) -> list[str]:
    """Returns what 16 bits bring on this machine; nothing if float32 was not run."""
    by_policy = {run.policy: run.milliseconds for run in runs}
    float32 = by_policy.pop("float32", None)
    if float32 is None or not by_policy:
        return []
    speeds = {policy: float32 / milliseconds for policy, milliseconds in by_policy.items()}
    measured = " and ".join(f"{policy} ran at {speed:.2f}" for policy, speed in speeds.items())
    faster = [policy for policy, speed in speeds.items() if speed >= _LEAST_GAIN]
    gain = f"16 bits pay off with {' and '.join(faster)}" if faster else "16 bits bring no gain"
    return [
        f"\nOn this machine {measured} times the speed of float32: for this small model {gain}. "
        "`python -m keras_mp.hardware` measures larger ones."
    ]


def _plot(runs: Sequence[_Run], path: pathlib.Path) -> None:
    # A figure without pyplot is drawn with Agg, and leaves the process's own backend alone.
    from matplotlib.figure import Figure

    monitors = [run.monitor for run in runs if run.monitor is not None]
    figure = Figure(figsize=(9, 7 if monitors else 4), layout="constrained")
    axes = figure.subplots(2 if monitors else 1, sharex=True, squeeze=False)[:, 0]
    for run in runs:
        window = np.full(_SMOOTHED_STEPS, 1 / _SMOOTHED_STEPS)
        smoothed = np.convolve(run.steps.losses, window, mode="valid")
        steps = np.arange(len(smoothed)) + _SMOOTHED_STEPS
        label = f"{run.policy}, test accuracy {run.accuracy:.1%}"
        axes[0].plot(steps, smoothed, label=label, **_LINES[run.policy])
    axes[0].set_yscale("log")
    axes[0].set_ylabel(f"training loss\n(mean of {_SMOOTHED_STEPS} steps)")
    axes[0].set_title("Scikit-learn's digits: the same model under each policy")
    axes[0].legend(loc="upper right")
    axes[0].grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    for monitor in monitors:
        keras_mp.plots.loss_scale(monitor, axes[1])
    figure.savefig(path, format="png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
