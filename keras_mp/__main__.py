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
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

import keras_mp
from keras_mp.numerics import commands
from keras_mp.support import columns
from keras_mp.support.figures import new_figure

_SEED, _BATCH_SIZE = 0, 32
# After so many epochs, every policy is within a percent of the accuracy that more would give.
_EPOCHS = 5
# The default of 2000 good steps is for runs of many thousand steps. In the few hundred steps of
# this run, the scale would never move. With a short period, it grows until gradients overflow.
_SCALES = {"mixed_float16": keras_mp.DynamicLossScale(increment_period=20)}
_SMOOTHED = 15
# The policies, and their lines. Of two that cover each other, both can be seen if one is dashed.
_LINES: dict[str, dict[str, Any]] = {
    "float32": {"color": "black", "linewidth": 2.2, "alpha": 0.45},
    "mixed_float16": {"color": "tab:red", "linewidth": 1.2},
    "mixed_bfloat16": {"color": "tab:blue", "linewidth": 1.2, "linestyle": "--"},
}
_NOTES = f"""
ms per step: median, without the first steps, which trace. The model is small:
`python -m keras_mp.hardware` measures larger ones.
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
    if argv and argv[0] in commands.COMMANDS:
        return commands.main(argv)
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m keras_mp", None, __doc__, formatter_class=as_it_is)
    path, what = "keras_mp_digits.png", "the picture, a PNG (default: %(default)s)"
    parser.add_argument("--output", type=commands.file, default=path, help=what)
    path, data = parser.parse_args(argv).output, _load_digits()
    runs = [_Run(name, data) for name in _LINES]
    rows = [run.row() for run in runs]
    print(_NOTES, *columns.aligned([[*rows[0]], *([*r.values()] for r in rows)]), sep="\n")
    _plot(runs, path)
    print(f"\nThe picture is in {os.path.realpath(path)}")
    return 0


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
    images = np.float32(images / 16.0).reshape(-1, 8, 8, 1)
    how = {"test_size": 0.2, "stratify": labels, "random_state": _SEED}
    return model_selection.train_test_split(images, labels, **how)


class _Run(keras_mp.callbacks.LossScaleMonitor):
    """Trains a model under a policy, and records what each step shows."""

    def __init__(self, policy: str, data: list[Any]) -> None:
        super().__init__(update_freq=1)
        train_images, test_images, train_labels, test_labels = data
        self.policy, self.losses, self.seconds, self.sum = policy, [], [], 0.0
        # Every policy gets the same initial weights and the same order of batches.
        tf.keras.utils.set_random_seed(_SEED)
        images = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
        batches = images.shuffle(len(train_labels), seed=_SEED).batch(_BATCH_SIZE, True)
        with keras_mp.policy_scope(keras_mp.Policy(policy, loss_scale=_SCALES.get(policy))):
            model = _compiled_model(_EPOCHS * len(batches))
            model.fit(batches, epochs=_EPOCHS, verbose=0, callbacks=[self])
            _, self.accuracy = cast(Any, model.evaluate(test_images, test_labels, verbose=0))
        # The first step traces the graph and builds the optimizer; the next two warm caches up.
        self.milliseconds = 1000 * statistics.median(self.seconds[3:])
        tensor = train_images[:_BATCH_SIZE]
        outputs = [model(tensor)]  # the logits as the model returns them, in float32
        for layer in model.layers[:-1]:
            outputs.append(tensor := layer(tensor))
        self.activation_bytes = sum(each.dtype.size * int(tf.size(each)) for each in outputs)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.sum = self.sum if batch else 0.0
        self.seconds.append(-time.perf_counter())

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Keras logs the mean since the start of the epoch. The batch's own loss follows from it.
        # Reading it waits for the device, so this is part of the time.
        before, self.sum = self.sum, float((logs or {})["loss"]) * (batch + 1)
        self.seconds[-1] += time.perf_counter()
        self.losses.append(self.sum - before)
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        print(f"{self.policy}, epoch {epoch + 1}: loss {(logs or {})['loss']:.4f}", flush=True)

    def row(self) -> dict[str, str]:
        """Returns the cells of the table, by their columns."""
        scales, skipped = self.history["loss_scale"], self.history["steps_skipped"]
        return {
            "policy": self.policy,
            "test accuracy": f"{self.accuracy:.4f}",
            "loss scale at end": f"{scales[-1]:.0f}" if scales else "none",
            "steps skipped": f"{skipped[-1] if skipped else 0} of {len(self.losses)}",
            "ms per step": f"{self.milliseconds:.2f}",
            "activation bytes": f"{self.activation_bytes}",
        }


def _compiled_model(total_steps: int) -> tf.keras.Model:
    layers = tf.keras.layers
    conv = functools.partial(layers.Conv2D, padding="same", activation="relu")
    hidden = [conv(16, 3), conv(32, 3), layers.MaxPooling2D(), conv(32, 3), layers.Flatten()]
    # dtype="float32" is not needed at the end: the model returns float32, and so does the loss.
    model = tf.keras.Sequential([layers.Input((8, 8, 1)), *hidden, layers.Dense(10)])
    # The rate decays, so that the accuracy at the end is not an accident of the last few batches.
    rate = tf.keras.optimizers.schedules.CosineDecay(3e-3, total_steps)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


def _plot(runs: Sequence[_Run], path: str) -> None:
    upper, lower = new_figure(__name__, (9, 7)).subplots(2, sharex=True)
    for run in runs:
        smoothed = np.convolve(run.losses, np.full(_SMOOTHED, 1 / _SMOOTHED), mode="valid")
        label = f"{run.policy}, test accuracy {run.accuracy:.1%}"
        steps = range(_SMOOTHED, len(run.losses) + 1)
        upper.plot(steps, smoothed, label=label, **_LINES[run.policy])
        if run.history["loss_scale"]:
            keras_mp.plots.loss_scale(run, lower)
    upper.set_title("Scikit-learn's digits: the same model under each policy")
    upper.set(yscale="log", ylabel=f"training loss\n(mean of {_SMOOTHED} steps)")
    upper.legend(loc="upper right")
    upper.grid(alpha=0.3)
    lower.set_xlabel("step")
    upper.figure.savefig(path, format="png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
