import os
import pathlib
import re
import subprocess
import sys

import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, mirrored

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
*BLOCKS, PROGRAM = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run_program(program):
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() or run.stderr


def test_the_blocks_run_in_order(monkeypatch):
    strategy = mirrored(2)
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: strategy)
    names = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert len(BLOCKS) == 3
    assert isinstance(names["model"].optimizer, keras_mp.LossScaleOptimizer)


def test_the_program_prints_what_the_readme_says():
    assert run_program(PROGRAM) == "[1. 2.]"


@pytest.mark.skipif(not IS_KERAS_3, reason="It is Keras 3 that loses the model.")
def test_stock_keras_3_does_what_the_readme_says():
    stock = "tf.keras.mixed_precision.LossScaleOptimizer"
    assert run_program(PROGRAM.replace("keras_mp.LossScaleOptimizer", stock)) == "[-inf -inf]"


def test_the_commands_are_those_of_ci():
    command = 'pip install ".[test]" && python -m tests'
    assert command in README
    assert command in (ROOT / ".ci" / "run").read_text()
