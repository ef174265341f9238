"""The observer of layers: what each returns and which of them is running, while a step is made.

A layer that is observed has a function around its `call` meanwhile, an attribute of the instance,
which all observers share. What layers return is shown in the thread that observes, which may be
that of a replica; which layer is running is known in each thread. It works in eager and while a
graph is made.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record as _record

from keras_mp import keras_api
from keras_mp.layer_paths import layers_by_path
from keras_mp.step import observers
from keras_mp.support import attributes, marks
from keras_mp.support.autograph import do_not_convert

Watcher = Callable[[str, tf.Tensor, list[Any]], tf.Tensor]


class _ThreadState(threading.local):
    """The watchers of a thread, and the layers that it is calling.

    Attributes:
        watchers: tuple of pairs of paths by the ids of layers, and watchers.
        running: tuple of str, the paths of the layers whose calls are going on.
    """

    watchers: tuple[tuple[dict[int, str], Watcher], ...] = ()
    running: tuple[str, ...] = ()


_thread = _ThreadState()
# For each block in which layers are named, in any thread, their paths by their ids.
_namings: list[dict[int, str]] = []
_lock = threading.Lock()
# How many threads have a method of what, by its id, replaced for which purpose.
_users: dict[tuple[int, str], int] = {}


@contextlib.contextmanager
def watching_outputs(layers: Mapping[str, Any], watcher: Watcher) -> Iterator[None]:
    """Shows a watcher what layers return to this thread.

    Args:
        layers: dict of paths and layers.
        watcher: called with the path of a layer, each tensor of floating point in what its `call`
            has returned, and a list of all arguments of the call; what it returns takes the
            tensor's place. Not called while Keras only asks for shapes.
    """
    watchers = (*_thread.watchers, ({id(layer): path for path, layer in layers.items()}, watcher))
    with (
        attributes.replaced(_thread, "watchers", watchers),
        _observed_calls(layers.values()),
    ):
        yield


@contextlib.contextmanager
def naming(models: Iterable[Any]) -> Iterator[None]:
    """Lets `running_layer` name the layers of these models, inside of the block.

    Name scopes do not tell them: Keras 3 enters "dense_1" for a layer "dense" whose name is taken
    in the graph, and a layer that is shared has a scope for each call.

    Args:
        models: of `tf.keras`. What one computes between its layers has the name of the model.
    """
    layers: dict[int, Any] = {}
    paths: dict[int, str] = {}
    for model in models:
        for path, layer in {model.name: model, **layers_by_path(model)}.items():
            layers.setdefault(id(layer), layer)
            paths.setdefault(id(layer), path)
    with _lock:
        _namings.append(paths)
    try:
        with (
            _observed_calls(layers.values()),
            wrapped_method("name gradients", _record, "record_operation", _named_backward),
        ):
            yield
    finally:
        with _lock:
            # Not by equality: another thread may name the same layers.
            _namings[:] = [each for each in _namings if each is not paths]


def running_layer() -> str:
    """Returns the path of the innermost layer that this thread is calling; "" if none is known.

    While the backward pass of a `tf.custom_gradient` runs, that is the layer that has called it.
    """
    return _thread.running[-1] if _thread.running else ""


@contextlib.contextmanager
def _observed_calls(layers: Iterable[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for layer in layers:
            wrap = functools.partial(_observed, id(layer))
            stack.enter_context(wrapped_method("observe", layer, "call", wrap))
        yield


@contextlib.contextmanager
def watching_gradients(optimizer: Any) -> Iterator[None]:
    """Shows the observer of a thread what an optimizer applies that does not do so itself.

    Args:
        optimizer: An optimizer of `tf.keras` that scales no loss.
    """
    with wrapped_method("show", optimizer, "apply_gradients", _shown):
        yield


@contextlib.contextmanager
def wrapped_method(
    purpose: str, owner: Any, name: str, wrap: Callable[[Any], Any]
) -> Iterator[None]:
    """Wraps a method of one object, once for all threads that do so for one purpose.

    Args:
        purpose: str. Of those with the same one, the first wraps.
        owner: the object.
        name: str. The method's.
        wrap: called with the method; returns what takes its place.
    """
    key, attributes = (id(owner), purpose), vars(owner)
    with _lock:
        _users[key] = _users.get(key, 0) + 1
        if _users[key] == 1:
            own = attributes.get(name)
            # Not by `setattr`, of which Keras and layers of ours have their own idea.
            attributes[name] = wrap(getattr(owner, name))
            attributes[name]._keras_mp_own = own
    try:
        yield
    finally:
        with _lock:
            _users[key] -= 1
            if not _users[key]:
                del _users[key]
                own = attributes.pop(name)._keras_mp_own
                if own is not None:
                    attributes[name] = own


def _observed(layer: int, call: Callable[..., Any]) -> Callable[..., Any]:
    # AutoGraph converts this one, and so what it calls, which a user may have written.
    @functools.wraps(call)
    def observed(*args: Any, **kwargs: Any) -> Any:
        with attributes.replaced(_thread, "running", _with(layer)):
            result = call(*args, **kwargs)
        return _shown_outputs(layer, result, (args, kwargs))

    return observed


def _named_backward(record_operation: Callable[..., Any]) -> Callable[..., Any]:
    """Lets the layer be known again when the gradient is computed that a program has written.

    Nothing else tells it: TensorFlow gives these operations no scope of the forward pass.
    """

    @functools.wraps(record_operation)
    def recorded(
        op_type: str,
        output_tensors: Any,
        input_tensors: Any,
        backward_function: Callable[..., Any],
        forward_function: Callable[..., Any] | None = None,
    ) -> Any:
        running = _thread.running

        def named(*gradients: Any) -> Any:
            with attributes.replaced(_thread, "running", running):
                return backward_function(*gradients)

        backward = named if running else backward_function
        return record_operation(op_type, output_tensors, input_tensors, backward, forward_function)

    return recorded


@do_not_convert
def _with(layer: int) -> tuple[str, ...]:
    """The paths of what is running in this thread, with that of a layer if it has one."""
    found = [paths[layer] for paths in _namings if layer in paths]
    return (*_thread.running, found[0]) if found else _thread.running


@do_not_convert
def _shown_outputs(layer: int, outputs: Any, arguments: Any) -> Any:
    watchers = [(paths[layer], watcher) for paths, watcher in _thread.watchers if layer in paths]
    if not watchers or keras_api.is_symbolic():
        return outputs

    def seen(value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
            return value
        result = value
        for path, watcher in watchers:
            result = watcher(path, result, tf.nest.flatten(arguments))
        return result if result is value else marks.copy(value, result)

    return tf.nest.map_structure(seen, outputs)


def _shown(apply_gradients: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply_gradients)
    def shown(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        for observe in observers.of_this_thread():
            observe(pairs, False, None)
        return apply_gradients(pairs, *args, **kwargs)

    return shown
