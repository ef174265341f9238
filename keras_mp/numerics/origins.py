"""The origin of an operation, in eager and in graphs: its layer, its line, whose code it is.

Layers are observed while a step is made: which of them is running in each thread, and in which name
scopes they are called.
"""

import contextlib
import functools
import inspect
import itertools
import os
import re
import threading
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.hooks import wrapped
from keras_mp.layer_calls import layer_observers, model_outputs
from keras_mp.layer_calls.layer_observers import LayerCall, LayerObserver
from keras_mp.models.layer_paths import layers_by_path
from keras_mp.support import attributes, op_table
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.messages import Line, is_library, library_of
from keras_mp.tensorflow_api import gradients

_GRADIENT = "gradient_tape"
# Files of tools, and what is around the call of a layer that tools observe.
_TOOLS = (os.path.dirname(__file__) + os.sep, layer_observers.__file__)
# They hand on the numbers that they get.
MOVES = op_table.ops("identities", "reshapes", "views")
# They move or rename numbers, and compute none.
_SAFE = op_table.ops(
    *("arguments", "constants", "reads of variables", "fills", "no numbers"),
    *op_table.SAME_NUMBERS,
)
# What is in the place of TensorFlow's functions, or hands on to them; and files that call gradient
# functions.
_LIKE_TENSORFLOW = (
    *("/src/ops/", "/src/backend/", "/src/utils/"),
    *("/keras_mp/hooks/", "/keras_mp/kernels/", "/keras_mp/op_autocast/"),
)
_GRADIENT_FILES = ("/python/eager/backprop.py", "/python/ops/gradients_util.py")


# A function that was running when an operation was made: its file, the line in it, its name.
Frame = tuple[str, int, str]


class _ThreadState(threading.local):
    """The layers that a thread is calling.

    Attributes:
        running: tuple of the paths of the layers whose calls are going on, where they are named.
    """

    running: tuple[str, ...] = ()


_thread = _ThreadState()


@contextlib.contextmanager
def naming(model: tf.keras.Model) -> Iterator[None]:
    """Lets `running_layer` name the layers of a model, inside of the block.

    Name scopes do not tell them: Keras 3 enters "dense_1" for a layer "dense" whose name is taken
    in the graph, and a layer that is shared has a scope for each call.

    Args:
        model: of `tf.keras`. What it computes between its layers has its name.
    """
    named = {model.name: model, **layers_by_path(model)}.items()
    hook = gradients.record_operation
    with (
        layer_observers.attached(Layers(None), named, to_all_threads=True),
        wrapped.everywhere(hook.owner, hook.attribute, _with_layer_in_backward_pass),
    ):
        yield


def running_layer() -> str:
    """Returns the path of the innermost layer that this thread is calling; "" if none is known.

    While the backward pass of a `tf.custom_gradient` runs, that is the layer that has called it.
    """
    return _thread.running[-1] if _thread.running else ""


