"""The package as a whole: what it shows."""

import ast
import inspect
import pathlib

import pytest

import keras_mp
from tests.common import once


def test_dir_shows_the_public_names_and_nothing_else():
    assert dir(keras_mp) == sorted(keras_mp.__all__)
    assert [name for name, _ in inspect.getmembers(keras_mp)] == sorted(keras_mp.__all__)


def test_what_is_not_shown_can_be_imported():
    assert keras_mp.keras_api.ROOT_PACKAGE in ("keras", "tf_keras")


def test_what_is_imported_later_is_what_editors_are_told():
    tree = ast.parse(inspect.getsource(keras_mp))
    branch = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name: node.module for node in branch.body for alias in node.names}
    modules = {n: m if m == "keras_mp" else m.removeprefix("keras_mp.") for n, m in names.items()}
    assert keras_mp._LATER == {n: n if m == "keras_mp" else m for n, m in modules.items()}


def test_names_that_are_imported_later():
    assert keras_mp.GradScaler.__name__ == "GradScaler"
    assert inspect.ismodule(keras_mp.plots)
    with pytest.raises(AttributeError, match="module 'keras_mp' has no attribute 'GradScalar'"):
        keras_mp.GradScalar  # noqa: B018


# Docstrings begin with one short sentence.


ROOT = pathlib.Path(keras_mp.__file__).parent
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@once
def test_the_first_paragraph_is_short_outside_of_numerics():
    paths = sorted(set(ROOT.rglob("*.py")) - set((ROOT / "numerics").rglob("*.py")))
    assert paths
    long = [
        f"{path.relative_to(ROOT)}, line {node.body[0].lineno}: {summary}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, DOCUMENTED)
        and len(summary := " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split()))
        > 80
    ]
    assert not long
