"""Tapes, and the functions that compute gradients."""

from keras_mp.tensorflow_api.names import Name

# Tells tapes of an operation in a graph.
record_in_graph = Name("tensorflow.python.eager.execute.record_gradient")
# The same, for an operation that no generated code has made.
record_gradient = Name("tf.__internal__.record_gradient")
# Whether a tape is listening.
could_record = Name("tensorflow.python.eager.record.could_possibly_record")
# Whether one knows some tensors, and of which order: 0 if none does.
possible_types = Name("tensorflow.python.ops.gradients_util.PossibleTapeGradientTypes")
# Tells tapes of tensors that were computed from others, with a function for the gradient.
record_operation = Name("tensorflow.python.eager.record.record_operation")
# The context manager in which tapes hear nothing.
stop_recording = Name("tensorflow.python.eager.record.stop_recording")

# The gradient functions of all operations.
registry = Name("tensorflow.python.framework.ops.gradient_registry")
# Finds one of them, in this and in other registries.
find = Name("tensorflow.python.framework.registry.Registry.lookup")
# The backward pass of a graph, and of a tape.
of_graph = Name("tensorflow.python.ops.gradients_util._GradientsHelper")
of_tape = Name("tensorflow.python.eager.imperative_grad.imperative_grad")
# Call a function of `tf.custom_gradient`.
custom_in_eager = Name("tensorflow.python.ops.custom_gradient._eager_mode_decorator")
custom_in_graph = Name("tensorflow.python.ops.custom_gradient._graph_mode_decorator")
# Converts an operation of a function for `tf.vectorized_map`.
vectorize = Name("tensorflow.python.ops.parallel_for.pfor.PFor.convert")
