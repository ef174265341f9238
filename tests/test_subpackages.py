"""Imports go one way, as docs/structure.md says."""

import ast
import pathlib
import re

import pytest

from tests.common import once

pytestmark = once
ROOT = pathlib.Path(__file__).parent.parent / "keras_mp"

# What each subpackage may import of the package. Those that need TensorFlow only name no Keras.
SUBPACKAGES = {
    "tensorflow_api": {"tensorflow_api"},
    "support": {"support", "tensorflow_api"},
    "hooks": {"hooks", "support", "tensorflow_api"},
    "variables": {"variables", "hooks", "support", "kernels", "tensorflow_api"},
    "kernels": {"kernels", "hooks", "support", "tensorflow_api"},
    "step": {"step", "hooks", "variables", "support", "tensorflow_api"},
    "master_weights": {"master_weights", "hooks", "step", "variables", "support"},
    "hardware": {"hardware", "hooks", "kernels", "support"},
    "op_autocast": {
        *("op_autocast", "hardware", "variables", "kernels", "hooks", "support"),
        "tensorflow_api",
    },
    "grappler": {"grappler", "support", "tensorflow_api"},
    "keras_api": {
        *("keras_api", "step", "variables", "kernels", "hooks", "support", "tensorflow_api"),
    },
    "numerics": {
        *("numerics", "keras_api", "step", "variables", "op_autocast", "kernels", "grappler"),
        *("hardware", "hooks", "support", "loss_scale", "loss_scale_optimizer", "losses", "layers"),
        *("policy", "conversion", "model_summary", "optimizer_wrapper", "layer_paths"),
        *("low_precision_weights", "callbacks", "raw_inputs", "model_steps", "model_outputs"),
        "tensorflow_api",
    },
    # It uses the package as programs do.
    "hardware_check": {"hardware_check", "hooks", "keras_api", "hardware", "kernels", "support"},
}

# The folders of numerics, and which others each may import.
TOOLS = {
    "operations": set(),
    "graphs": set(),
    "comparison": {"operations"},
    "exponents": {"comparison"},
    "hazards": {"graphs"},
}

WITH_KERAS = ("keras_api", "numerics", "hardware_check")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_a_subpackage_imports_only_what_is_below_it(subpackage):
    paths = [path for path in (ROOT / subpackage).rglob("*.py") if path.name != "__main__.py"]
    assert paths
    for path in paths:
        names = [name.split(".") for name in imported(path)]
        ours = {parts[1] for parts in names if parts[0] == "keras_mp" and len(parts) > 1}
        assert ours <= SUBPACKAGES[subpackage], path
        if subpackage not in WITH_KERAS:
            assert not {"keras", "tf_keras"} & {parts[0] for parts in names}, path
            code = ast.walk(ast.parse(path.read_text()))
            assert "tf.keras" not in {
                ast.unparse(node) for node in code if isinstance(node, ast.Attribute)
            }, path


@pytest.mark.parametrize("folder", TOOLS)
def test_tools_of_numerics_import_one_way(folder):
    for path in (ROOT / "numerics" / folder).glob("*.py"):
        names = [name.split(".") for name in imported(path)]
        others = {parts[2] for parts in names if parts[:2] == ["keras_mp", "numerics"]}
        assert others & TOOLS.keys() <= {folder} | TOOLS[folder], path


PRIVATE = re.compile(r"tensorflow\.(python|core|compiler)\b|tf\.__internal__")


def test_one_door_to_what_tensorflow_keeps_for_itself():
    for path in set(ROOT.rglob("*.py")) - set((ROOT / "tensorflow_api").glob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [*imported(path), *(ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute))]
        names += [n.value for n in nodes if isinstance(n, ast.Constant)]
        assert not [name for name in names if isinstance(name, str) and PRIVATE.match(name)], path


def test_every_subpackage_is_checked():
    subpackages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert subpackages == {*SUBPACKAGES, "compat"}


def test_the_page_has_the_imports():
    page = (ROOT.parent / "docs" / "structure.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", page, re.MULTILINE))
    for subpackage in SUBPACKAGES.keys() - {"numerics"}:
        listed = set(re.findall(r"`(\w+)`", rows[subpackage]))
        assert listed == SUBPACKAGES[subpackage] - {subpackage}, subpackage


def test_nothing_but_the_package_itself_imports_its_tools():
    paths = [path for path in ROOT.rglob("*.py") if ROOT / "numerics" not in path.parents]
    importers = [path for path in paths if any(".numerics" in name for name in imported(path))]
    assert set(importers) <= {ROOT / "__init__.py", ROOT / "__main__.py"}
