"""Finds the policy of each layer of a saved model, and saves the mixed one.

python -m keras_mp tune MODEL.keras BATCHES.npz [--tolerance 0.05] [--output MIXED.keras]
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.numerics import command_line
from keras_mp.numerics.tune import tune
from keras_mp.support.dtypes import LOW_PRECISION_NAMES


def main(argv: Sequence[str] | None = None) -> int:
    """Prints where each layer goes, and why.

    Args:
        argv: Arguments of the command line; None for the process's own.

    Returns:
        The exit status: 0 if layers may compute in 16 bits, 1 if all have to stay in float32.

    Raises:
        SystemExit: an option or a file is wrong; its status is 2.
    """
    options = _parse(argv)
    model, samples = command_line.load_model(options.model), command_line.load_batch(options.batch)
    try:
        tuned = tune(
            model,
            list(_cut(samples, options.batch_size)),
            dtype=options.dtype,
            tolerance=options.tolerance,
            loss=options.loss,
            include=options.include or "*",
            leave_out=options.leave_out,
        )
    except (TypeError, ValueError, tf.errors.OpError) as error:
        command_line.fail(f"{options.model} cannot be tuned: {error}")
    print(tuned.to_text(options.rows))
    if options.json:
        tuned.to_json(options.json)
    if options.output:
        tuned.model.save(options.output)
    return command_line.SOUND if tuned.policies[""] != "float32" else command_line.FOUND


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m keras_mp tune",
        description="Finds the policy of each layer of a saved model: as many multiplications in "
        "16 bits as a tolerance allows, measured on batches, some of which are kept aside. The "
        "exit status is 0 if layers may compute in 16 bits, 1 if none may, 2 if a file cannot be "
        "used.",
    )
    command_line.add_files(parser)
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        help="the largest relative distance of outputs, loss and gradients from float32 "
        "(default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=LOW_PRECISION_NAMES, default="float16")
    parser.add_argument(
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
        parser.add_argument(option, action="append", default=[], metavar="PATTERN", help=help_text)
    command_line.add_loss(parser)
    parser.add_argument(
        "--output",
        type=command_line.path_with_ending(".keras"),
        metavar="MIXED.keras",
        help="the mixed model, not compiled",
    )
    parser.add_argument(
        "--json",
        type=command_line.path_with_ending(".json"),
        metavar="PATH",
        help="the policies, which keras_mp.convert and --policy of the other commands take",
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, received {text}")
    return value


def _cut(samples: dict[str, Any], size: int) -> Iterator[tuple[Any, ...]]:
    parts = (samples["x"], samples.get("y"), samples.get("sample_weight"))
    count = min(len(each) for each in tf.nest.flatten(parts) if each is not None)
    for start in range(0, count, size):
        yield tuple(_rows(part, slice(start, start + size)) for part in parts)


def _rows(part: Any, rows: slice) -> Any:
    return None if part is None else tf.nest.map_structure(lambda array: array[rows], part)
