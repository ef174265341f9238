"""Audits a saved model on a batch.

python -m keras_mp audit MODEL.keras BATCH.npz [--policy NAME] [--json PATH]
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from keras_mp.conversion import convert
from keras_mp.numerics import command_line
from keras_mp.numerics.audit import audit


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what is found.

    Args:
        argv: Arguments of the command line; None for the process's own.

    Returns:
        The exit status: 0 if nothing is found, 1 if something is.

    Raises:
        SystemExit: an option or a file is wrong; its status is 2.
    """
    options = _parse(argv)
    model = command_line.load_model(options.model)
    batch = command_line.load_batch(options.batch)
    given = (batch["x"], batch.get("y"), batch.get("sample_weight"))
    try:
        if options.policy:
            model = _converted(model, options.policy)
        report = audit(model, given)
    except (TypeError, ValueError) as error:
        command_line.fail(str(error))
    print(report.to_text(options.rows))
    if options.json:
        pathlib.Path(options.json).write_text(report.to_json())
    return command_line.FOUND if report.findings else command_line.SOUND


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m keras_mp audit",
        description="Looks for known hazards of 16 bits in a saved model: traces its training "
        "step, or its forward pass if it was saved without an optimizer, and runs it once on a "
        "batch. The exit status is 0 if nothing is found, 1 if something is, 2 if the files cannot "
        "be used.",
    )
    command_line.add_files(parser)
    command_line.add_policy(parser)
    parser.add_argument("--json", type=command_line.path_with_ending(".json"), metavar="PATH")
    return parser.parse_args(argv)


def _converted(model: Any, policy: str) -> Any:
    """The model under a policy, compiled again as it was."""
    result = convert(model, policy)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        result.compile(type(inner).from_config(inner.get_config()), loss=model.loss)
    return result
