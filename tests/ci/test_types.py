"""A type checker knows the public names, and those that are misspelled."""

import ast
import pathlib
import subprocess
import sys

import pytest

import keras_mp
from tests.common import IS_KERAS_3, once

ROOT = pathlib.Path(__file__).parent.parent.parent


def check(*paths):
    """Runs pyright; returns whether it found nothing, and what it said."""
    command = [sys.executable, "-m", "pyright", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout


@once
def test_the_package():
    is_right, output = check()
    assert is_right, output


@once
def test_a_program_that_uses_the_public_names_and_one_that_misspells_two(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("import keras_mp\nkeras_mp.LosScaleOptimizer\nkeras_mp.losses.Hubert\n")
    is_right, output = check("tests/ci/typed_program.py", path)
    assert not is_right
    assert '"LosScaleOptimizer" is not a known attribute' in output
    assert '"Hubert" is not a known attribute' in output
    assert "2 errors, 0 warnings" in output, output


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 3 has more of them.")
def test_a_checker_knows_all_built_in_losses():
    tree = ast.parse((ROOT / "keras_mp" / "losses.py").read_text())
    declared = {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "type[Loss]"
    }
    assert declared == set(keras_mp.losses._classes)
