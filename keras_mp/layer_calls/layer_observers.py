"""Observers of layers: what goes into the call of a layer, and what comes out.

An observer is attached to layers, not to all calls. Meanwhile such a layer has a function around
its `call`, an attribute of the instance that all observers share (`hooks/wrapped.py`); a layer
without observers has none, so that its calls cost nothing. It is `call`, and not `__call__`: Keras
has cast the arguments by then, operations get the layer's name, and a layer that calls `call` of
another one is seen as well. It works in eager and while a graph is made.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from keras_mp.hooks import wrapped
from keras_mp.support.autograph import do_not_convert


class LayerCall(NamedTuple):
    """A call of a layer.

    Attributes:
        path: str, by which an observer was attached to the layer.
        layer: the layer.
        args: the positional arguments of its `call`.
        kwargs: the keyword arguments.
    """

    path: str
    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LayerObserver:
    """The base class of observers of layers, whose methods do nothing."""

    def inputs(self, call: LayerCall) -> None:
        """Is called before a layer computes."""

    def outputs(self, call: LayerCall, outputs: Any) -> Any:
        """Is called with what a layer has computed. What it returns takes its place."""
        del call
        return outputs

    def failed(self, call: LayerCall) -> None:
        """Is called in place of `outputs` if the layer raises an error."""


@contextlib.contextmanager
def attached(
    observer: LayerObserver, layers: Iterable[tuple[str, Any]], *, to_all_threads: bool = False
) -> Iterator[None]:
    """Attaches an observer to layers.

    Args:
        observer: the `LayerObserver`.
        layers: pairs of paths and layers, or of other objects with a method `call`.
        to_all_threads: bool. Whether it observes the calls of all threads; the process may have one
            such observer. Defaults to False: only those of this thread, which may be that of a
            replica.
    """
    attach = wrapped.everywhere if to_all_threads else wrapped.here
    with contextlib.ExitStack() as stack:
        for path, layer in layers:
            wrap = functools.partial(observed, observer, path, layer)
            stack.enter_context(attach(layer, "call", wrap))
        yield


def observed(
    observer: LayerObserver, path: str, layer: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that calls another one, and tells an observer.

    Args:
        observer: the `LayerObserver`.
        path: str. A name for what is called.
        layer: the layer, or what else is called.
        function: its `call`, or the function that is called.
    """

    # AutoGraph converts this one, and so what it calls, which a user may have written.
    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        call = LayerCall(path, layer, args, kwargs)
        _tell(observer.inputs, call)
        try:
            outputs = function(*args, **kwargs)
        except BaseException:
            _tell(observer.failed, call)
            raise
        return _tell(observer.outputs, call, outputs)

    return told


@do_not_convert
def _tell(event: Callable[..., Any], *args: Any) -> Any:
    return event(*args)
