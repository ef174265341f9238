"""Imports go one way, as docs/structure.md says."""

import ast
import io
import json
import pathlib
import re
import tokenize

import pytest

import keras_mp
from tests import private_names
from tests.common import once, run_program

pytestmark = once
ROOT = pathlib.Path(__file__).parent.parent / "keras_mp"

PAGE = (ROOT.parent / "docs" / "structure.md").read_text()
# What each subpackage may import of the package. Those that need TensorFlow only name no Keras.
SUBPACKAGES = {
    name: {name, *re.findall(r"`(\w+)`", imports)}
    for name, imports in re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", PAGE, re.MULTILINE)
    if name not in ("numerics", "compat")  # which import what they need
}
WITH_KERAS = ("keras_api", "wrappers", "layer_calls", "models")


def imported(path):
    """What a module imports."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
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


def test_modules_of_numerics_import_in_no_circle():
    paths = {path.stem: path for path in (ROOT / "numerics").glob("*.py")}
    left = {
        stem: {
            name.split(".")[2] for name in imported(path) if name.startswith("keras_mp.numerics.")
        }
        & paths.keys() - {stem}
        for stem, path in paths.items()
    }
    while ready := [stem for stem, names in left.items() if not names & left.keys()]:
        for stem in ready:
            del left[stem]
    assert not left


DOOR = re.compile(r"tensorflow\.(python|core|compiler)\b|tf\.__internal__")


def test_one_door_to_what_tensorflow_keeps_for_itself():
    for path in ROOT.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [*imported(path), *(ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute))]
        # Doors have paths in texts, and import nothing: `test_private_names.py` compares the texts.
        private = rf"{private_names.PRIVATE}|(tf\.)?(keras\.)?__internal__"
        assert not [name for name in names if re.match(private, name)], path
        if path.parent != ROOT / "tensorflow_api":
            texts = [n.value for n in nodes if isinstance(n, ast.Constant)]
            assert not [text for text in texts if isinstance(text, str) and DOOR.match(text)], path


def test_every_subpackage_is_checked():
    subpackages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert subpackages == {*SUBPACKAGES, "numerics", "compat"}


# Modules of the root that no program imports.
_OWN = {"__init__", "__main__", "_version", "extensions", "compile_hook"}
_BY_CLASS = {
    *("all_reduce_optimizer", "conversion", "grad_scaler", "loss_scale_gradient_tape", "policy"),
    *("loss_scale_optimizer", "master_weight_optimizer", "model_summary", "optimizer_wrapper"),
}


def test_the_root_has_what_programs_use():
    for path in ROOT.glob("*.py"):
        is_public = hasattr(keras_mp, path.stem) or path.stem in _BY_CLASS
        assert is_public or path.stem in _OWN, path


def test_nothing_but_the_package_itself_imports_its_tools():
    paths = [path for path in ROOT.rglob("*.py") if ROOT / "numerics" not in path.parents]
    importers = [path for path in paths if any(".numerics" in name for name in imported(path))]
    assert set(importers) <= {ROOT / "__init__.py", ROOT / "__main__.py"}


# What attaches to the core: speed, hardware, the graph rewrite, regions, tools.
ATTACHED = {
    *("kernels", "hardware", "grappler", "op_autocast", "numerics", "conversion", "graph_rewrite"),
    *("master_weights", "plots", "extensions"),
}
# Lines of code that a process loads which imports one module only, the doors to TensorFlow and
# Keras and what they load included; the code of the doors themselves apart.
LARGEST_CORE = {"loss_scale_optimizer": 2130, "grad_scaler": 1815, "policy": 2050}
# `keras_mp/__init__.py`, which imports nearly everything, is left out.
_IMPORT = """
import importlib, json, os, sys, tensorflow as tf
package = type(sys)("keras_mp")
package.__path__, sys.modules["keras_mp"] = sys.argv[1:2], package
for module in sys.argv[2:]:
    if not os.fork():
        importlib.import_module(f"keras_mp.{module}")
        print(json.dumps([each for each in sys.modules if "keras_mp." in each]), flush=True)
        os._exit(0)
    os.wait()
"""


def modules():
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def lines_of_code(path):
    """The number of lines without blank ones, comments and docstrings."""
    text, lines = path.read_text(), set()
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*ignored, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            lines -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return len(lines)


@pytest.mark.parametrize("legacy", ["0", "1"])
def test_the_core_loads_only_the_core(legacy):
    lines = run_program("-c", _IMPORT, ROOT, *LARGEST_CORE, TF_USE_LEGACY_KERAS=legacy).splitlines()
    for (module, bound), line in zip(LARGEST_CORE.items(), lines, strict=True):
        parts = {name: name.split(".")[1] for name in json.loads(line)}
        assert module in parts.values()
        assert not set(parts.values()) & ATTACHED
        paths, doors = dict(modules()), ("keras_api", "tensorflow_api")
        ours = [paths[name] for name, part in parts.items() if part not in doors]
        assert sum(map(lines_of_code, ours)) <= bound
