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
import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

import keras_mp
from keras_mp.callbacks import LossScaleMonitor
from keras_mp.main_callbacks import ProgressBar, StepRecorder
from keras_mp.numerics import commands
from keras_mp.support import text_tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
_BEST = "best"
# Commands for saved models.
_COMMANDS = ("check", "watch", "tune", "profile")

_SEED = 0
_BATCH_SIZE = 32

# The default of 2000 good steps is for runs of many thousand steps. In the few hundred steps of
# this run, the scale would never move. With a short period, it grows until gradients overflow.
_INCREMENT_PERIOD = 20

# After so many epochs, every policy is within a percent of the accuracy that more of them would
# give.
_EPOCHS = 5

# The first step traces the graph and builds the optimizer; the next two warm caches up.
_WARM_UP_STEPS = 3

# A smaller gain in speed is not worth another dtype, and may be noise.
_LEAST_GAIN = 1.1

# Of two lines that cover each other, both can be seen if one is dashed and lies on a solid one.
_LINES = {
    "float32": {"color": "black", "linewidth": 2.2, "alpha": 0.45},
    "mixed_float16": {"color": "tab:red", "linewidth": 1.2},
    "mixed_bfloat16": {"color": "tab:blue", "linewidth": 1.2, "linestyle": "--"},
}
_SMOOTHED_STEPS = 15


@dataclasses.dataclass(frozen=True)
class Trained:
    """The training run of one policy.

    Attributes:
        policy: The policy's name.
        accuracy: The share of the test images that are recognized.
        activation_bytes: The size of all layers' outputs for one batch.
        steps: The loss and the duration of each step.
        monitor: The loss scale at each step, or None without loss scaling.
    """

    policy: str
    accuracy: float
    activation_bytes: int
    steps: StepRecorder
    monitor: LossScaleMonitor | None

    def cells(self) -> tuple[str, ...]:
        """Returns the row of the table."""
        scale, skipped = "none", 0
        if self.monitor is not None:
            history = self.monitor.history
            scale, skipped = f"{history['loss_scale'][-1]:.0f}", history["steps_skipped"][-1]
        return (
            self.policy,
            f"{self.accuracy:.4f}",
            scale,
            f"{skipped} of {len(self.steps.losses)}",
            f"{self.milliseconds:.2f}",
            f"{self.activation_bytes}",
        )

    @property
    def milliseconds(self) -> float:
        """The median time of a step."""
        return 1000 * statistics.median(self.steps.seconds[_WARM_UP_STEPS:])


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
    _require_extras()
    strategy = _make_strategy(options.strategy)
    policies = _named(options.policy)
    data = _load_digits()
    steps_per_epoch = len(data[0]) // _BATCH_SIZE
    progress = ProgressBar(len(policies), options.epochs * steps_per_epoch)
    results = [_train(policy, data, options.epochs, strategy, progress) for policy in policies]
    print(f"\n{_format_table(results)}")
    for line in _compare_times(results):
        print(f"\n{line}")
    _plot(results, options.output)
    print(f"\nThe picture is in {options.output.resolve()}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m keras_mp",
        description="Trains one small convolutional model on scikit-learn's digits under each "
        "policy, prints a comparison and draws the loss and the loss scale.",
        epilog="For a model of your own: python -m keras_mp check --help; likewise watch, tune and "
        "profile.",
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=(*_POLICIES, _BEST),
        help="may be repeated (default: all three); best: the fastest on this machine",
    )
    parser.add_argument(
        "--epochs", type=_positive_integer, default=_EPOCHS, help="default: %(default)s"
    )
    parser.add_argument(
        "--strategy",
        choices=("none", "mirrored"),
        default="none",
        help="mirrored: MirroredStrategy on all GPUs or, without one, on two halves of the CPU",
    )
    parser.add_argument(
        "--output",
        type=_path_in_existing_folder,
        default="keras_mp_digits.png",
        metavar="PATH",
        help="the picture, a PNG (default: keras_mp_digits.png)",
    )
    options = parser.parse_args(argv)
    options.policy = options.policy or _POLICIES
    return options


def _named(policies: Sequence[str]) -> list[str]:
    """Replaces "best" by the name of the fastest policy, and drops repetitions."""
    named = [keras_mp.hardware.best_policy() if p == _BEST else p for p in policies]
    return list(dict.fromkeys(named))


def _positive_integer(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, received {text}")
    return value


def _path_in_existing_folder(text: str) -> pathlib.Path:
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in an existing folder, received {text}")
    return path


def _require_extras() -> None:
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"python -m keras_mp needs matplotlib and scikit-learn ({error}). Install them with\n"
            '    pip install "keras-mp[tutorials]"'
        )


def _make_strategy(name: str) -> tf.distribute.Strategy | None:
    if name == "none":
        return None
    if not tf.config.list_physical_devices("GPU"):
        # One CPU would make one replica, with nothing to reduce.
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
    strategy = tf.distribute.MirroredStrategy()
    print(f"MirroredStrategy with {strategy.num_replicas_in_sync} replicas")
    return strategy


def _load_digits() -> list[np.ndarray]:
    """Returns training images, test images, training labels and test labels."""
    from sklearn import datasets, model_selection

    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    parts = model_selection.train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=_SEED
    )
    return [np.asarray(part) for part in parts]


