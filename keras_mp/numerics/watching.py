"""The observer of layers: what each returns and which of them is running, while a step is made.

Meanwhile a layer that is observed has a function around its `call`, an attribute of the instance
that all observers share. What layers return is shown in the thread that observes, which may be
that of a replica; which layer is running is known in each thread. It works in eager and while a
graph is made.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.hooks import observers, wrapped
from keras_mp.layer_calls import raw_inputs
from keras_mp.models.layer_paths import layers_by_path
from keras_mp.support import attributes, marks
from keras_mp.support.autograph import do_not_convert
from keras_mp.tensorflow_api import gradients

Watcher = Callable[[str, tf.Tensor, list[Any]], tf.Tensor]

_T = TypeVar("_T")


class _ThreadState(threading.local):
    """The watchers of a thread, and the layers that it is calling.

    Attributes:
        watchers: tuple of pairs of paths by the ids of layers, and watchers.
        running: tuple of the ids of the layers whose calls are going on.
        raised_in: the innermost layer whose call has raised an error, or None.
    """

    watchers: tuple[tuple[dict[int, str], Watcher], ...] = ()
    running: tuple[int, ...] = ()
    raised_in: Any = None


_thread = _ThreadState()
# The paths of layers by their ids, of each block in which layers are named, in any thread.
_namings: dict[int, dict[int, str]] = {}


@contextlib.contextmanager
def watching_outputs(layers: Mapping[str, Any], watcher: Watcher) -> Iterator[None]:
    """Shows a watcher what layers return to this thread.

    Args:
        layers: dict of paths and layers.
        watcher: called with the path of a layer, each tensor of floating point in what its `call`
            has returned, and a list of all arguments of the call; what it returns takes the
            tensor's place. Not called while Keras only asks for shapes.
    """
    _thread.raised_in = None
    watchers = (*_thread.watchers, ({id(layer): path for path, layer in layers.items()}, watcher))
    with (
        attributes.replaced(_thread, "watchers", watchers),
        _observed_calls(layers.values()),
    ):
        yield


@contextlib.contextmanager
def naming(models: Iterable[tf.keras.Model]) -> Iterator[None]:
    """Lets `running_layer` name the layers of these models, inside of the block.

    Name scopes do not tell them: Keras 3 enters "dense_1" for a layer "dense" whose name is taken
    in the graph, and a layer that is shared has a scope for each call.

    Args:
        models: of `tf.keras`. What one computes between its layers has the name of the model.
    """
    named = [
        pair for model in models for pair in {model.name: model, **layers_by_path(model)}.items()
    ]
    # A layer of several models has its path in the first of them.
    paths = {id(layer): path for path, layer in reversed(named)}
    _namings[id(paths)] = paths
    try:
        with (
            _observed_calls(layer for _, layer in named),
            wrapped.everywhere(
                gradients.record_operation.owner,
                gradients.record_operation.attribute,
                _with_layer_in_backward_pass,
            ),
        ):
            yield
    finally:
        del _namings[id(paths)]


def running_layer() -> str:
    """Returns the path of the innermost layer that this thread is calling; "" if none is known.

    While the backward pass of a `tf.custom_gradient` runs, that is the layer that has called it.
    """
    namings = list(_namings.values())  # at once, since other threads may add to them
    running = reversed(_thread.running)
    return next((paths[each] for each in running for paths in namings if each in paths), "")


def take_layer_that_raised() -> Any:
    """Returns the innermost layer that has raised an error in this thread, and forgets it."""
    layer, _thread.raised_in = _thread.raised_in, None
    return layer


@contextlib.contextmanager
def _observed_calls(layers: Iterable[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for layer in layers:
            wrap = functools.partial(_observed, layer)
            stack.enter_context(wrapped.everywhere(layer, "call", wrap))
        yield


def watching_gradients(
    optimizer: tf.keras.optimizers.Optimizer,
) -> contextlib.AbstractContextManager[None]:
    """Shows the gradients that an optimizer applies to the observers of this thread.

    Args:
        optimizer: An optimizer of `tf.keras` that scales no loss.
    """
    return wrapped.everywhere(optimizer, "apply_gradients", _shown)


def _observed(layer: Any, call: Callable[..., _T]) -> Callable[..., _T]:
    # AutoGraph converts this one, and so what it calls, which a user may have written.
    @functools.wraps(call)
    def observed(*args: Any, **kwargs: Any) -> _T:
        with attributes.replaced(_thread, "running", (*_thread.running, id(layer))):
            try:
                result = raw_inputs.rounded(layer, call(*args, **kwargs))
            except Exception:
                _thread.raised_in = _thread.raised_in or layer
                raise
        return _shown_outputs(id(layer), result, (args, kwargs))

    return observed


def _with_layer_in_backward_pass(record_operation: Callable[..., _T]) -> Callable[..., _T]:
    """Makes the layer known again while a gradient function of the program runs.

    TensorFlow gives the operations of this function no scope of the forward pass.
    """

    @functools.wraps(record_operation)
    def recorded(
        op_type: str,
        output_tensors: Sequence[tf.Tensor],
        input_tensors: Sequence[tf.Tensor],
        backward_function: Callable[..., Any],
        forward_function: Callable[..., Any] | None = None,
    ) -> _T:
        running = _thread.running

        def backward(*gradients: tf.Tensor | None) -> Any:
            with attributes.replaced(_thread, "running", running):
                return backward_function(*gradients)

        return record_operation(op_type, output_tensors, input_tensors, backward, forward_function)

    return recorded


@do_not_convert
def _shown_outputs(layer: int, outputs: _T, arguments: tuple[Any, ...]) -> _T:
    watchers = [(paths[layer], watcher) for paths, watcher in _thread.watchers if layer in paths]
    if not watchers or keras_api.is_symbolic():
        return outputs

    def shown(value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
            return value
        result = value
        for path, watcher in watchers:
            result = watcher(path, result, tf.nest.flatten(arguments))
        if result is value:
            return value
        raw_inputs.copy_note(value, result)
        return marks.copy(value, result)

    return tf.nest.map_structure(shown, outputs)


def _shown(apply_gradients: Callable[..., _T]) -> Callable[..., _T]:
    @functools.wraps(apply_gradients)
    def shown(grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> _T:
        pairs = list(grads_and_vars)
        observers.tell(observers.Observer.gradients, pairs, None, None)
        return apply_gradients(pairs, *args, **kwargs)

    return shown
