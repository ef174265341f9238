"""The notebooks and the program of `tutorials/` run, and what is stored is what they print."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import nbformat
import pytest

from tests.common import IS_KERAS_3, once

ROOT = pathlib.Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )


def code_cells(path):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def kinds(cell):
    """What a cell's outputs are, but not what they say: figures differ between machines."""
    return [list(output.get("data", [output.get("name")])) for output in cell.outputs]


def text_of(cells):
    outputs = "\n".join(str(output) for cell in cells for output in cell.outputs)
    return re.sub(r"'image/png': '[^']*'", "'a picture'", outputs)


# On the Keras whose outputs are stored, and elsewhere those that tell its Kerases apart.
RUN = [path for path in NOTEBOOKS if IS_KERAS_3 or path.stem in ("moving", "replicas")]


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    done = run("tutorials", path.stem, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    cells, stored = code_cells(tmp_path / path.name), code_cells(path)
    assert {word for word in ("Traceback", "stderr") if word in text_of(cells)} == set()
    if IS_KERAS_3:
        assert list(map(kinds, cells)) == list(map(kinds, stored))


@once
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_of_one_run_and_of_no_machine(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    text = text_of(cells)
    assert "'a picture'" in text
    machine = ("Traceback", "stderr", str(ROOT), sys.prefix, tempfile.gettempdir(), " at 0x")
    assert {word for word in machine if word in text} == set()
    assert re.findall(r"(?:/home|/root|/tmp|/Users|/usr|[A-Z]:\\)\S*", text) == []


@once
def test_a_wrong_name_is_refused():
    done = run("tutorials", "speed")
    assert done.returncode == 2
    assert "unknown notebooks ['speed']" in done.stderr


@once
def test_the_program_with_a_dtype_flag():
    done = run("tutorials.dtype_flag", "--dtype=mixed_float16", "--epochs=3")
    assert done.returncode == 0, done.stderr
    dtype, accuracy, *scale = done.stdout.splitlines()
    assert dtype == "mixed_float16: layers compute in float16"
    assert float(accuracy.split()[-1]) > 0.8
    assert scale == ["loss scale 32768", "steps skipped 0"]
