import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, mirrored

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROGRAM, *BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run_program(program, *args):
    with tempfile.TemporaryDirectory() as folder:
        # A file, since AutoGraph wants to read the source.
        path = pathlib.Path(folder) / "program.py"
        path.write_text(program)
        run = subprocess.run(
            [sys.executable, str(path), *args],
            cwd=ROOT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)},
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
    assert len(BLOCKS) == 7
    assert isinstance(names["model"].optimizer, keras_mp.LossScaleOptimizer)


def test_the_program_prints_what_the_readme_says():
    assert run_program(PROGRAM) == "[1. 2.]"


@pytest.mark.skipif(not IS_KERAS_3, reason="It is Keras 3 that loses the model.")
def test_stock_keras_3_does_what_the_readme_says():
    stock = "tf.keras.mixed_precision.LossScaleOptimizer"
    assert run_program(PROGRAM.replace("keras_mp.LossScaleOptimizer", stock)) == "[-inf -inf]"


LAYERS = (ROOT / "docs" / "layers.md").read_text()


def test_the_blocks_about_layers_print_what_they_are_about():
    *blocks, _ = re.findall(r"```python\n(.*?)```", LAYERS, re.DOTALL)
    assert run_program("\n".join(blocks)).split("\n") == [
        "float32: weights in float32, outputs in float32",
        "mixed_bfloat16: weights in float32, outputs in bfloat16",
        "bfloat16",
    ]


LOSSES = (ROOT / "docs" / "losses.md").read_text()


def test_the_blocks_about_losses_print_what_they_are_about():
    blocks = re.findall(r"```python\n(.*?)```", LOSSES, re.DOTALL)
    reduction = "sum_over_batch_size" if IS_KERAS_3 else "auto"
    assert run_program("\n".join(blocks)).split("\n") == [
        "50.0",
        "float32 [[ 1. -1.]]",
        f"<Huber(delta=1.0, reduction={reduction!r}, name='huber', dtype='float32')>",
        "0.0",
    ]


SAVING = (ROOT / "docs" / "saving.md").read_text()


def test_the_blocks_about_saving_print_what_they_say():
    program = "\n".join(re.findall(r"```python\n(.*?)```", SAVING, re.DOTALL))
    said = re.findall(r"^print.*  # (.*)$", program, re.MULTILINE)
    assert len(said) == 5
    lines = run_program(program).split("\n")
    assert [line for line in lines if line in said] == said


def test_the_transformer_without_keras_learns_as_well_as_in_float32():
    *_, program = re.findall(r"```python\n(.*?)```", LAYERS, re.DOTALL)
    results = {}
    for dtype in ("bfloat16", "float32"):
        true_dtype, *rest = run_program(program, dtype).split()
        results[dtype] = float(rest[-1])
        assert [true_dtype, rest[0]] == ["float32", dtype]
    # Of 261 images; three standard errors of the difference of two such accuracies.
    assert results["bfloat16"] == pytest.approx(results["float32"], abs=0.1)
    assert results["bfloat16"] > 0.75


def test_the_commands_are_those_of_ci():
    command = 'pip install ".[test]" && python -m tests'
    assert command in README
    assert command in (ROOT / ".ci" / "run").read_text()
