"""The commands of `python -m keras_mp` that look at a saved model.

python -m keras_mp check MODEL.keras BATCH.npz [--policy NAME] [--reference OTHER.keras]
python -m keras_mp profile MODEL.keras BATCH.npz [--policy NAME] [--device "GPU 8.0"]
python -m keras_mp tune MODEL.keras BATCHES.npz [--tolerance 0.05] [--output MIXED.keras]
python -m keras_mp watch MODEL.keras BATCHES.npz [--policy NAME] [--epochs 1]

Each takes arguments of its tool, such as `--leave-out` for `leave_out`, and --import MODULE, for a
model with layers of your own.
"""

import argparse
import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.numerics.batches import Batch
from keras_mp.numerics.check import check
from keras_mp.numerics.profile import profile
from keras_mp.numerics.results import Result
from keras_mp.numerics.run import compiled
from keras_mp.numerics.tune import tune
from keras_mp.numerics.watch import watch
from keras_mp.support import messages, text_tables, validation

# The exit status, for CI: nothing found, something found, or a file that cannot be used.
SOUND, FOUND, FAILED = 0, 1, 2

# What a command returns: what to print, and the exit status.
_Done = tuple[Result, int]

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
    given = vars(_parse(argv))
    command, path, json = given.pop("command"), given.pop("file"), given.pop("json", None)
    rows = None if given.pop("all_rows", False) else text_tables.MOST
    with tf.keras.utils.custom_object_scope(_objects_of(given.pop("import", ()))):
        model, batch = _load_model(path), load_batch(given.pop("batch"))
        with _failing(f"{path} cannot be {command.removesuffix('e')}ed"):
            if "policy" in given:
                model = compiled(model, given.pop("policy"))
            result, status = COMMANDS[command](model, batch, **given)
    print(result.to_text(rows))
    if json is not None:
        result.to_json(json)
    return status


@contextlib.contextmanager
def _failing(what: str, more: str = "") -> Iterator[None]:
    """Ends the program where the block raises an error: files, classes, layers may raise any."""
    try:
        yield
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {error}{more}", file=sys.stderr)
        sys.exit(FAILED)


def load_batch(path: str) -> Batch:
    """Loads a batch.

    Returns:
        `Batch`, each part of which is an array, a dict of arrays or None.

    Raises:
        SystemExit: it cannot be loaded, or there is something else in it.
    """
    batch: dict[str, Any] = {}
    with _failing(f"{path} cannot be loaded"), np.load(path, allow_pickle=False) as file:
        for key, array in file.items():
            name, _, part = key.partition(".")
            batch[name] = {**batch.get(name, {}), part: array} if part else array
        if "x" not in batch or batch.keys() - {*Batch._fields}:
            raise ValueError(
                "Expected arrays named x, y and sample_weight, or x.NAME and y.NAME. Received: "
                f"{', '.join(file)}"
            )
    return Batch(**batch)


def _load_model(path: str) -> tf.keras.Model:
    try:
        return tf.keras.models.load_model(path)
    except Exception as error:  # of Keras, of the user's classes, of the file system
        reason = f"{type(error).__name__}: {error}"
    with _failing(f"{path} cannot be loaded", _IMPORT * os.path.exists(path)):
        model = tf.keras.models.load_model(path, compile=False)
    what = f"{path} is loaded without its loss, metrics and optimizer, since they cannot be loaded"
    print(f"{what}: pass --loss, or --import MODULE. ({reason.splitlines()[0]})", file=sys.stderr)
    return model


def _objects_of(modules: Sequence[str]) -> dict[str, Any]:
    """Imports modules, and returns the classes and functions that they define."""
    sys.path.insert(0, os.getcwd())
    objects: dict[str, Any] = {}
    for name in modules:
        with _failing(f"--import {name} fails"):
            found = vars(importlib.import_module(name))
            objects |= {key: each for key, each in found.items() if callable(each)}
    return objects


def _check(model: Any, batch: Batch, reference: Any = "", **given: Any) -> _Done:
    """Checks a saved model.

    The exit status is 0 if nothing is found, 1 if something is, 2 if a file cannot be used or a
    part of this cannot be done.
    """
    if reference.endswith((".keras", ".h5")) or os.path.exists(reference):
        reference = _load_model(reference)
    found = check(model, tuple(batch), reference=reference or "float32", **given)
    return found, FOUND if found.findings else FAILED if found.notes else SOUND


def _profile(model: Any, batch: Batch, **given: Any) -> _Done:
    """Profiles a saved model."""
    return profile(model, tuple(batch), **given), SOUND


