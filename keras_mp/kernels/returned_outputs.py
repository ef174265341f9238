"""Gradients with respect to a model's float32 output, also through 16 bits.

Later layers took the 16-bit tensor. A model returns float32 in the place of a 16-bit tensor, and
its other outputs may have been computed from that tensor. For a program both are one output. So a
float32 output keeps the tensor in 16 bits, and whoever differentiates with respect to the one gets
what belongs to both.

This module needs TensorFlow only.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.support import features
from keras_mp.support.dtypes import LOW_PRECISION
from keras_mp.tensorflow_api import gradients
from keras_mp.tensorflow_api.features import GRADIENTS

_ZERO = tf.UnconnectedGradients.ZERO


class _Low(NamedTuple):
    """What a float32 output stands for.

    Attributes:
        tensor: the tensor in 16 bits.
        is_cast: whether the output was cast from it, so that its gradient is in that of `tensor`.
    """

    tensor: tf.Tensor
    is_cast: bool


def note(output: Any, low: Any, is_cast: bool) -> None:
    """Notes that an output of a model is returned in the place of one in 16 bits.

    Args:
        output: a float32 tensor (a ragged or sparse one, too).
        low: the tensor in 16 bits.
        is_cast: bool. Whether `output` was cast from it.
    """
    if not features.is_on(GRADIENTS):
        return  # Nobody asks.
    flatten = functools.partial(tf.nest.flatten, expand_composites=True)
    for wide, narrow in zip(flatten(output), flatten(low)):
        if narrow.dtype not in LOW_PRECISION:
            continue
        # An eager tensor that no tape knows would be kept for nothing.
        if tf.is_symbolic_tensor(narrow) or gradients.should_record([narrow]):
            wide._keras_mp_low = _Low(narrow, is_cast)


def on_tapes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that computes the gradients of a tape."""

    @functools.wraps(original)
    def imperative_grad(
        tape: Any,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        sources_raw: Sequence[Any] | None = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        lows = _lows_of(sources)
        if not lows:
            return original(
                tape, target, sources, output_gradients, sources_raw, unconnected_gradients
            )
        found = original(
            tape, target, [*sources, *(low.tensor for low in lows.values())], output_gradients
        )
        return _merged(found, lows, sources_raw or sources, unconnected_gradients)

    return imperative_grad


def in_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that differentiates a graph."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        xs, stops = (_as_list(given[name]) for name in ("xs", "stop_gradients"))
        lows = _lows_of(xs)
        stop_lows = [low.tensor for low in _lows_of(stops).values()]
        if not lows and not stop_lows:
            return original(*args, **kwargs)
        given["xs"] = [*xs, *(low.tensor for low in lows.values())]
        given["stop_gradients"] = [*stops, *stop_lows]
        unconnected = given["unconnected_gradients"]
        given["unconnected_gradients"] = tf.UnconnectedGradients.NONE
        return _merged(original(*call.args, **call.kwargs), lows, xs, unconnected)

    return differentiate


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _lows_of(sources: Sequence[Any]) -> dict[int, _Low]:
    """Returns the 16-bit tensors behind sources that are outputs, by their positions."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    found: dict[int, _Low] = {}
    for i, source in enumerate(sources):
        low = getattr(source, "_keras_mp_low", None) if isinstance(source, tf.Tensor) else None
        # A function may differentiate with respect to a tensor that it captures.
        if low is not None and (not tf.is_symbolic_tensor(source) or low.tensor.graph is graph):
            found[i] = low
    return found


def _merged(
    found: Sequence[Any], lows: dict[int, _Low], sources: Sequence[Any], unconnected: Any
) -> list[Any]:
    """Returns the sources' gradients, with those of the 16-bit tensors behind them."""
    gradients = list(found[: len(sources)])
    for (i, low), of_low in zip(lows.items(), found[len(sources) :]):
        if of_low is None:  # It is not on this tape, or nothing else was computed from it.
            continue
        wide = tf.nest.map_structure(_widened, of_low, expand_composites=True)
        if gradients[i] is None or low.is_cast:
            gradients[i] = wide
        else:
            gradients[i] = tf.convert_to_tensor(gradients[i]) + tf.convert_to_tensor(wide)
    if tf.UnconnectedGradients(unconnected) is not _ZERO:
        return gradients
    pairs = zip(gradients, sources)
    return [tf.zeros_like(source) if each is None else each for each, source in pairs]


def _widened(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.float32) if value.dtype.is_floating else value
