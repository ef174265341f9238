"""Private names of TensorFlow and Keras, looked up at their first use.

A release may move any of them. Then `MissingName` says which one, and in which version.
"""

import importlib
import os
import pathlib
import re
import sys
import types
from typing import Any

import tensorflow as tf

# Paths that count as missing, to try out what a program is like without them.
_WITHOUT = frozenset(os.environ.get("KERAS_MP_WITHOUT", "").split())


class MissingName(RuntimeError):
    """A private name that this version of TensorFlow or Keras has not got."""


class Name:
    """A private function, class or method of TensorFlow or Keras.

    Calling it calls what is there now, which may have been replaced.

    Attributes:
        path: str. The dotted path; "tf" stands for the public package.
        attribute: str. The last part of the path.

    Args:
        path: str.

    Example:

    >>> from keras_mp.tensorflow_api.names import Name
    >>> Name("tf.__internal__.no_such_name").is_there()
    False
    """

    __slots__ = ("_owner", "attribute", "path")

    def __init__(self, path: str) -> None:
        self.path, self._owner = path, None
        self.attribute = path.rpartition(".")[2]

    @property
    def owner(self) -> Any:
        """The module or class that has the name.

        Raises:
            MissingName: nothing has it.
        """
        if self._owner is None:
            owner = None if self.path in _WITHOUT else _found(self.path.rpartition(".")[0])
            if owner is None or not self._is_in(owner):
                raise missing(self.path)
            self._owner = owner
        return self._owner

    def _is_in(self, owner: Any) -> bool:
        """Whether an owner has it."""
        return hasattr(owner, self.attribute)

    def get(self) -> Any:
        """Returns what the name stands for now.

        Raises:
            MissingName: nothing has the name.
        """
        return getattr(self._owner or self.owner, self.attribute)

    def set(self, value: Any) -> None:
        """Puts something else in the place of what the name stands for.

        Args:
            value: Any.

        Raises:
            MissingName: nothing has the name.
        """
        setattr(self.owner, self.attribute, value)

    def is_there(self) -> bool:
        """Whether this version has the name."""
        try:
            self.get()
        except MissingName:
            return False
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what the name stands for now."""
        return self.get()(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"


class Attribute(Name):
    """A private attribute of objects of a class, or one that a module's code reads.

    Such an attribute may be made by a constructor. So it counts as there if the source of the
    class, of its bases or of the module has the name.

    Args:
        path: str. The path of the class or module, and the attribute.
    """

    __slots__ = ()

    def _is_in(self, owner: Any) -> bool:
        """Whether the source of a module has it.

        Of a class, the modules that define it and its bases. It is True where there is no source.
        """
        classes = owner.__mro__ if isinstance(owner, type) else ()
        modules = {cls.__module__ for cls in classes} or {owner.__name__}
        files = {str(getattr(sys.modules.get(each), "__file__", None)) for each in modules}
        sources = [pathlib.Path(each) for each in files if each.endswith(".py")]
        texts = [each.read_text(encoding="utf-8") for each in sources if each.exists()]
        return not texts or any(re.search(rf"\b{self.attribute}\b", text) for text in texts)

    def get(self) -> Any:
        """Returns the class or module."""
        return self._owner or self.owner

    def of(self, value: object) -> Any:
        """Returns the attribute of an object.

        Args:
            value: the object.

        Raises:
            MissingName: it has none.
        """
        try:
            return getattr(self.get() and value, self.attribute)
        except AttributeError as error:
            raise missing(self.path) from error

    def set_of(self, value: object, attribute: Any) -> None:
        """Sets the attribute of an object.

        Args:
            value: the object.
            attribute: its new attribute.

        Raises:
            MissingName: such objects have none.
        """
        setattr(self.get() and value, self.attribute, attribute)


def missing(path: str) -> MissingName:
    """Returns the error about a name that is not there.

    Args:
        path: str. Its path.
    """
    package = path.partition(".")[0]
    title = {"keras": "Keras", "tf_keras": "tf_keras"}.get(package, "TensorFlow")
    module: Any = sys.modules.get({"tf": "tensorflow"}.get(package, package))
    version = getattr(module, "__version__", "")
    return MissingName(f"{title} {version} has no `{path}`")


def _found(path: str) -> Any:
    """Returns the module, or the class in one, of a path; None if there is none."""
    first, *parts = path.split(".")
    value: Any = tf if first == "tf" else importlib.import_module(first)
    name = first
    for part in parts:
        name += f".{part}"
        found = sys.modules.get(name) or getattr(value, part, None)
        if found is None and isinstance(value, types.ModuleType):
            try:
                found = importlib.import_module(name)
            except ImportError:
                return None
        if found is None:
            return None
        value = found
    return value
