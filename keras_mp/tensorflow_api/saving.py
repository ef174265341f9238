"""Checkpoints and SavedModels."""

from keras_mp.tensorflow_api.names import Name

# The base of what counts as a tensor.
Tensor = Name("tf.__internal__.types.Tensor")
# Whether TensorFlow behaves as TensorFlow 2.
is_version_2 = Name("tf.__internal__.tf2.enabled")
# Registers a class whose objects say what a SavedModel has of them.
register = Name("tensorflow.python.saved_model.registration.register_serializable")
# What a SavedModel has of an optimizer of Keras.
revived = Name("tensorflow.python.saved_model.revived_types.serialize")
# Whether a function of a SavedModel takes some arguments.
is_callable_with = Name(
    "tensorflow.python.saved_model.function_deserialization._concrete_function_callable_with"
)
