"""Runs the notebooks of this folder and stores their outputs in them, or checks them.

python -m tutorials [--output FOLDER | --check] [names]
"""

import argparse
import copy
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
    parser.add_argument(
        "--check", action="store_true", help="store nothing; fail if they print other things"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(NOTEBOOKS)
    if unknown:
        parser.error(f"unknown notebooks {sorted(unknown)}; there are {list(NOTEBOOKS)}")
    failed = []
    for name in arguments.names:
        start = time.perf_counter()
        notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
        stored = copy.deepcopy(notebook)
        try:
            _run(notebook)
        except nbclient.exceptions.CellExecutionError as error:
            failed.append(f"{name}: {error}")  # The others are run all the same.
            continue
        if arguments.check:
            failed += [f"{name}: {what}" for what in differences(stored, notebook)]
        else:
            nbformat.write(notebook, arguments.output / f"{name}.ipynb")
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(*failed, sep="\n")
    return bool(failed)


def differences(stored: nbformat.NotebookNode, new: nbformat.NotebookNode) -> list[str]:
    """Returns what is wrong with the outputs of a run, a line for each cell.

    They have to be of the same kinds as those stored, which are of Keras 3: figures differ between
    machines, and some of what is printed between the Kerases.
    """
    found = []
    for place, (old, cell) in enumerate(zip(_code(stored), _code(new)), 1):
        if errors := _errors(cell):
            found.append(f"cell {place} writes to stderr: {errors}")
        elif os.environ.get("TF_USE_LEGACY_KERAS") != "1" and _kinds(cell) != _kinds(old):
            found.append(f"cell {place} gives {_kinds(cell)}, and {_kinds(old)} are stored")
    return found


def _code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _errors(cell: nbformat.NotebookNode) -> list[str]:
    """The lines of stderr, without that of Keras 2 on a busy machine."""
    texts = [output["text"] for output in cell.outputs if output.get("name") == "stderr"]
    lines = "".join(texts).splitlines()
    return [line for line in lines if "is slow compared to the batch time" not in line]


def _kinds(cell: nbformat.NotebookNode) -> list[list[str]]:
    return [sorted(output.get("data", [output.get("name")])) for output in cell.outputs]


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
