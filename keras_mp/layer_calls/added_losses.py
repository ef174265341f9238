"""Reports losses that a layer adds in float16 and that are infinite there.

In float16, anything above 65,504 is infinite. What a layer has computed is known only where it
runs, so a warning comes when a step has met an infinite loss. A loss that is finite in float16 is
right.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Method, Replacement, When, faces, reach
from keras_mp.step.scaled_losses import thread
from keras_mp.support import host, messages

# The layers of whose losses a warning has told.
_told: "weakref.WeakSet[tf.keras.layers.Layer]" = weakref.WeakSet()


def install() -> None:
    """Lets layers in float16 report infinite losses that they add."""
    place = Method.of(tf.keras.layers.Layer, "add_loss")
    hooks.install([Replacement(place, _adding_wide_losses, When.ALWAYS)])


def _adding_wide_losses(original: Callable[..., None]) -> Callable[..., None]:
    def add_loss(self: tf.keras.layers.Layer, losses: Any, *args: Any, **kwargs: Any) -> None:
        losses = tf.nest.map_structure(functools.partial(_widened, self), losses)
        return original(self, losses, *args, **kwargs)

    return add_loss


def _widened(layer: tf.keras.layers.Layer, loss: Any) -> Any:
    # Keras 2 adds a symbolic loss in a layer whose policy is not one of keras_mp.
    is_in_reach = reach.current() is not None
    if not faces.is_low_tensor(loss) or not (is_in_reach or faces.kind_of(loss)):
        return loss
    result = faces.widened(loss)
    if reach.current() == tf.float16 and thread.under_way and result is not loss:
        _tell_if_infinite(layer, result)
    return result


def _tell_if_infinite(layer: tf.keras.layers.Layer, loss: tf.Tensor) -> None:
    if host.is_compiled_by_xla():
        return  # It cannot call Python; the report of the skipped step says that the loss was Inf.
    is_infinite = tf.reduce_any(tf.math.is_inf(tf.stop_gradient(loss)))
    warn = functools.partial(_warn, weakref.ref(layer))

    def tell() -> None:
        tf.py_function(warn, [], [])

    tf.cond(is_infinite, tell, lambda: None)


def _warn(reference: "weakref.ref[tf.keras.layers.Layer]") -> None:
    layer = reference()
    if layer is not None and layer not in _told:
        _told.add(layer)
        messages.warn(
            f"The layer {layer.name!r} adds a loss that is infinite in float16, which ends at "
            "65,504, so that steps are skipped. Compute the loss in float32, as in "
            "self.add_loss(tf.reduce_sum(tf.square(tf.cast(x, tf.float32)))), or make the layer "
            'with dtype="float32".'
        )
