"""The commands of `python -m keras_mp` that look at a saved model.

python -m keras_mp check MODEL.keras BATCH.npz [--policy NAME] [--reference OTHER.keras]
python -m keras_mp profile MODEL.keras BATCH.npz [--policy NAME] [--device "GPU 8.0"]
python -m keras_mp tune MODEL.keras BATCHES.npz [--tolerance 0.05] [--output MIXED.keras]
python -m keras_mp watch MODEL.keras BATCHES.npz [--policy NAME] [--epochs 1]

Each takes --import MODULE, for a model with layers of your own.
"""

import argparse
import importlib
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from keras_mp.numerics import copies
from keras_mp.numerics.batches import Batch
from keras_mp.numerics.check import Check, check
from keras_mp.numerics.comparison.records import Record
from keras_mp.numerics.profile import Profile, profile
from keras_mp.numerics.tune import tune
from keras_mp.numerics.tuned import Tuned
from keras_mp.numerics.watch import watch
from keras_mp.support import messages, text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

# The exit status, for CI: nothing found, something found, or a file that cannot be used.
SOUND, FOUND, FAILED = 0, 1, 2


_IMPORT = "\nIf it has layers of your own: --import MODULE, with the module that defines them."


def main(argv: Sequence[str]) -> int:
    """Runs a command, and prints what it finds.

    Args:
        argv: The name of the command, and its arguments.

    Returns:
        The exit status: 0, 1 or 2, as the description of each command says.

    Raises:
        SystemExit: an option or a file is wrong; its status is 2.
    """
    options = _parse(argv)
    with tf.keras.utils.custom_object_scope(_objects_of(options.modules)):
        return _look(options)


def _look(options: argparse.Namespace) -> int:
    model, batch = _load_model(options.model), load_batch(options.batch)
    try:
        if getattr(options, "policy", None):
            model = copies.compiled(model, options.policy)
        result, status = options.look(model, batch, options)
    except (TypeError, ValueError, ImportError, tf.errors.OpError) as error:
        # For example, labels of another shape, or matplotlib is missing.
        _fail(f"{options.model} cannot be {options.looked_at}: {error}")
    print(result.to_text(options.rows))
    if options.json:
        pathlib.Path(options.json).write_text(result.to_json() + "\n", encoding="utf-8")
    return status


