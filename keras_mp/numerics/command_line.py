"""What the commands of `python -m keras_mp` for a saved model share: its file, and a batch."""

import argparse
import os
import sys
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from keras_mp.support import text_tables

# Of CI: nothing found, something found, nothing could be looked at.
SOUND, FOUND, FAILED = 0, 1, 2


def add_files(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for a model, a batch, and `rows`, how many are printed of a table."""
    parser.add_argument("model", metavar="MODEL.keras", help="a model that tf.keras has saved")
    parser.add_argument(
        "batch",
        metavar="BATCH.npz",
        help="a batch that numpy.savez has saved: x, and if there are y and sample_weight; x.NAME "
        "for each input of a model with several, and y.NAME for each output",
    )
    parser.add_argument(
        "--all-rows",
        action="store_const",
        const=None,
        default=text_tables.MOST,
        dest="rows",
        help="print everything, and not the worst ten rows only",
    )


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Adds the argument for a policy to convert the model to."""
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="for a model that was saved in float32: mixed_float16, say, or a .json of tune",
    )


def add_loss(parser: argparse.ArgumentParser) -> None:
    """Adds the argument for a loss."""
    parser.add_argument(
        "--loss", metavar="NAME", help="a loss of tf.keras (default: that of the model)"
    )


def load_model(path: str) -> Any:
    """Loads a model, with its loss if it has one.

    Raises:
        SystemExit: it cannot be loaded.
    """
    try:
        return tf.keras.models.load_model(path)
    except Exception as error:  # of Keras, of the user's classes, of the file system
        fail(f"{path} cannot be loaded: {type(error).__name__}: {error}")


def load_batch(path: str) -> dict[str, Any]:
    """Loads a batch.

    Returns:
        dict with `x`, and `y` and `sample_weight` if they are there: an array or a dict of arrays.

    Raises:
        SystemExit: it cannot be loaded, or there is something else in it.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except Exception as error:
        fail(f"{path} cannot be loaded: {type(error).__name__}: {error}")
    batch: dict[str, Any] = {}
    for key, array in arrays.items():
        name, _, part = key.partition(".")
        if part:
            batch.setdefault(name, {})[part] = array
        else:
            batch[name] = array
    if "x" not in batch or batch.keys() - {"x", "y", "sample_weight"}:
        fail(
            f"Expected arrays named x, y and sample_weight, or x.NAME and y.NAME, in {path}. "
            f"Received: {', '.join(arrays)}"
        )
    return batch


def fail(message: str) -> NoReturn:
    """Ends the program with a message and the exit status of what could not be looked at."""
    print(message, file=sys.stderr)
    sys.exit(FAILED)


def path_with_ending(*endings: str) -> Any:
    """A type of argument: a file in an existing folder, with one of these endings."""

    def check(text: str) -> str:
        if not text.endswith(endings) or not os.path.isdir(os.path.dirname(text) or "."):
            raise argparse.ArgumentTypeError(
                f"must end with {' or '.join(endings)} and be in an existing folder, "
                f"received {text}"
            )
        return text

    return check
