"""The reference is built without a warning, and holds every public name."""

import ast
import doctest
import inspect
import pkgutil
import subprocess
import sys
import zlib

import pytest

import keras_mp
from tests.common import IS_KERAS_3, ROOT, once, run_program

VALUES = {name: getattr(keras_mp, name) for name in keras_mp.__all__}
PUBLIC = {f"keras_mp.{name}": value for name, value in VALUES.items() if callable(value)}
MODULES = list(filter(inspect.ismodule, VALUES.values()))
for package in (keras_mp.compat, keras_mp.numerics):
    MODULES += filter(inspect.ismodule, (getattr(package, name) for name in package.__all__))
# Of the submodules: what they list, or else define, and is not in `keras_mp` too.
PUBLIC |= {
    f"{module.__name__}.{name}": value
    for module in MODULES
    for name, value in vars(module).items()
    if (
        name in module.__all__
        if hasattr(module, "__all__")
        else not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )
    and value not in PUBLIC.values()
    and not inspect.ismodule(value)
}
PLACES = {name: f"{value.__module__}.{value.__qualname__}" for name, value in PUBLIC.items()}


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """The names in a reference that was built just now."""
    folder = tmp_path_factory.mktemp("reference")
    run_program("-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(folder))
    # The format of Sphinx's inventories: four lines, then compressed ones of a name, a kind, a
    # priority (-1 for the place where something is defined that is public elsewhere) and more.
    inventory = zlib.decompress((folder / "objects.inv").read_bytes().split(b"\n", 4)[4])
    entries = [line.split() for line in inventory.decode().splitlines()]
    kinds = ("py:class", "py:exception", "py:function")
    return {name for name, kind, priority, *_ in entries if kind in kinds and priority != "-1"}


@once
def test_the_reference_lists_every_public_name_and_no_other(listed):
    assert listed == set(PUBLIC)
    assert {"keras_mp.Policy", "keras_mp.layers.Layer", "keras_mp.losses.Huber"} <= listed


def test_every_public_name_has_an_example_that_the_tests_run(pytestconfig):
    assert pytestconfig.getoption("doctestmodules")
    assert "keras_mp" in pytestconfig.getini("testpaths")
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [m.name for m in pkgutil.walk_packages(keras_mp.__path__, "keras_mp.")]
    run = {
        test.name
        for module in modules
        if module in sys.modules
        for test in finder.find(sys.modules[module])
        if test.examples
    }
    assert {name for name, place in PLACES.items() if place not in run} == set()


def test_every_public_method_has_a_docstring():
    without = {
        f"{name}.{method}"
        for name, value in PUBLIC.items()
        if inspect.isclass(value)
        for method, function in vars(value).items()
        if not method.startswith("_")
        and callable(function)
        and not inspect.getdoc(function)
        # `layers.Layer` runs the `call` of Keras in its policy, once somebody has made one.
        and function.__module__.startswith("keras_mp")
    }
    assert without == set()


# What a type checker knows.


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
