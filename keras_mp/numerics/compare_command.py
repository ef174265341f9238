"""Compares a saved model in 16 bits with itself in float32, on a batch.

python -m keras_mp compare MODEL.keras BATCH.npz [--policy NAME] [--reference OTHER.keras]
"""

import argparse
from collections.abc import Sequence

import tensorflow as tf

from keras_mp.numerics import command_line
from keras_mp.numerics.compare import compare
from keras_mp.numerics.comparison import Comparison


def main(argv: Sequence[str] | None = None) -> int:
    """Prints where the two part.

    Args:
        argv: Arguments of the command line; None for the process's own.

    Returns:
        The exit status: 0 if rounding explains all differences, 1 if it does not, 2 if the loss of
        the reference is not finite, so that nothing can be said.

    Raises:
        SystemExit: an option or a file is wrong; its status is 2.
    """
    options = _parse(argv)
    model, batch = command_line.load_model(options.model), command_line.load_batch(options.batch)
    reference = command_line.load_model(options.reference) if options.reference else "float32"
    try:
        comparison = compare(
            model,
            **batch,
            policy=options.policy,
            reference=reference,
            loss=options.loss,
            training=not options.inference,
        )
    except (TypeError, ValueError, tf.errors.OpError) as error:
        # Such as labels of another shape, which TensorFlow or the loss notices.
        command_line.fail(f"{options.model} cannot be compared: {error}")
    print(comparison.to_text(options.rows))
    if options.csv:
        comparison.to_csv(options.csv)
    if options.json:
        comparison.to_json(options.json)
    if options.picture:
        _draw(comparison, options.picture)
    if not comparison.is_judged:
        return command_line.FAILED
    return command_line.FOUND if comparison.findings else command_line.SOUND


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m keras_mp compare",
        description="Runs a saved model in 16 bits and in float32, with the same weights and "
        "random numbers, forwards and backwards, and says which layers lose more than rounding "
        "explains. The exit status is 0 if none does, 1 if one does, 2 if a file cannot be used, "
        "or if nothing can be said.",
    )
    command_line.add_files(parser)
    command_line.add_policy(parser)
    parser.add_argument(
        "--reference",
        metavar="OTHER.keras",
        help="compare with this model instead of with the same one in float32",
    )
    command_line.add_loss(parser)
    parser.add_argument(
        "--inference", action="store_true", help="call layers with training=False (no dropout)"
    )
    parser.add_argument("--csv", type=command_line.path_with_ending(".csv"), metavar="PATH")
    parser.add_argument("--json", type=command_line.path_with_ending(".json"), metavar="PATH")
    parser.add_argument(
        "--picture", type=command_line.path_with_ending(".png", ".svg", ".pdf"), metavar="PATH"
    )
    return parser.parse_args(argv)


def _draw(comparison: Comparison, path: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        command_line.fail('--picture needs matplotlib: pip install "keras-mp[tutorials]"')
    # Figure without pyplot draws with Agg and leaves the process's own backend alone.
    figure = Figure(figsize=comparison.figure_size, layout="constrained")
    comparison.plot(figure.subplots(2, sharex=True))
    figure.savefig(path, dpi=120)
