"""The commands of `python -m keras_mp` that look at a saved model.

python -m keras_mp audit MODEL.keras BATCH.npz [--policy NAME] [--json PATH]
python -m keras_mp compare MODEL.keras BATCH.npz [--policy NAME] [--reference OTHER.keras]
python -m keras_mp tune MODEL.keras BATCHES.npz [--tolerance 0.05] [--output MIXED.keras]
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from keras_mp.conversion import convert
from keras_mp.numerics.audit import Audit, audit
from keras_mp.numerics.compare import compare
from keras_mp.numerics.comparison import Comparison
from keras_mp.numerics.tune import tune
from keras_mp.numerics.tuned import Tuned
from keras_mp.support import text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

# The exit status, for CI: nothing found, something found, or a file that cannot be used.
SOUND, FOUND, FAILED = 0, 1, 2

_SAMPLES = ("x", "y", "sample_weight")


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
    model, batch = _load_model(options.model), load_batch(options.batch)
    try:
        result, status = options.look(model, batch, options)
    except (TypeError, ValueError, ImportError, tf.errors.OpError) as error:
        # For example, labels of another shape, or matplotlib is missing.
        _fail(f"{options.model} cannot be {options.looked_at}: {error}")
    print(result.to_text(options.rows))
    if options.json:
        pathlib.Path(options.json).write_text(result.to_json() + "\n", encoding="utf-8")
    return status


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
        _fail(f"{path} cannot be loaded: {type(error).__name__}: {error}")
    batch: dict[str, Any] = {}
    for key, array in arrays.items():
        name, _, part = key.partition(".")
        if part:
            batch.setdefault(name, {})[part] = array
        else:
            batch[name] = array
    if "x" not in batch or batch.keys() - {*_SAMPLES}:
        _fail(
            f"Expected arrays named x, y and sample_weight, or x.NAME and y.NAME, in {path}. "
            f"Received: {', '.join(arrays)}"
        )
    return batch


def _load_model(path: str) -> tf.keras.Model:
    try:
        return tf.keras.models.load_model(path)
    except Exception as error:  # of Keras, of the user's classes, of the file system
        _fail(f"{path} cannot be loaded: {type(error).__name__}: {error}")


def _audit(
    model: tf.keras.Model, batch: dict[str, Any], options: argparse.Namespace
) -> tuple[Audit, int]:
    if options.policy:
        optimizer, loss = getattr(model, "optimizer", None), getattr(model, "loss", None)
        model = convert(model, options.policy)
        if optimizer is not None:
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            model.compile(type(inner).from_config(inner.get_config()), loss=loss)
    report = audit(model, tuple(batch.get(name) for name in _SAMPLES))
    return report, FOUND if report.findings else SOUND


def _compare(
    model: tf.keras.Model, batch: dict[str, Any], options: argparse.Namespace
) -> tuple[Comparison, int]:
    comparison = compare(
        model,
        **batch,
        policy=options.policy,
        reference=_load_model(options.reference) if options.reference else "float32",
        loss=options.loss,
        training=not options.inference,
    )
    if options.csv:
        comparison.to_csv(options.csv)
    if options.picture:
        comparison.plot()[0].figure.savefig(options.picture, dpi=120)
    if not comparison.is_judged:
        return comparison, FAILED
    return comparison, FOUND if comparison.findings else SOUND


def _tune(
    model: tf.keras.Model, batch: dict[str, Any], options: argparse.Namespace
) -> tuple[Tuned, int]:
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


def _cut(samples: dict[str, Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Cuts samples into batches of that size."""
    arrays = tf.nest.flatten(samples)
    for start in range(0, min(map(len, arrays)), size):
        rows = [array[start : start + size] for array in arrays]
        batch = tf.nest.pack_sequence_as(samples, rows)
        yield tuple(batch.get(name) for name in _SAMPLES)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m keras_mp")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "audit",
        description="Looks for known hazards of 16 bits in a saved model: traces its training "
        "step, or its forward pass if it was saved without an optimizer, and runs it once on a "
        "batch. The exit status is 0 if nothing is found, 1 if something is, 2 if the files cannot "
        "be used.",
    )
    command.set_defaults(look=_audit, looked_at="audited")
    _add_files(command)
    _add_policy(command)

    command = commands.add_parser(
        "compare",
        description="Runs a saved model in 16 bits and in float32, with the same weights and "
        "random numbers, forwards and backwards, and says which layers lose more than rounding "
        "explains. The exit status is 0 if none does, 1 if one does, 2 if a file cannot be used, "
        "or if nothing can be said.",
    )
    command.set_defaults(look=_compare, looked_at="compared")
    _add_files(command)
    _add_policy(command)
    _add_loss(command)
    command.add_argument(
        "--reference",
        metavar="OTHER.keras",
        help="compare with this model instead of with the same one in float32",
    )
    command.add_argument(
        "--inference", action="store_true", help="call layers with training=False (no dropout)"
    )
    command.add_argument("--csv", type=_path(".csv"), metavar="PATH")
    command.add_argument("--picture", type=_path(".png", ".svg", ".pdf"), metavar="PATH")

    command = commands.add_parser(
        "tune",
        description="Finds the policy of each layer of a saved model: as many multiplications in "
        "16 bits as a tolerance allows, measured on batches, some of which are kept aside. The "
        "exit status is 0 if layers may compute in 16 bits, 1 if none may, 2 if a file cannot be "
        "used. The JSON has the policies, which keras_mp.convert and --policy of the other "
        "commands take.",
    )
    command.set_defaults(look=_tune, looked_at="tuned")
    _add_files(command)
    _add_loss(command)
    command.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        help="the largest relative distance of outputs, loss and gradients from float32 "
        "(default: %(default)s)",
    )
    command.add_argument("--dtype", choices=LOW_PRECISION_NAMES, default="float16")
    command.add_argument(
        "--batch-size",
        type=_positive,
        default=32,
        metavar="N",
        help="into batches of so many the samples are cut; the last quarter of the batches is kept "
        "aside (default: %(default)s)",
    )
    for option, text in (
        ("--include", "layers that may compute in 16 bits, such as encoder/* (default: all)"),
        ("--leave-out", "layers that stay in float32"),
    ):
        help_text = f"{text}; may be repeated"
        command.add_argument(option, action="append", default=[], metavar="PATTERN", help=help_text)
    command.add_argument(
        "--output",
        type=_path(".keras"),
        metavar="MIXED.keras",
        help="the mixed model, not compiled",
    )
    return parser.parse_args(argv)


def _add_files(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--json", type=_path(".json"), metavar="PATH")


def _add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="for a model that was saved in float32: mixed_float16, say, or a .json of tune",
    )


def _add_loss(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--loss", metavar="NAME", help="a loss of tf.keras (default: that of the model)"
    )


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
