"""Finds the names in keras_mp's source that TensorFlow and the Kerases keep for themselves.

A name is private if it begins with an underscore or is under `__internal__`, and so is what is
imported from `keras.src`, `tf_keras.src` and `tensorflow.python`. The package has such names of its
own, too. One counts as not its own if

- no code of the package defines it, or it is a method that no code of the package calls;
- it is used on `self`, and a base class outside of the package has it, or sets it;
- it is used on another object, and a base class of any class of the package has it.
"""

import ast
import functools
import importlib
import inspect
import pathlib
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras_mp
from tests.common import IS_KERAS_3

ROOT = pathlib.Path(keras_mp.__file__).parent

_PRIVATE_PACKAGES = re.compile(
    r"(keras\.src|tf_keras\.(src|__internal__)|tensorflow\.(python|core|compiler))\b"
)
# What `tensorflow_api.names.Name` takes.
_PATH = re.compile(rf"{_PRIVATE_PACKAGES.pattern}[\w.]+|tf\.(\w+\.)*(__internal__\.|_)[\w.]+")
_LIBRARIES = ("keras", "tf_keras", "tensorflow")
_NAME = re.compile(r"_[A-Za-z]\w*|[A-Za-z]\w*__")
# namedtuple documents them.
_PUBLIC = {"_asdict", "_fields", "_make", "_replace"}
# What is for the Keras that is not there cannot be imported.
_OTHER_ADAPTER = "keras2" if IS_KERAS_3 else "keras3"


class _Use(NamedTuple):
    """One place where a name stands.

    Attributes:
        name: the name.
        place: file and line.
        owner: the class in which it stands, where it stands for something of that class.
        is_definition: is a method of that name defined there?
        is_call_of_base: is it `super().name`?
    """

    name: str
    place: str
    owner: type | None = None
    is_definition: bool = False
    is_call_of_base: bool = False


def find() -> dict[str, list[str]]:
    """Returns the private names of the libraries that the package touches, and where it does."""
    trees = {
        path: ast.parse(path.read_text())
        for path in sorted(ROOT.rglob("*.py"))
        if path.name != "__main__.py" and not path.name.startswith(_OTHER_ADAPTER)
    }
    found: dict[str, list[str]] = defaultdict(list)
    uses, own = [], set()
    for path, tree in trees.items():
        for name, line in _imported(tree):
            found[name].append(f"{path.relative_to(ROOT)}:{line}")
        own |= _defined(tree)
        uses += _uses(path, tree)
    foreign = set().union(*(_names_of_bases(use.owner) for use in uses if use.owner))
    used = {use.name for use in uses if not use.is_definition and not use.is_call_of_base}
    for use in uses:
        if use.owner is not None:
            is_foreign = use.name in _names_of_bases(use.owner)
            is_foreign |= use.is_definition and use.name not in used
        else:
            is_foreign = use.name in foreign
        if is_foreign or (use.name not in own and not use.is_definition):
            found[use.name].append(use.place)
    # The last part of a path has been found as a part of it.
    known = _PUBLIC | {name.rpartition(".")[2] for name in found if "." in name}
    return {name: places for name, places in found.items() if name not in known}


def _imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields what is used of private modules and of `__internal__`, with the line."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _PRIVATE_PACKAGES.match(node.module or ""):
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _PRIVATE_PACKAGES.match(alias.name):
                    modules[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif _is_text(node, _PATH.fullmatch):
            yield node.value, node.lineno
    seen = set()
    for node in ast.walk(tree):  # from the outside in
        if isinstance(node, ast.Attribute) and node not in seen:
            path = ast.unparse(node)
            if "__internal__." in path:
                seen.update(ast.walk(node))
                yield re.sub(r"^keras\.", "tf.keras.", path), node.lineno
            elif isinstance(node.value, ast.Name) and node.value.id in modules:
                seen.update(ast.walk(node))
                yield f"{modules[node.value.id]}.{node.attr}", node.lineno
        elif isinstance(node, ast.Name) and node not in seen and node.id in modules:
            yield modules[node.id], node.lineno


def _defined(tree: ast.Module) -> set[str]:
    """Names that the module gives to something."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if node.attr.startswith("_keras_mp_") or ast.unparse(node.value) == "self":
                names.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Dict):
            names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        elif _is_of_self(node):
            names.add(node.slice.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return names


def _is_of_self(node: ast.AST) -> bool:
    """Is it `vars(self)["name"]`, where something is assigned to it?"""
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.slice, ast.Constant)
        and ast.unparse(node.value) == "vars(self)"
    )


def _is_text(node: ast.AST, matches: Callable[[str], object]) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and bool(matches(node.value))


def _module(relative: pathlib.Path) -> object:
    name = ".".join(["keras_mp", *relative.with_suffix("").parts])
    return importlib.import_module(name.removesuffix(".__init__"))


def _uses(path: pathlib.Path, tree: ast.Module) -> Iterator[_Use]:
    relative = path.relative_to(ROOT)

    def walk(node: ast.AST, owner: type | None, scope: object) -> Iterator[_Use]:
        for child in ast.iter_child_nodes(node):
            place = f"{relative}:{getattr(child, 'lineno', 0)}"
            child_owner, child_scope = owner, scope
            if isinstance(child, ast.ClassDef):
                child_scope = child_owner = getattr(scope, child.name, None)
            elif isinstance(child, ast.FunctionDef):
                if owner is not None and scope is owner and _NAME.fullmatch(child.name):
                    yield _Use(child.name, place, owner, is_definition=True)
                child_scope = None
            elif isinstance(child, ast.Attribute) and _NAME.fullmatch(child.attr):
                on = ast.unparse(child.value)
                is_base = on == "super()"
                is_own = is_base or on in ("self", "cls", "vars(self)")
                yield _Use(child.attr, place, owner if is_own else None, is_call_of_base=is_base)
            elif _is_text(child, _NAME.fullmatch):
                yield _Use(child.value, place)
            yield from walk(child, child_owner, child_scope)

    return walk(tree, None, _module(relative))


@functools.cache
def _names_of_bases(cls: type) -> frozenset[str]:
    """Private names that the base classes of a class of ours have, or give to their instances."""
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in _LIBRARIES]
    return frozenset().union(*map(_names_of, bases))


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
