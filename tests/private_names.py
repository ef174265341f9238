"""Finds the names in keras_mp's source that TensorFlow and the Kerases keep for themselves.

A name is private if it begins with an underscore or is under `__internal__`, and so are the paths
of modules in `keras.src`, `tf_keras.src` and `tensorflow.python`. The package has such names of its
own, too. One counts as not its own if no code of the package defines it, if it is a method that no
code of the package calls, or if a base class of any class of the package has it, or sets it.
"""

import ast
import functools
import importlib
import inspect
import pathlib
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable

import keras_mp
from tests.common import IS_KERAS_3

ROOT = pathlib.Path(keras_mp.__file__).parent

# Modules that nobody imports, which `test_subpackages.py` sees to, and what `names.Name` takes.
PRIVATE = r"((tf_)?keras\.src|tf_keras\.__internal__|tensorflow\.(python|core|compiler))\b"
_PATH = re.compile(rf"{PRIVATE}[\w.]+|tf\.(\w+\.)*(__internal__\.|_)[\w.]+")
_LIBRARIES = ("keras", "tf_keras", "tensorflow")
_NAME = re.compile(r"_[A-Za-z]\w*|[A-Za-z]\w*__")
# namedtuple documents them.
_PUBLIC = {"_asdict", "_fields", "_make", "_replace"}
# Those of the package's own that base classes of other classes have as well; and those that no
# definition and no assignment gives.
_OWN = {"_called", "_layers", "_lock", "_model", "_name", "_shape", "_updates", "_value"}
_OWN |= {"_variables", "_weights"} | {"_bare", "_noinline", "_strict_dtypes", "_weights_to_come"}
# What is for the Keras that is not there cannot be imported.
_OTHER_ADAPTER = "keras2" if IS_KERAS_3 else "keras3"


def find() -> dict[str, list[str]]:
    """Returns the private names of the libraries that the package touches, and where it does."""
    trees = {
        path: ast.parse(path.read_text())
        for path in sorted(ROOT.rglob("*.py"))
        if path.name != "__main__.py" and not path.name.startswith(_OTHER_ADAPTER)
    }
    found: dict[str, list[str]] = defaultdict(list)
    uses: dict[str, list[str]] = defaultdict(list)
    methods: dict[str, list[str]] = defaultdict(list)
    own, of_bases = set(_OWN), set()
    for path, tree in trees.items():
        relative = path.relative_to(ROOT)
        own |= _defined(tree)
        of_bases |= _names_of_bases(relative)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _NAME.fullmatch(node.attr):
                uses[node.attr].append(f"{relative}:{node.lineno}")
            elif _is_text(node, _NAME.fullmatch):
                uses[node.value].append(f"{relative}:{node.lineno}")
            elif _is_text(node, _PATH.fullmatch):
                found[node.value].append(f"{relative}:{node.lineno}")
            elif isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and _NAME.fullmatch(each.name):
                        methods[each.name].append(f"{relative}:{each.lineno}")
    found |= {name: places for name, places in methods.items() if name not in uses}
    is_foreign = {name for name in uses if name not in own or name in of_bases - _OWN}
    found |= {name: uses[name] + methods[name] for name in is_foreign}
    # The last part of a path has been found as a part of it.
    known = _PUBLIC | {name.rpartition(".")[2] for name in found if "." in name}
    return {name: places for name, places in found.items() if name not in known}


def _defined(tree: ast.Module) -> set[str]:
    """Names that the module gives to something."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = node.attr.startswith("_keras_mp_") or ast.unparse(node.value) == "self"
            names |= {node.attr} if is_own else set()
    return names


def _is_text(node: ast.AST, matches: Callable[[str], object]) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and bool(matches(node.value))


def _module(relative: pathlib.Path) -> object:
    name = ".".join(["keras_mp", *relative.with_suffix("").parts])
    return importlib.import_module(name.removesuffix(".__init__"))


def _names_of_bases(relative: pathlib.Path) -> set[str]:
    """Private names that base classes of a module's classes have, or give to their instances."""
    module = _module(relative)
    own = [each for each in vars(module).values() if inspect.isclass(each)]
    bases = {base for cls in own if cls.__module__ == module.__name__ for base in cls.__mro__}
    of_libraries = (b for b in bases if b.__module__.partition(".")[0] in _LIBRARIES)
    return set().union(*map(_names_of, of_libraries))


@functools.cache
def _names_of(base: type) -> frozenset[str]:
    names = set(vars(base))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
    except (OSError, TypeError):  # it is not of Python
        tree = ast.Module([], [])
    names |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return frozenset(name for name in names if _NAME.fullmatch(name))
