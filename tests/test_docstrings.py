"""Docstrings begin with one short sentence."""

import ast
import pathlib

from tests.common import once

pytestmark = once
ROOT = pathlib.Path(__file__).parent.parent / "keras_mp"
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


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
