"""What the notebooks of `tutorials/` have stored, and the program beside them.

`.ci/run` runs the notebooks on both Kerases: `python -m tutorials --check`.
"""

import re
import sys
import tempfile

import nbformat
import pytest

from tests.common import ROOT, once, run_program

pytestmark = once

NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))


def code_cells(path):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def text_of(cells):
    outputs = "\n".join(str(output) for cell in cells for output in cell.outputs)
    return re.sub(r"'image/png': '[^']*'", "", outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_of_one_run_and_of_no_machine(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    text = text_of(cells)
    assert text
    machine = ("Traceback", "stderr", str(ROOT), sys.prefix, tempfile.gettempdir(), " at 0x")
    assert {word for word in machine if word in text} == set()
    assert re.findall(r"(?:/home|/root|/tmp|/Users|/usr|[A-Z]:\\)\S*", text) == []


def test_the_program_with_a_dtype_flag():
    printed = run_program("-m", "tutorials.dtype_flag", "--dtype=mixed_float16", "--epochs=3")
    dtype, accuracy, *scale = printed.splitlines()
    assert dtype == "mixed_float16: layers compute in float16"
    assert float(accuracy.split()[-1]) > 0.8
    assert scale == ["loss scale 32768", "steps skipped 0"]
