import re
import runpy

import matplotlib
import pytest

import keras_mp
from tests import common
from tests.common import IS_KERAS_3, ROOT, needs_bfloat16_rewrite, once

matplotlib.use("agg")

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
DIFFERENCES = (ROOT / "docs" / "differences.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", DIFFERENCES, re.DOTALL)


def run_program(program, folder, *arguments):
    path = folder / "program.py"  # a file, since AutoGraph wants to read the source
    path.write_text(program)
    return common.run_program(path, *arguments).strip()


def test_the_blocks_run_in_order(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert len(BLOCKS) == 3
    assert "float32\n" in capsys.readouterr().out
    assert isinstance(names["model"].optimizer, keras_mp.LossScaleOptimizer)
    assert (tmp_path / "digits.keras").exists()
    assert (tmp_path / "loss_scale.png").read_bytes().startswith(b"\x89PNG")


@once
def test_the_first_page_is_short():
    assert len(README.splitlines()) <= 220


def test_the_loss_scale_is_as_the_page_says():
    assert "starts at 2\\*\\*15 and doubles after 2,000 finite steps in a row" in README
    config = keras_mp.DynamicLossScale().get_config()
    assert (config["initial_loss_scale"], config["increment_period"]) == (2**15, 2000)
    assert (config["multiplier"], config["backoff_multiplier"]) == (2, 0.5)
    assert "or 50 in a row, a warning" in README
    assert keras_mp.LossScaleOptimizer("sgd").warn_after_skips == 50


def test_each_symptom_has_a_call_that_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(BLOCKS[0].replace("epochs=3", "epochs=1"), "README.md", "exec"), names)
    names.update(x=names["images"][:64], y=names["labels"][:64])
    table = README[README.index("| symptom |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 6
    for row in table:
        _, cell, _, _ = (each.strip() for each in row.strip("|").split("|"))
        for call in re.findall("`([^`]+)`", cell):
            if "\n" not in call and call.startswith("with "):
                call = call.replace(": ", ":\n    ", 1)
            exec(compile(call, "README.md", "exec"), names)


@once
def test_links_lead_somewhere():
    blocks = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", blocks.sub("", page.read_text())):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_program_prints_what_the_page_says(tmp_path):
    assert run_program(PROGRAM, tmp_path) == "[1. 2.]"


@pytest.mark.skipif(not IS_KERAS_3, reason="It is Keras 3 that loses the model.")
def test_stock_keras_3_does_what_the_page_says(tmp_path):
    stock = "tf.keras.mixed_precision.LossScaleOptimizer"
    program = PROGRAM.replace("keras_mp.LossScaleOptimizer", stock)
    assert run_program(program, tmp_path) == "[-inf -inf]"


LAYERS = (ROOT / "docs" / "layers.md").read_text()


def printed_by_the_blocks_of(page, tmp_path, capfd, which=slice(None)):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    program = tmp_path / "program.py"  # a file, as in `run_program`
    program.write_text("\n".join(blocks[which]))
    runpy.run_path(str(program))
    return capfd.readouterr().out.splitlines()


def said_to_be_printed(page):
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^ *print.*  # (.*)$", text, re.MULTILINE)


PRINTED = {
    "layers.md": [
        "float32: weights in float32, outputs in float32",
        "mixed_bfloat16: weights in float32, outputs in bfloat16",
        *["bfloat16"] * 2,
    ],
    "grad_scaler.md": ["[True, True] 32768.0", "[True, False] 16384.0", "0.5 16384.0"],
    "compat_v1.md": ["True"],
    "autocast.md": said_to_be_printed("autocast.md"),
    "losses.md": [
        *("50.0", "float32 [[ 1. -1.]]"),
        "<Huber(delta=1.0, reduction={reduction!r}, name='huber', dtype='float32')>",
        *("0.0", "float32", "bfloat16", "bfloat16", "float32"),
    ],
}
# Of what else is printed, which depends on the machine: these words only.
WORDS = {
    "master_weights.md": ["bfloat16", "float32"],
    "serving.md": ["True"] * 3,
    **{page: said_to_be_printed(page) for page in ("saving.md", "normalization.md")},
}


@pytest.mark.filterwarnings("ignore:The global policy .bfloat16. keeps variables")
@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated:UserWarning")
@pytest.mark.parametrize("page", [*PRINTED, *WORDS])
def test_the_blocks_of_a_page_print_what_they_are_about(page, tmp_path, capfd):
    # The last one about layers is a program with an argument.
    which = slice(-1 if page == "layers.md" else None)
    lines = printed_by_the_blocks_of(page, tmp_path, capfd, which)
    assert {**PRINTED, **WORDS}[page]
    if page in WORDS:
        words = {*WORDS[page], "False"}
        assert [line for line in lines if line in words] == WORDS[page]
    else:
        reduction = "sum_over_batch_size" if IS_KERAS_3 else "auto"
        assert lines == [line.replace("{reduction!r}", repr(reduction)) for line in PRINTED[page]]


def test_the_block_about_overflows_prints_what_it_says(tmp_path, capfd):
    line, below_1 = printed_by_the_blocks_of("overflows.md", tmp_path, capfd)
    page = (ROOT / "docs" / "overflows.md").read_text()
    assert f"It prints `{line}`" in page
    assert f"  # {below_1}\n" in page


@needs_bfloat16_rewrite
def test_the_blocks_about_the_graph_rewrite_print_the_table(tmp_path, capfd):
    *lines, older_gpu, gpu, in_deny = printed_by_the_blocks_of("graph_rewrite.md", tmp_path, capfd)
    assert in_deny == "True"
    said = (ROOT / "docs" / "graph_rewrite.md").read_text()
    assert f"# {older_gpu}\n# {gpu}\n" in said
    # Another Keras, or TensorFlow, has other operations around the matrix products.
    [products] = [line.split()[:3] for line in lines if line.startswith("MatMul")]
    assert products == ["MatMul", "5", "0"]
    if IS_KERAS_3:
        assert lines[0] in said


def test_each_train_step_of_the_page_trains_as_that_of_keras(tmp_path, capfd):
    lines = printed_by_the_blocks_of("train_step.md", tmp_path, capfd)
    results = {name: list(map(float, values)) for name, *values in map(str.split, lines)}
    gans = ["GAN", "ScaledGAN"]
    assert list(results) == ["Regressor", "ScaledRegressor", "ClippedRegressor", *gans]
    assert all(0 < value < 10 for name in gans for value in results[name])
    loss, error = results["Regressor"]
    assert 0 < loss < 1  # from about 4
    assert results["ScaledRegressor"] == pytest.approx([loss, error], rel=1e-3)
    assert results["ClippedRegressor"] == pytest.approx([loss, error], rel=1e-3)


@once
def test_the_transformer_without_keras_learns_as_well_as_in_float32(tmp_path):
    *_, program = re.findall(r"```python\n(.*?)```", LAYERS, re.DOTALL)
    results = {}
    for dtype in ("bfloat16", "float32"):
        true_dtype, *rest = run_program(program, tmp_path, dtype).split()
        results[dtype] = float(rest[-1])
        assert [true_dtype, rest[0]] == ["float32", dtype]
    # Of 261 images; three standard errors of the difference of two such accuracies.
    assert results["bfloat16"] == pytest.approx(results["float32"], abs=0.1)
    assert results["bfloat16"] > 0.75


@once
def test_the_commands_are_those_of_ci():
    commands = ('pip install ".[test]"', "python -m tests")
    assert " && ".join(commands) in README
    assert all(f"{command}\n" in (ROOT / ".ci" / "run").read_text() for command in commands)
