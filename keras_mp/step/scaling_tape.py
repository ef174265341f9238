"""A tape that scales targets, for what needs the loss unscaled.

This module needs TensorFlow only.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.step import gradients


class ScalingTape(tf.GradientTape):
    """A tape that differentiates scaled targets, and unscales their gradients.

    A `LossScaleGradientTape` computes with it. An optimizer that clips the gradient of each example
    while it computes the gradients needs them unscaled: with an unscaled loss and this tape, it
    gets them so.

    Args:
        tape: `tf.GradientTape`, which shares its recording with this one.
        loss_scale: float32 scalar tensor.
    """

    # A slot, since both tapes share one `__dict__`.
    __slots__ = ("_loss_scale",)

    def __init__(self, tape: tf.GradientTape, loss_scale: tf.Tensor) -> None:
        self.__dict__ = vars(tape)
        self._loss_scale = loss_scale

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Computes gradients as `tf.GradientTape.gradient` does.

        `jacobian` calls it, too.
        """
        of_targets = output_gradients
        if of_targets is None:
            of_targets = tf.nest.map_structure(tf.ones_like, target)
        flat = gradients.scale(gradients.convert(tf.nest.flatten(of_targets)), self._loss_scale)
        scaled = tf.nest.pack_sequence_as(of_targets, flat)
        computed = super().gradient(target, sources, scaled, *args, **kwargs)
        flat = gradients.unscale(tf.nest.flatten(computed), self._loss_scale)
        return tf.nest.pack_sequence_as(computed, flat)


def compute(
    function: Callable[..., Any], scaled_by: tf.Tensor, widens: bool, loss: Any, *how: Any
) -> list[tuple[Any, Any]]:
    """Computes gradients of a scaled loss with a function that needs it unscaled.

    Args:
        function: takes a loss and what follows here, and returns (gradient, variable) pairs.
        scaled_by: float32 scalar tensor, the factor of the loss.
        widens: bool. Whether gradients in 16 bits are cast to float32.
        loss: the scaled loss: a tensor, or a callable that returns one.
        *how: the variables, the tape under which the loss was computed, or None, and `grad_loss`.

    Returns:
        list of (gradient, variable) pairs. The gradients are scaled.
    """
    var_list, tape, *grad_loss = how
    tape = ScalingTape(tape or tf.GradientTape(), scaled_by)
    with tape:
        loss = gradients.map_loss(lambda each: each / tf.cast(scaled_by, each.dtype), loss)
    pairs = function(loss, var_list, tape, *grad_loss)
    grads = gradients.convert((g for g, _ in pairs), widens)
    scaled = gradients.scale(grads, scaled_by)
    return [(g, v) for g, (_, v) in zip(scaled, pairs, strict=True)]
