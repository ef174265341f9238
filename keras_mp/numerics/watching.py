"""Observers of layers: what each returns and which of them is running, while a step is made.

And patterns that choose layers, variables and operations by their paths and names.

Outputs are shown in the thread that observes, which may be that of a replica; which layer is
running is known in each thread.
"""

import contextlib
import fnmatch
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.hooks import observers, wrapped
from keras_mp.layer_calls import layer_observers
from keras_mp.layer_calls.layer_observers import LayerCall, LayerObserver
from keras_mp.models.layer_paths import layers_by_path
from keras_mp.support import attributes, marks
from keras_mp.tensorflow_api import gradients

Watcher = Callable[[str, tf.Tensor, list[Any]], tf.Tensor]

_T = TypeVar("_T")


class _ThreadState(threading.local):
    """The layers that a thread is calling.

    Attributes:
        running: tuple of the ids of the layers whose calls are going on, where they are named.
        raised_in: the innermost layer whose call has raised an error, or None.
    """

    running: tuple[int, ...] = ()
    raised_in: Any = None


_thread = _ThreadState()
# The paths of layers by their ids, of each block in which layers are named, in any thread.
_namings: dict[int, dict[int, str]] = {}


class _Outputs(LayerObserver):
    """Shows a watcher what layers return."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def outputs(self, call: LayerCall, outputs: Any) -> Any:
        if keras_api.is_symbolic():
            return outputs

        def shown(value: Any) -> Any:
            if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
                return value
            result = self._watcher(call.path, value, tf.nest.flatten((call.args, call.kwargs)))
            if result is value:
                return value
            return marks.copy(value, result)

        return tf.nest.map_structure(shown, outputs)

    def failed(self, call: LayerCall) -> None:
        _thread.raised_in = _thread.raised_in or call.layer


class _Running(LayerObserver):
    """Notes which layers a thread is calling."""

    def inputs(self, call: LayerCall) -> None:
        _thread.running = (*_thread.running, id(call.layer))

    def outputs(self, call: LayerCall, outputs: Any) -> Any:
        self.failed(call)
        return outputs

    def failed(self, call: LayerCall) -> None:
        del call
        _thread.running = _thread.running[:-1]


_running = _Running()


def watching_outputs(
    layers: Mapping[str, Any], watcher: Watcher
) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that shows a watcher what layers return to this thread.

    Args:
        layers: dict of paths and layers.
        watcher: called with the path of a layer, each tensor of floating point in what its `call`
            has returned, and a list of all arguments of the call; what it returns takes the
            tensor's place. Not called while Keras only asks for shapes.
    """
    _thread.raised_in = None
    return layer_observers.attached(_Outputs(watcher), layers.items())


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
        with contextlib.ExitStack() as stack:
            stack.enter_context(layer_observers.attached(_running, named, to_all_threads=True))
            hook = gradients.record_operation
            wrap = _with_layer_in_backward_pass
            stack.enter_context(wrapped.everywhere(hook.owner, hook.attribute, wrap))
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


def watching_gradients(
    optimizer: tf.keras.optimizers.Optimizer,
) -> contextlib.AbstractContextManager[None]:
    """Shows the gradients that an optimizer applies to the observers of this thread.

    Args:
        optimizer: An optimizer of `tf.keras` that scales no loss.
    """
    return wrapped.everywhere(optimizer, "apply_gradients", _told)


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


def _told(apply_gradients: Callable[..., _T]) -> Callable[..., _T]:
    @functools.wraps(apply_gradients)
    def told(grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> _T:
        pairs = list(grads_and_vars)
        observers.tell(observers.Observer.gradients, pairs, None, None)
        return apply_gradients(pairs, *args, **kwargs)

    return told


def listed(argument: str, patterns: str | Iterable[str]) -> list[str]:
    """Returns patterns as a list.

    Args:
        argument: str. What they were passed as.
        patterns: a pattern, or several.

    Raises:
        TypeError: they are no str.
    """
    found = [patterns] if isinstance(patterns, str) else list(patterns)
    if not all(isinstance(each, str) for each in found):
        raise TypeError(
            "Expected types of operations and paths of layers or variables, or patterns of them, "
            f"for `{argument}`. Received: {patterns!r}"
        )
    return found


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path is among patterns, as `fnmatch` takes them.

    A pattern matches a path, such as "encoder/dense_*", or a name in it, and all that is inside of
    what it matches.

    Args:
        path: str.
        patterns: iterable of str.

    Example:

    >>> from keras_mp.numerics import watching
    >>> [watching.matches("block/dense_1/kernel", [each]) for each in ("block", "dense_*", "c*")]
    [True, True, False]
    """
    names = path.split("/")
    ways = ("/".join(names[:end]) for end in range(1, len(names) + 1))
    known = {*ways, *names}
    return any(
        pattern in known or any(fnmatch.fnmatchcase(each, pattern) for each in known)
        for pattern in patterns
    )


def chosen(argument: str, patterns: str | Iterable[str], paths: Iterable[str]) -> list[str]:
    """Returns the paths that patterns match, in their order.

    Args:
        argument: str. What the patterns were passed as.
        patterns: a pattern, or several.
        paths: all of them.

    Raises:
        TypeError: the patterns are no str.
        ValueError: one matches no path.
    """
    wanted, known = listed(argument, patterns), list(paths)
    unknown = [each for each in wanted if not any(matches(path, [each]) for path in known)]
    if unknown:
        raise ValueError(
            f"Expected paths, or patterns of them, for `{argument}`: {known}. Received: {unknown}"
        )
    return [path for path in known if matches(path, wanted)]