def _with_layer_in_backward_pass(record_operation: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the layer known again while a gradient function of the program runs.

    TensorFlow gives the operations of this function no scope of the forward pass.
    """

    @functools.wraps(record_operation)
    def recorded(
        op_type: Any, outputs: Any, inputs: Any, backward_function: Any, *more: Any, **how: Any
    ) -> Any:
        running = _thread.running

        def gradient(*upstream: tf.Tensor | None) -> Any:
            with attributes.replaced(_thread, "running", running):
                return backward_function(*upstream)

        return record_operation(op_type, outputs, inputs, gradient, *more, **how)

    return recorded


class Layers(LayerObserver):
    """Notes which layers a thread is calling, and finds that of an operation by its name.

    What a layer is called does not tell its scope: Keras 3 enters "dense_1" for a layer "dense"
    whose name is taken in the graph. So the scopes are those that are seen in calls.

    Attributes:
        named: dict of paths and layers.
        graph: the graph of the trace, of which an error leaves what was made before.
        last: set of the ids of layers that were called as those that make the model's outputs.
        raised: the innermost `LayerCall` that has raised an error, or None.

    Args:
        model: a model of `tf.keras`, or None for functions of other code, which have no layers.
    """

    def __init__(self, model: tf.keras.Model | None) -> None:
        self._model = model
        self.begin()

    @do_not_convert
    def begin(self) -> None:
        """Begins a trace, and forgets an earlier one, in which variables were made."""
        self.named = {} if self._model is None else layers_by_path(self._model)
        self.graph: Any = tf.compat.v1.get_default_graph()
        self.raised: LayerCall | None = None
        self.last: set[int] = set()
        self._scopes: dict[str, str] = {}

    def inputs(self, call: LayerCall) -> None:
        """Notes that the thread is calling a layer."""
        _thread.running = (*_thread.running, call.path)

    def outputs(self, call: LayerCall, outputs: Any) -> Any:
        """Notes in which scope a layer was called, and whether for outputs of the model."""
        _thread.running = _thread.running[:-1]
        if not keras_api.is_symbolic() and (scope := tf.get_current_name_scope()):
            # A layer that calls `call` of another one, in its own scope, returns after it.
            self._scopes[scope] = call.path
            if model_outputs.is_last(call.layer):
                self.last.add(id(call.layer))
        return outputs

    def failed(self, call: LayerCall) -> None:
        """Notes which call has raised an error first."""
        _thread.running = _thread.running[:-1]
        self.raised = self.raised or call

    @do_not_convert
    def name(self, name: str) -> str:
        """Returns the path of the innermost layer of an operation; "" for none.

        Args:
            name: str. The operation's name; one of the backward pass has its layer's name in it.
        """
        parts = [part for part in name.split("/")[:-1] if part != _GRADIENT]
        # Replicas, and what calls a function, have names before these scopes.
        spans = ((start, end) for end in range(len(parts), 0, -1) for start in range(end))
        paths = (self._scopes.get("/".join(parts[start:end])) for start, end in spans)
        return next(filter(None, paths), "")

    def layer(self, name: str) -> tf.keras.layers.Layer | None:
        """Returns this layer, or None."""
        return self.named.get(self.name(name))


def _around(scope: str) -> Iterator[str]:
    """Yields a scope, and those that it is in."""
    while scope:
        yield scope
        scope = scope.rpartition("/")[0]


def forward_name(name: str, kind: str, known: Container[str]) -> str:
    """Returns the name of the operation that one of the backward pass is a gradient of.

    Args:
        name: str. Its name.
        kind: str. Its type.
        known: the names of operations of the forward pass, without the scopes that
            `layers_of_scope` leaves out.

    Returns:
        str; "" for none.
    """
    # The name scope of a gradient is the name of the operation that it is of; or the two are beside
    # each other, SqrtGrad and Sqrt.
    scope = layers_of_scope(name).rpartition("/")[0]
    beside = f"{scope}/{kind.removesuffix('Grad')}".strip("/")
    return next((each for each in (scope, beside, *_around(scope)) if each in known), "")


def is_of_backward_pass(name: str) -> bool:
    """Whether an operation with this name belongs to the backward pass."""
    return _GRADIENT in name.split("/")


def is_safe(kind: str, outputs: Sequence[tf.Tensor]) -> bool:
    """Whether an operation returns the numbers that it takes: a cast to 8 bits changes many."""
    return kind in _SAFE and not any(each.dtype.size == 1 for each in outputs)


def layers_of_scope(scope: str) -> str:
    """Returns the layers of a name scope; that of a gradient is the one of its forward pass."""
    return re.sub(r"(^|/)(gradient_tape|replica_\d+)(?=/|$)", "", scope).strip("/")


def line_of(operation: tf.Operation) -> Line | None:
    """Returns the innermost line, in a program or in a layer that is not Keras's, of an operation.

    Args:
        operation: `tf.Operation`.

    Returns:
        The line; None if only TensorFlow, Keras and keras_mp had a part in it.
    """
    lines = (Line(file, number) for file, number, _ in _inside_of_tools(operation))
    return next((line for line in lines if not is_library(line.file)), None)


def is_users(operation: tf.Operation) -> bool:
    """Whether a program's code made an operation, and not Keras or keras_mp.

    What is in the place of TensorFlow's functions is looked through, as TensorFlow is.

    Args:
        operation: `tf.Operation`.
    """
    packages = (library_of(file) for file, _, _ in _inside_of_tools(operation))
    return next((each is None for each in packages if each not in ("tensorflow", "python")), False)


def is_made_in(operation: tf.Operation, functions: Sequence[str]) -> bool:
    """Whether an operation was made by functions of libraries with these names, or by their calls.

    Args:
        operation: `tf.Operation`.
        functions: names of functions.
    """
    frames = _inside_of_tools(operation)
    return any(name in functions and is_library(file) for file, _, name in frames)


class Origin(NamedTuple):
    """Where an operation comes from while a program runs.

    Attributes:
        is_gradient: whether it is a part of a gradient.
        line: the innermost line that is the user's own or that of a layer of Keras, or None.
        is_data: whether it belongs to a pipeline of `tf.data`.
        layer: the path of its layer, or else its name scopes.
    """

    is_gradient: bool
    line: Line | None
    is_data: bool
    layer: str = ""


def running() -> Origin:
    """Returns the origin of the operation that is running in eager."""
    layer = running_layer() or layers_of_scope(tf.get_current_name_scope())
    frames = traceback.walk_stack(inspect.currentframe())
    return of_stack((f.f_code.co_filename, line, "") for f, line in frames)._replace(layer=layer)


def of_stack(frames: Iterable[Frame]) -> Origin:
    """Finds the origin of an operation in a stack.

    Args:
        frames: the innermost first.
    """
    seen: dict[str, Line] = {}
    for file, number, _ in frames:
        kind = _kind_of_file(file)
        # A gradient has a line only if it is a custom one; the line below is that of the tool.
        if kind == "tool" and not seen.keys().isdisjoint(("shown", "gradient")):
            break
        seen.setdefault(kind, Line(file, number))
    return Origin("gradient" in seen, seen.get("shown"), "data" in seen)


class GraphOrigins:
    """Where operations come from that become a part of graphs, one after the other."""

    def __init__(self) -> None:
        # By the name of an operation of a forward pass; and by the scopes that they are in.
        self._forward: dict[str, Origin] = {}
        self._layers: dict[str, str] = {}

    def of(self, operation: tf.Operation) -> Origin:
        """Returns the origin of the next operation; of a gradient, with that of what it is of.

        Args:
            operation: `tf.Operation`.
        """
        origin, running = of_stack(_frames(operation)), running_layer()
        if origin.is_data:
            return origin
        name = layers_of_scope(operation.name)
        scope = name.rpartition("/")[0]
        origin = origin._replace(layer=running or scope)
        if not origin.is_gradient:
            self._forward[name] = origin
            if running:
                self._layers[scope] = running
        # Else a gradient function of the program runs.
        elif not running or scope in self._forward:
            layers = (self._layers[each] for each in _around(scope) if each in self._layers)
            origin = origin._replace(layer=next(layers, scope))
            forward = forward_name(name, operation.type, self._forward)
            origin = self._forward.get(forward, origin)._replace(is_gradient=True)
        return origin


def _frames(operation: tf.Operation) -> Iterator[Frame]:
    for frame in reversed(operation.traceback or ()):  # none of an imported graph
        yield frame.filename, frame.lineno or 0, frame.name


def _inside_of_tools(operation: tf.Operation) -> Iterator[Frame]:
    """Yields the frames of an operation up to those that traced it, and none like TensorFlow's."""
    kinds = ((_kind_of_file(frame[0]), frame) for frame in _frames(operation))
    inside = itertools.takewhile(lambda each: each[0] != "tool", kinds)
    return (frame for kind, frame in inside if kind != "like TensorFlow")


@functools.cache
def _kind_of_file(file: str) -> str:
    path, is_of_library = file.replace(os.sep, "/"), is_library(file)
    kinds = {
        # The frames below are those of code that called a tool, or an observed layer.
        "tool": file.startswith(_TOOLS),
        "gradient": path.endswith(_GRADIENT_FILES),
        "data": "tensorflow/python/data/" in path,
        # The code that calls it makes the operation.
        "like TensorFlow": is_of_library and any(part in path for part in _LIKE_TENSORFLOW),
        # The base layer calls every layer.
        "shown": not is_of_library or ("/layers/" in path and not path.endswith("layer.py")),
        "library": True,
    }
    return next(kind for kind, is_one in kinds.items() if is_one)