def _train(
    name: str,
    data: list[np.ndarray],
    epochs: int,
    strategy: tf.distribute.Strategy | None,
    progress: ProgressBar,
) -> Trained:
    train_images, test_images, train_labels, test_labels = data
    # Every policy gets the same initial weights and the same order of batches.
    tf.keras.utils.set_random_seed(_SEED)
    batches = (
        tf.data.Dataset.from_tensor_slices((train_images, train_labels))
        .shuffle(len(train_labels), seed=_SEED)
        .batch(_BATCH_SIZE, drop_remainder=True)
        # The data set is endless, since MirroredStrategy takes most of a second to start one anew.
        .repeat()
    )
    steps_per_epoch = len(train_labels) // _BATCH_SIZE
    steps = StepRecorder()
    monitor = LossScaleMonitor(update_freq=1) if name == "mixed_float16" else None
    progress.begin(name)
    with keras_mp.policy_scope(_make_policy(name)):
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = _make_compiled_model(epochs * steps_per_epoch)
        model.fit(
            batches,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            shuffle=False,
            callbacks=[steps, progress, *([monitor] if monitor else [])],
            verbose=0,
        )
        scores: Any = model.evaluate(
            test_images, test_labels, batch_size=len(test_labels), verbose=0, return_dict=True
        )
    return Trained(
        policy=name,
        accuracy=scores["accuracy"],
        activation_bytes=_activation_bytes(model, train_images[:_BATCH_SIZE]),
        steps=steps,
        monitor=monitor,
    )


def _make_policy(name: str) -> keras_mp.Policy:
    if name != "mixed_float16":
        return keras_mp.Policy(name)
    loss_scale = keras_mp.DynamicLossScale(increment_period=_INCREMENT_PERIOD)
    return keras_mp.Policy(name, loss_scale=loss_scale)


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
    model.compile(
        # The learning rate decays, so that the accuracy at the end is not an accident of the last
        # few batches.
        optimizer=tf.keras.optimizers.Adam(
            tf.keras.optimizers.schedules.CosineDecay(3e-3, total_steps)
        ),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _activation_bytes(model: tf.keras.Model, batch: np.ndarray) -> int:
    outputs, tensor = [], batch
    for layer in model.layers[:-1]:
        tensor = layer(tensor)
        outputs.append(tensor)
    outputs.append(model(batch))  # The logits as the model returns them, in float32.
    return sum(each.dtype.size * int(tf.size(each)) for each in outputs)


def _format_table(results: Sequence[Trained]) -> str:
    header = (
        "policy",
        "test accuracy",
        "loss scale at end",
        "steps skipped",
        "ms per step",
        "activation bytes",
    )
    lines = [
        "ms per step: median, without the first steps, which trace.",
        f"activation bytes: all layers' outputs for one batch of {_BATCH_SIZE}, by their "
        "tensors' shapes and dtypes.",
        "",
        *text_tables.aligned([header, *(result.cells() for result in results)]),
    ]
    return "\n".join(lines)


def _compare_times(results: Sequence[Trained]) -> list[str]:
    """Returns one line that says what 16 bits bring on this machine.

    There is none if float32 was not run.
    """
    by_policy = {result.policy: result.milliseconds for result in results}
    float32 = by_policy.pop("float32", None)
    if float32 is None or not by_policy:
        return []
    speeds = {policy: float32 / milliseconds for policy, milliseconds in by_policy.items()}
    measured = " and ".join(f"{policy} ran at {speed:.2f}" for policy, speed in speeds.items())
    faster = [policy for policy, speed in speeds.items() if speed >= _LEAST_GAIN]
    gain = f"16 bits pay off with {' and '.join(faster)}" if faster else "16 bits bring no gain"
    return [
        f"On this machine {measured} times the speed of float32: for this small model {gain}. "
        "`python -m keras_mp.hardware` measures larger ones."
    ]


def _plot(results: Sequence[Trained], path: pathlib.Path) -> None:
    # A figure without pyplot is drawn with Agg, and leaves the process's own backend alone.
    from matplotlib.figure import Figure

    monitors = [result.monitor for result in results if result.monitor is not None]
    figure = Figure(figsize=(9, 7 if monitors else 4), layout="constrained")
    axes = figure.subplots(2 if monitors else 1, sharex=True, squeeze=False)[:, 0]
    _plot_losses(axes[0], results)
    axes[-1].set_xlabel("step")
    for monitor in monitors:
        keras_mp.plots.loss_scale(monitor, axes[1])
    figure.savefig(path, format="png", dpi=120)


def _plot_losses(axes: "Axes", results: Sequence[Trained]) -> None:
    for result in results:
        window = np.full(_SMOOTHED_STEPS, 1 / _SMOOTHED_STEPS)
        smoothed = np.convolve(result.steps.losses, window, mode="valid")
        steps = np.arange(len(smoothed)) + _SMOOTHED_STEPS
        label = f"{result.policy}, test accuracy {result.accuracy:.1%}"
        axes.plot(steps, smoothed, label=label, **_LINES[result.policy])
    axes.set_yscale("log")
    axes.set_ylabel(f"training loss\n(mean of {_SMOOTHED_STEPS} steps)")
    axes.set_title("Scikit-learn's digits: the same model under each policy")
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    sys.exit(main())
