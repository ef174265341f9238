"""Batch normalization of Keras 3."""

import functools
from collections.abc import Callable

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Method, Replacement
from keras_mp.keras_api.keras3_names import SHAPES, in_symbolic_scope

keras = tf.keras


def replace_batch_normalization(run: Callable[..., tuple[tf.Tensor, ...] | None]) -> None:
    place = Method(keras.layers.BatchNormalization, "call")
    hooks.install([Replacement(place, functools.partial(_replaced, run), feature=SHAPES)])


def _replaced(
    run: Callable[..., tuple[tf.Tensor, ...] | None], original: Callable[..., tf.Tensor]
) -> Callable[..., tf.Tensor]:
    def call(
        self: tf.keras.layers.Layer,
        inputs: tf.Tensor,
        training: bool | None = None,
        mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
        found = None
        if training is True and mask is None and _is_plain(self, inputs):
            found = run(inputs, *_affine(self), self.epsilon)
        if found is None:
            return original(self, inputs, training=training, mask=mask)
        outputs, *moments = found
        statistics = self.moving_mean, self.moving_variance
        for moving, value in zip(statistics, moments, strict=True):
            before = keras.ops.cast(moving, value.dtype)
            moving.assign(before * self.momentum + value * (1.0 - self.momentum))
        return outputs

    return call


def _is_plain(layer: tf.keras.layers.Layer, inputs: object) -> bool:
    """Whether a layer normalizes by the batch's moments over all axes but the last."""
    return (
        type(layer) is keras.layers.BatchNormalization  # and not a subclass, with other moments
        and isinstance(inputs, tf.Tensor)
        and inputs.dtype == layer.compute_dtype
        and layer.trainable
        and layer.axis in (-1, len(inputs.shape) - 1)
        and not layer.synchronized
        and not getattr(layer, "renorm", False)
        and not in_symbolic_scope()
    )


def _affine(layer: tf.keras.layers.Layer) -> tuple[tf.Tensor, tf.Tensor]:
    # The layer knows the number of channels, even if the shape of its input does not.
    channels = layer.moving_mean.shape
    scale = keras.ops.cast(layer.gamma, "float32") if layer.scale else tf.ones(channels)
    offset = keras.ops.cast(layer.beta, "float32") if layer.center else tf.zeros(channels)
    return tf.convert_to_tensor(scale), tf.convert_to_tensor(offset)
