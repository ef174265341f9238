"""A tape that scales the loss by itself, for optimizers that do more than differentiate it.

An optimizer that clips the gradient of each example as it computes them needs unscaled gradients.
With an unscaled loss and this tape it gets them. This module needs TensorFlow only.
"""

from typing import Any

import tensorflow as tf

from keras_mp.step import gradients


class ScalingTape(tf.GradientTape):
    """A tape that differentiates scaled targets, and unscales the gradients that it returns.

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
        """Computes gradients, as `tf.GradientTape.gradient` does: `jacobian` calls it, too."""
        of_targets = output_gradients
        if of_targets is None:
            of_targets = tf.nest.map_structure(tf.ones_like, target)
        scaled = tf.nest.map_structure(self._scaled, of_targets)
        return self._unscaled(super().gradient(target, sources, scaled, *args, **kwargs))

    def _scaled(self, value: tf.Tensor) -> tf.Tensor:
        return value * tf.cast(self._loss_scale, value.dtype)

    def _unscaled(self, computed: Any) -> Any:
        flat = gradients.unscale(tf.nest.flatten(computed), self._loss_scale)
        return tf.nest.pack_sequence_as(computed, flat)
