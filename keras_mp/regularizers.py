"""Activity regularizers that compute in float32 (RFC 293, "Loss dtype").

Regularizers of weights do not need this, since Keras gives them the float32 variable. But in a
mixed model, the output of a layer is float16, and the sum of its squares soon exceeds what float16
can hold.
"""

import contextlib
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.support import softmax_and_cross_entropy as fusion
from keras_mp.support.dtypes import LOW_PRECISION_NAMES


@keras_api.register_serializable
class Float32Regularizer(tf.keras.regularizers.Regularizer):
    """A regularizer that casts 16-bit tensors to float32 for another one.

    If a model has a `keras_mp.Policy`, `Model.compile` wraps the activity regularizers of its
    16-bit layers in this class. In a training loop of your own, wrap them yourself.

    Args:
        regularizer: A `tf.keras.regularizers.Regularizer`, or an argument of
            `tf.keras.regularizers.get`: a name, a config or a function.

    Raises:
        ValueError: `regularizer` is None, or Keras cannot make one of it.

    Example:

    >>> regularizer = keras_mp.regularizers.Float32Regularizer("l2")
    >>> float(regularizer(tf.constant([1000], tf.float16))) == float(
    ...     tf.keras.regularizers.get("l2")(tf.constant([1000.0]))
    ... )
    True

    Source: RFC 293, "Loss dtype".
    """

    def __init__(self, regularizer: Any) -> None:
        self.regularizer = tf.keras.regularizers.get(regularizer)
        if not callable(self.regularizer):
            raise ValueError(
                "Expected a regularizer, or what `tf.keras.regularizers.get` makes one of. "
                f"Received: regularizer={regularizer!r}"
            )

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """Computes the penalty.

        Args:
            x: tensor. The output of a layer.

        Returns:
            The penalty, float32 for 16-bit tensors.
        """
        return self.regularizer(fusion.widen(x))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` makes an equal regularizer."""
        return {"regularizer": tf.keras.regularizers.serialize(self.regularizer)}

    def __repr__(self) -> str:
        return f"<Float32Regularizer(regularizer={self.regularizer!r})>"


_FUNCTION = type(tf.function(tf.identity))

# Keras 2 looks for this name when it loads an `.h5` file.
tf.keras.utils.get_custom_objects()["Float32Regularizer"] = Float32Regularizer


def wrap_activity_regularizer(layer: Any) -> None:
    """Wraps the activity regularizer of a 16-bit layer in a `Float32Regularizer`.

    Args:
        layer: A layer of `tf.keras`. One without such a regularizer stays as it is.

    Example:

    >>> from keras_mp import regularizers
    >>> layer = tf.keras.layers.Dense(1, activity_regularizer="l2", dtype="mixed_float16")
    >>> regularizers.wrap_activity_regularizer(layer)
    >>> isinstance(layer.activity_regularizer, regularizers.Float32Regularizer)
    True
    """
    regularizer = layer.activity_regularizer
    is_done = regularizer is None or isinstance(regularizer, Float32Regularizer)
    if isinstance(regularizer, tf.types.experimental.GenericFunction):
        # In a SavedModel, the regularizer is a function that only takes the layer's dtype, and
        # casts inside. While the model is saved, it has that signature; once loaded, it is of a
        # subclass.
        signature = getattr(regularizer, "input_signature", None)
        is_done = type(regularizer) is not _FUNCTION or signature is not None
    if layer.compute_dtype in LOW_PRECISION_NAMES and not is_done:
        # The attribute of a wrapper around a layer is the layer's, and cannot be set.
        with contextlib.suppress(AttributeError):
            layer.activity_regularizer = Float32Regularizer(regularizer)