def _watch(model: Any, batch: Batch, **given: Any) -> _Done:
    """Trains a saved model, and watches it.

    The exit status is 1 if an operation is not finite. The file is not changed.
    """
    if getattr(model, "optimizer", None) is None:
        raise ValueError("it is not compiled, so it cannot be trained")
    sizes: Any = {e: validation.integer(e, given.pop(e)) for e in ("batch_size", "epochs")}
    watching = watch(model, raises=False, **{"every": 1, "weights": True, **given})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", messages.MixedPrecisionWarning)  # `found` has them.
        with watching:
            model.fit(**batch._asdict(), **sizes, verbose=0, callbacks=[watching])
    return watching, FOUND if watching.found else SOUND


def _tune(model: Any, batch: Batch, batch_size: int, output: str = "", **given: Any) -> _Done:
    """Tunes a saved model on batches, of which the last quarter is held out.

    The exit status is 0 if layers may compute in 16 bits, 1 if none may, 2 if a file cannot be
    used. The JSON has the policies, which keras_mp.convert and --policy of the other commands take.
    """
    size = validation.integer("batch_size", batch_size)
    starts = range(0, min(map(len, batch.parts())), size)
    tuned = tune(model, [tuple(batch.rows(start, start + size)) for start in starts], **given)
    if output:
        tuned.model.save(output)
    return tuned, SOUND if tuned.policies[""] != "float32" else FOUND


COMMANDS = {"check": _check, "profile": _profile, "watch": _watch, "tune": _tune}


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m keras_mp")
    commands = parser.add_subparsers(required=True, dest="command")
    for name, run in COMMANDS.items():
        # What is not given is left to the tool.
        absent = argparse.SUPPRESS
        made = commands.add_parser(name, description=run.__doc__, argument_default=absent)
        for takers, flag, what, how in _FLAGS:
            if name in takers.split():
                made.add_argument(flag, help=what, **how)
    return parser.parse_args(argv)


def file(text: str, ending: str = "") -> str:
    """Returns an argument that is a file in an existing folder, with this ending."""
    is_there = os.path.isdir(os.path.dirname(text) or ".")
    if text.endswith(ending) and is_there and not os.path.isdir(text):
        return text
    what = f"{ending} file".strip()
    raise argparse.ArgumentTypeError(f"must be a {what} in an existing folder, received {text}")


def _number_or_name(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


_ALL, _LIST = "check profile tune watch", {"action": "append"}
_YES_OR_NO: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
_BATCH = "a batch of numpy.savez: x and, if needed, y and sample_weight; or x.NAME for several"
# The commands that take a flag, its name, its help, and what else argparse takes.
_FLAGS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (_ALL, "file", "a model that tf.keras has saved", {"metavar": "MODEL.keras"}),
    (_ALL, "batch", _BATCH, {"metavar": "BATCH.npz"}),
    ("check", "--reference", "a policy, or another model with the same layers (float32)", {}),
    ("check tune", "--loss", "a loss of tf.keras, by name (that of the model)", {}),
    ("check", "--training", "call layers with training=True, as for dropout (yes)", _YES_OR_NO),
    ("profile", "--device", 'a GPU and its compute capability: "GPU 8.0" (this machine)', {}),
    ("profile", "--steps", "how many steps are timed; 0 for none (9)", {"type": int}),
    ("watch", "--every", "one step in so many is counted (1)", {"type": int}),
    ("watch", "--gradients", "count gradients of variables (yes)", _YES_OR_NO),
    ("watch", "--outputs", "count outputs of layers (yes)", _YES_OR_NO),
    ("watch", "--output-gradients", "count gradients of outputs (no)", _YES_OR_NO),
    ("watch", "--weights", "count trainable variables (yes)", _YES_OR_NO),
    ("watch", "--read-freq", "epoch, or a number of batches (epoch)", {"type": _number_or_name}),
    ("watch", "--include", "operations or layers that are looked at (all); repeatable", _LIST),
    ("watch", "--exclude", "operations or layers that are not looked at; repeatable", _LIST),
    ("watch", "--epochs", "how long it trains (1)", {"type": int, "default": 1}),
    ("tune", "--dtype", "float16 or bfloat16 (float16)", {}),
    ("tune", "--tolerance", "the largest distance from float32 (0.05)", {"type": float}),
    ("tune", "--include", "layers that may be in 16 bits (all); repeatable", _LIST),
    ("tune", "--leave-out", "layers that stay in float32; repeatable", _LIST),
    ("tune", "--seed", "of the random numbers of all runs (0)", {"type": int}),
    ("tune", "--output", "a file for the mixed model", {"type": lambda text: file(text, ".keras")}),
    ("tune watch", "--batch-size", "of each batch (32)", {"type": int, "default": 32}),
    (_ALL, "--policy", "for a model in float32: its name, or a .json file of tune", {}),
    (_ALL, "--all-rows", "print all rows, not only the worst ten", {"action": "store_true"}),
    (_ALL, "--json", "a file for all that is known", {"type": lambda text: file(text, ".json")}),
    (_ALL, "--import", "a module with layers, losses, metrics of the model; repeatable", _LIST),
)
