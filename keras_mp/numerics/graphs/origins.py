"""The origin of an operation in a traced function: its layer, the user's line, whose code."""

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Container, Mapping, Sequence

import tensorflow as tf

from keras_mp.kernels import compositions
from keras_mp.models.layer_paths import layers_by_path
from keras_mp.support import messages, op_table
from keras_mp.support.autograph import do_not_convert

_GRADIENT = "gradient_tape"
_PACKAGES = {
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "tf_keras": "Keras",
    "keras_mp": "keras_mp",
}
# They hand on the numbers that they get.
MOVES = op_table.ops("identities", "reshapes", "views")
# What is in the place of TensorFlow's functions: the code that calls it makes the operation.
_LIKE_TENSORFLOW = tuple(os.path.join("src", each) + os.sep for each in ("ops", "backend", "utils"))
# Files and functions that call one of TensorFlow, and do no more unless it has refused.
_HANDING_ON = {
    os.path.join("hooks", "installer.py"): ("call",),
    os.path.join("op_autocast", "dispatch.py"): ("call",),
    os.path.join("op_autocast", "promotion.py"): (
        *("apply_op_helper", "assign", "make", "cast", "multiply"),
    ),
    os.path.join("kernels", "backward.py"): ("make",),
}


class Layers:
    """Finds the layer that an operation belongs to, by the scopes in its name.

    What a layer is called does not tell its scope: Keras 3 enters "dense_1" for a layer "dense"
    whose name is taken in the graph. So the scopes are those that were seen in calls.

    Args:
        model: a model of `tf.keras`, or None for functions of other code, which have no layers.
        scopes: dict of scopes and of the paths of the layers whose calls ran in them, as
            `traces.step_of` notes them.
    """

    def __init__(
        self, model: tf.keras.Model | None = None, scopes: Mapping[str, str] | None = None
    ) -> None:
        self._layers = {} if model is None else layers_by_path(model)
        self._scopes = scopes or {}
        self._found = functools.cache(self._find)

    def path(self, name: str) -> tuple[tuple[str, tf.keras.layers.Layer], ...]:
        """Returns the layers around an operation, the outermost first, each with its path.

        Args:
            name: str. The operation's name; one of the backward pass has its layer's name in it.
        """
        return self._found(name.rpartition("/")[0])

    @do_not_convert
    def _find(self, scopes: str) -> tuple[tuple[str, tf.keras.layers.Layer], ...]:
        parts = [part for part in scopes.split("/") if part != _GRADIENT]
        # Grappler puts names of its own before that which an operation had.
        known = [
            tuple(
                self._scopes[scope]
                for end in range(start + 1, len(parts) + 1)
                if (scope := "/".join(parts[start:end])) in self._scopes
            )
            for start in range(len(parts))
        ]
        around = dict.fromkeys(max(known, key=len, default=()))
        return tuple((path, self._layers[path]) for path in around if path in self._layers)

    def name(self, name: str) -> str:
        """Returns the path of the layer of an operation, such as "encoder/dense"; "" for none."""
        path = self.path(name)
        return path[-1][0] if path else ""

    def layer(self, name: str) -> tf.keras.layers.Layer | None:
        """Returns the innermost layer of an operation, or None."""
        path = self.path(name)
        return path[-1][1] if path else None


def forward_name(name: str, known: Container[str]) -> str:
    """Returns the name of the operation that one of the backward pass belongs to.

    Args:
        name: str. Of any operation.
        known: the names of all operations.
    """
    before, is_gradient, after = name.partition(f"{_GRADIENT}/")
    around = before + after if is_gradient else ""
    while around:
        around = around.rpartition("/")[0]
        if around in known:
            return around
    return name


def is_of_backward_pass(name: str) -> bool:
    """Whether an operation with this name belongs to the backward pass."""
    return _GRADIENT in name.split("/")


def line_of(operation: tf.Operation) -> messages.Line | None:
    """Returns the innermost line, in a program or in a layer that is not Keras's, of an operation.

    Args:
        operation: `tf.Operation`.

    Returns:
        The line; None if only TensorFlow, Keras and keras_mp had a part in it.
    """
    for frame in _below_this_package(operation):
        if not is_library(frame.filename):
            return messages.Line(frame.filename, frame.lineno or 0)
    return None


def maker_of(operation: tf.Operation) -> str:
    """Returns whose code made an operation: "TensorFlow", "Keras", "keras_mp" or "user".

    What is in the place of TensorFlow's functions is looked through, as is TensorFlow.

    Args:
        operation: `tf.Operation`.
    """
    for frame in _below_this_package(operation):
        package = _package(frame.filename)
        if package is None:
            return "user"
        if frame.filename == compositions.__file__:
            continue  # It stands in for a function of TensorFlow.
        if any(frame.filename.endswith(f) and frame.name in n for f, n in _HANDING_ON.items()):
            continue
        is_like_tensorflow = any(part in frame.filename for part in _LIKE_TENSORFLOW)
        if package != "TensorFlow" and not is_like_tensorflow:
            return package
    return "TensorFlow"


def is_made_in(
    operation: tf.Operation, files: Sequence[str], functions: Sequence[str] = ()
) -> bool:
    """Whether an operation was made by one of these functions, or by what they call.

    Args:
        operation: `tf.Operation`.
        files: ends of file names; empty for any file of a library.
        functions: names of functions; empty for any.
    """
    return any(
        (frame.filename.endswith(tuple(files)) if files else is_library(frame.filename))
        and (not functions or frame.name in functions)
        for frame in _below_this_package(operation)
    )


def _below_this_package(operation: tf.Operation) -> list[traceback.FrameSummary]:
    """Returns the frames of an operation up to those that traced it, the innermost first."""
    frames = list(operation.traceback)
    for start in range(len(frames) - 1, -1, -1):
        if frames[start].filename.startswith(_HERE):
            frames = frames[start + 1 :]
            break
    return frames[::-1]


_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
# Both Kerases call a layer by way of one of them.
_TREES = tuple(os.sep + os.path.join("site-packages", name) + os.sep for name in ("optree", "tree"))


@functools.cache
def is_library(filename: str) -> bool:
    """Whether a file is of Python, TensorFlow, Keras or keras_mp, and not of a program."""
    is_python = filename.startswith(_PYTHON) and "-packages" not in filename
    is_tree = any(folder in filename for folder in _TREES)
    return is_python or is_tree or messages.is_library(filename)


@functools.cache
def _package(filename: str) -> str | None:
    for name, title in _PACKAGES.items():
        module = sys.modules.get(name)
        if module is None or module.__file__ is None or filename.endswith("__main__.py"):
            continue
        if filename.startswith(os.path.dirname(module.__file__) + os.sep):
            return title
    return "TensorFlow" if is_library(filename) else None