def load_batch(path: str) -> Batch:
    """Loads a batch.

    Returns:
        `Batch`, each part of which is an array, a dict of arrays or None.

    Raises:
        SystemExit: it cannot be loaded, or there is something else in it.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except Exception as error:
        _fail(f"{path} cannot be loaded: {type(error).__name__}: {error}")
    batch: dict[str, Any] = {}
    for key, array in arrays.items():
        name, _, part = key.partition(".")
        if part:
            batch.setdefault(name, {})[part] = array
        else:
            batch[name] = array
    if "x" not in batch or batch.keys() - {*Batch._fields}:
        _fail(
            f"Expected arrays named x, y and sample_weight, or x.NAME and y.NAME, in {path}. "
            f"Received: {', '.join(arrays)}"
        )
    return Batch(**batch)


def _load_model(path: str) -> tf.keras.Model:
    try:
        return tf.keras.models.load_model(path)
    except Exception as error:  # of Keras, of the user's classes, of the file system
        reason = f"{type(error).__name__}: {error}"
    try:
        model = tf.keras.models.load_model(path, compile=False)
    except Exception:  # the same, which is not about a loss or a metric
        _fail(f"{path} cannot be loaded: {reason}{_IMPORT if os.path.exists(path) else ''}")
    print(
        f"{path} is loaded without its loss, metrics and optimizer, since they cannot be loaded: "
        f"pass --loss, or --import MODULE. ({reason.splitlines()[0]})",
        file=sys.stderr,
    )
    return model


def _objects_of(modules: Sequence[str]) -> dict[str, Any]:
    """Imports modules, and returns the classes and functions that they define."""
    sys.path.insert(0, os.getcwd())
    objects: dict[str, Any] = {}
    for name in modules:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # of the user's module
            _fail(f"--import {name} fails: {type(error).__name__}: {error}")
        objects |= {key: each for key, each in vars(module).items() if callable(each)}
    return objects


def _check(model: tf.keras.Model, batch: Batch, options: argparse.Namespace) -> tuple[Check, int]:
    found = check(
        model,
        tuple(batch),
        reference=_reference(options),
        loss=options.loss,
        device=options.device,
        training=not options.inference,
    )
    if options.csv:
        found.to_csv(options.csv)
    if options.picture:
        found.plot()[0].figure.savefig(options.picture, dpi=120)
    if found.findings:
        return found, FOUND
    return found, FAILED if found.notes else SOUND


def _profile(
    model: tf.keras.Model, batch: Batch, options: argparse.Namespace
) -> tuple[Profile, int]:
    return profile(model, tuple(batch), device=options.device), SOUND


def _watch(model: tf.keras.Model, batch: Batch, options: argparse.Namespace) -> tuple[watch, int]:
    if getattr(model, "optimizer", None) is None:
        raise ValueError("it is not compiled, so it cannot be trained")
    watching = watch(model, every=1, weights=True, raises=False)
    how = {"batch_size": options.batch_size, "epochs": options.epochs, "verbose": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", messages.MixedPrecisionWarning)  # `found` has them.
        with watching:
            model.fit(**batch._asdict(), **how, callbacks=[watching])
    return watching, FOUND if watching.found else SOUND


def _reference(options: argparse.Namespace) -> Any:
    if not options.reference:
        return "float32"
    if options.reference.endswith(".npz"):
        return Record.load(options.reference)
    return _load_model(options.reference)


def _tune(model: tf.keras.Model, batch: Batch, options: argparse.Namespace) -> tuple[Tuned, int]:
    tuned = tune(
        model,
        list(_cut(batch, options.batch_size)),
        dtype=options.dtype,
        tolerance=options.tolerance,
        loss=options.loss,
        include=options.include or "*",
        leave_out=options.leave_out,
    )
    if options.output:
        tuned.model.save(options.output)
    return tuned, SOUND if tuned.policies[""] != "float32" else FOUND


def _cut(samples: Batch, size: int) -> Iterator[tuple[Any, ...]]:
    """Cuts samples into batches of that size."""
    for start in range(0, min(len(each) for each in samples.parts()), size):
        yield tuple(samples.rows(start, start + size))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m keras_mp")
    commands = parser.add_subparsers(required=True)
    for name, (look, looked_at, description, options) in _COMMANDS.items():
        command = commands.add_parser(name, description=description)
        command.set_defaults(look=look, looked_at=looked_at)
        for option in (*_COMMON, *options):
            command.add_argument(option, **_OPTIONS[option])
    return parser.parse_args(argv)


def _fail(message: str) -> NoReturn:
    """Ends the program with a message and the exit status for files that cannot be used."""
    print(message, file=sys.stderr)
    sys.exit(FAILED)


def _path(*endings: str) -> Callable[[str], str]:
    """Returns a type of argument: a file in an existing folder, with one of these endings."""

    def check(text: str) -> str:
        if not text.endswith(endings) or not os.path.isdir(os.path.dirname(text) or "."):
            raise argparse.ArgumentTypeError(
                f"must end with {' or '.join(endings)} and be in an existing folder, "
                f"received {text}"
            )
        return text

    return check


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, received {text}")
    return value


_COMMON = ("model", "batch", "--all-rows", "--json", "--import")
_COUNT = {"type": _positive, "metavar": "N"}
_PATTERNS = {"action": "append", "default": [], "metavar": "PATTERN"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"metavar": "MODEL.keras", "help": "a model that tf.keras has saved"},
    "batch": {
        "metavar": "BATCH.npz",
        "help": "a batch in a file of numpy.savez, with the arrays x and, if needed, y and "
        "sample_weight; for a model with several inputs or outputs x.NAME and y.NAME",
    },
    "--all-rows": {
        "action": "store_const",
        "const": None,
        "default": text_tables.MOST,
        "dest": "rows",
        "help": "print all rows, not only the worst ten",
    },
    "--json": {"type": _path(".json"), "metavar": "PATH"},
    "--import": {
        "action": "append",
        "default": [],
        "dest": "modules",
        "metavar": "MODULE",
        "help": "a module with layers, losses and metrics of the model; may be repeated",
    },
    "--policy": {
        "metavar": "NAME",
        "help": "for a model that was saved in float32: for example mixed_float16, or a .json file "
        "of tune",
    },
    "--loss": {"metavar": "NAME", "help": "a loss of tf.keras (default: that of the model)"},
    "--device": {
        "metavar": "GPU",
        "help": 'a GPU and its compute capability, such as "GPU 8.0"',
    },
    "--reference": {
        "metavar": "OTHER",
        "help": "compare with this model (.keras), or with this record (.npz), instead of float32",
    },
    "--inference": {
        "action": "store_true",
        "help": "call layers with training=False (no dropout)",
    },
    "--csv": {"type": _path(".csv"), "metavar": "PATH"},
    "--picture": {"type": _path(".png", ".svg", ".pdf"), "metavar": "PATH"},
    "--epochs": {"default": 1, **_COUNT},
    "--batch-size": {"default": 32, "help": "samples in a batch (default: %(default)s)", **_COUNT},
    "--tolerance": {
        "type": float,
        "default": 0.05,
        "help": "the largest relative distance of outputs, loss and gradients from float32 "
        "(default: %(default)s)",
    },
    "--dtype": {"choices": LOW_PRECISION_NAMES, "default": "float16"},
    "--include": {
        "help": "layers that may compute in 16 bits, such as encoder/* (default: all); may be "
        "repeated",
        **_PATTERNS,
    },
    "--leave-out": {"help": "layers that stay in float32; may be repeated", **_PATTERNS},
    "--output": {
        "type": _path(".keras"),
        "metavar": "MIXED.keras",
        "help": "the mixed model, not compiled",
    },
}

# What looks at a model, what it has then been, a description, and options beside `_COMMON`.
_COMMANDS: dict[str, tuple[Callable[..., Any], str, str, tuple[str, ...]]] = {
    "check": (
        _check,
        "checked",
        "Is a saved model safe and right in 16 bits? Looks for known hazards in its training step, "
        "compares it with float32 layer by layer, and runs it at its loss scale. The exit status "
        "is 0 if nothing is found, 1 if something is, 2 if a file cannot be used or a part of this "
        "cannot be done.",
        ("--policy", "--loss", "--device", "--reference", "--inference", "--csv", "--picture"),
    ),
    "profile": (
        _profile,
        "profiled",
        "Why is a saved model not faster? Prints what computes in which dtype and why, the time of "
        "a training step by class of operation, and the changes that save most.",
        ("--policy", "--device"),
    ),
    "watch": (
        _watch,
        "watched",
        "What happens while a saved model trains? Trains it, and prints the first operation that "
        "is not finite, and the exponents of gradients and outputs. The exit status is 1 if an "
        "operation is not finite. The file is not changed.",
        ("--policy", "--epochs", "--batch-size"),
    ),
    "tune": (
        _tune,
        "tuned",
        "Finds the policy of each layer of a saved model: as many multiplications in 16 bits as a "
        "tolerance allows, measured on batches, of which the last quarter is held out. The exit "
        "status is 0 if layers may compute in 16 bits, 1 if none may, 2 if a file cannot be used. "
        "The JSON has the policies, which keras_mp.convert and --policy of the other commands "
        "take.",
        (
            *("--loss", "--tolerance", "--dtype", "--batch-size", "--include", "--leave-out"),
            "--output",
        ),
    ),
}
