"""Regularizers that compute in float32 (RFC 293, "Loss dtype").

Those of weights get float32 variables from Keras, and those of activities compute in float32 in a
layer with a 16-bit policy of keras_mp. Elsewhere the output of a layer may be float16, and the sum
of its squares soon exceeds what float16 can hold.
"""

from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.support import marks


@keras_api.register_serializable
class Float32Regularizer(tf.keras.regularizers.Regularizer):
    """A regularizer that casts 16-bit tensors to float32 for another one.

    A layer with a 16-bit policy of keras_mp needs none: what its activity regularizer computes is
    float32. It is for a layer with a policy of Keras, and for calls of your own.

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
        return self.regularizer(marks.widen(x))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` makes an equal regularizer."""
        return {"regularizer": tf.keras.regularizers.serialize(self.regularizer)}

    def __repr__(self) -> str:
        return f"<Float32Regularizer(regularizer={self.regularizer!r})>"


# Keras 2 looks for this name when it loads an `.h5` file.
tf.keras.utils.get_custom_objects()["Float32Regularizer"] = Float32Regularizer
