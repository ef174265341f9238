"""Looking at what the layers of a model return and an optimizer applies, while a step is made.

What is looked at has a function around its method meanwhile, an attribute of the instance. Only the
thread that looks, which may be that of a replica, notices anything of it.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.step import observers
from keras_mp.support import attributes
from keras_mp.support.autograph import do_not_convert

Watcher = Callable[[str, tf.Tensor, list[Any]], tf.Tensor]


class _Thread(threading.local):
    watchers: tuple[Watcher, ...] = ()


_thread = _Thread()
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
    watchers = (*_thread.watchers, watcher)
    with contextlib.ExitStack() as stack:
        stack.enter_context(attributes.replaced(_thread, "watchers", watchers))
        for path, layer in layers.items():
            stack.enter_context(replaced("watch", layer, "call", functools.partial(_watched, path)))
        yield


@contextlib.contextmanager
def watching_gradients(optimizer: Any) -> Iterator[None]:
    """Shows the observer of a thread what an optimizer applies that does not do so itself.

    Args:
        optimizer: An optimizer of `tf.keras` that scales no loss.
    """
    with replaced("show", optimizer, "apply_gradients", _shown):
        yield


@contextlib.contextmanager
def drawing_in_float32(layers: Iterable[Any]) -> Iterator[None]:
    """Lets dropout and noise draw the same numbers whatever dtype they compute in.

    Drawn in 16 bits, numbers of one seed are other ones.

    Args:
        layers: iterable of layers, of which those that draw numbers are meant.
    """
    with contextlib.ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, _DRAWING):
                stack.enter_context(replaced("draw", layer, "call", _in_float32))
        yield


# Spatial dropout is a kind of `Dropout` on both Kerases.
_DRAWING = (
    tf.keras.layers.AlphaDropout,
    tf.keras.layers.Dropout,
    tf.keras.layers.GaussianDropout,
    tf.keras.layers.GaussianNoise,
)


def _in_float32(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(inputs: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        return tf.cast(call(tf.cast(inputs, tf.float32), *args, **kwargs), inputs.dtype)

    return called


@contextlib.contextmanager
def replaced(purpose: str, owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
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


def _watched(path: str, call: Callable[..., Any]) -> Callable[..., Any]:
    # AutoGraph converts this one, and so what it calls, which a user may have written.
    @functools.wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return _seen(path, call(*args, **kwargs), (args, kwargs))

    return watched


@do_not_convert
def _seen(path: str, outputs: Any, arguments: Any) -> Any:
    if not _thread.watchers or keras_api.is_symbolic():
        return outputs

    def seen(value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
            return value
        result = value
        for watcher in _thread.watchers:
            result = watcher(path, result, tf.nest.flatten(arguments))
        if result is not value:
            # Where Keras, and losses of ours, look for a mask and for logits.
            for name in ("_keras_mask", "_keras_logits"):
                if hasattr(value, name):
                    setattr(result, name, getattr(value, name))
        return result

    return tf.nest.map_structure(seen, outputs)


def _shown(apply_gradients: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply_gradients)
    def shown(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        observers.show(pairs, False, None)
        return apply_gradients(pairs, *args, **kwargs)

    return shown
