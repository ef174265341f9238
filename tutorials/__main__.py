"""Runs the notebooks of this folder and stores their outputs in them.

python -m tutorials [--output FOLDER] [names]
"""

import argparse
import os
import pathlib
import sys
import tempfile
import time

import nbclient
import nbformat

_FOLDER = pathlib.Path(__file__).parent
NOTEBOOKS = {path.stem: path for path in sorted(_FOLDER.glob("*.ipynb"))}


def main() -> int:
    """Runs those that were named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tutorials", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NOTEBOOKS), help=" ".join(NOTEBOOKS))
    parser.add_argument(
        "--output", type=pathlib.Path, default=_FOLDER, help="folder (default: where they are)"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(NOTEBOOKS)
    if unknown:
        parser.error(f"unknown notebooks {sorted(unknown)}; there are {list(NOTEBOOKS)}")
    for name in arguments.names:
        start = time.perf_counter()
        notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
        _run(notebook)
        nbformat.write(notebook, arguments.output / f"{name}.ipynb")
        print(f"{name}: {time.perf_counter() - start:.0f} s")
    return 0


def _run(notebook: nbformat.NotebookNode) -> None:
    """Runs a notebook in a folder of its own, and puts its outputs in place of the old ones."""
    path = [str(_FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=None,  # A machine that is busy may take long.
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            # TensorFlow's own log goes to this process's stderr, not into the notebook.
            extra_arguments=[
                "--IPKernelApp.capture_fd_output=False",
                "--IPKernelApp.log_level=ERROR",
            ],
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=environment)
    # Of the machine that it ran on.
    notebook.metadata.pop("language_info", None)


if __name__ == "__main__":
    sys.exit(main())
