"""Which layer of a model is running, in eager and while a graph is made."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_mp.layer_paths import layers_by_path
from keras_mp.numerics import watching
from keras_mp.support import attributes


class _Thread(threading.local):
    """The paths of the layers whose calls are going on in a thread, which may be a replica's."""

    paths: tuple[str, ...] = ()


_thread = _Thread()


@contextlib.contextmanager
def named(models: Iterable[Any]) -> Iterator[None]:
    """Lets `running_layer` name the layers of these models, inside of the block.

    Name scopes do not tell them: Keras 3 enters "dense_1" for a layer "dense" whose name is taken
    in the graph, and a layer that is shared has a scope for each call.

    Args:
        models: of `tf.keras`. What one computes between its layers has the name of the model.
    """
    with contextlib.ExitStack() as stack:
        for model in models:
            for path, layer in {model.name: model, **layers_by_path(model)}.items():
                wrap = functools.partial(_in_scope, path)
                stack.enter_context(watching.replaced("name", layer, "call", wrap))
        yield


def running_layer() -> str:
    """Returns the path of the innermost layer that this thread is calling; "" if none is known."""
    return _thread.paths[-1] if _thread.paths else ""


def _in_scope(path: str, call: Callable[..., Any]) -> Callable[..., Any]:
    # AutoGraph converts this one, and so what it calls, which a user may have written.
    @functools.wraps(call)
    def in_scope(*args: Any, **kwargs: Any) -> Any:
        with attributes.replaced(_thread, "paths", (*_thread.paths, path)):
            result = call(*args, **kwargs)
        return result

    return in_scope
