"""Checks on this machine what keras_mp promises, and times operations and models.

python -m tests --gpu [--quick] [--output FILE.json]
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from tests import gpu
from tests.gpu import page

_OUTPUT = "keras_mp_check.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check, prints its page and writes the full result.

    Args:
        argv: Arguments of the command line; None for the process's own.

    Returns:
        The exit status: 0, or 1 where a promise is broken.
    """
    parser = argparse.ArgumentParser(prog="python -m tests --gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="check the promises, time nothing")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="FILE.json",
        default=pathlib.Path(_OUTPUT),
        help=f"the file for the full result, which you can send us; {_OUTPUT} by default",
    )
    arguments = parser.parse_args(argv)
    try:
        arguments.output.open("a").close()  # before the minutes that it takes
    except OSError as error:
        parser.error(f"{arguments.output} cannot be written: {error.strerror}")
    found = gpu.check(arguments.quick)
    arguments.output.write_text(json.dumps(found, indent=1))
    print(*page.lines(found), sep="\n")
    print(f"The full result is in {arguments.output}.")
    return 0 if all(each["kept"] for each in found["promises"]) else 1


if __name__ == "__main__":
    sys.exit(main())
