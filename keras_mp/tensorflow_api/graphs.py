"""Graphs, the functions that are made of them, and whether XLA compiles them."""

from keras_mp.tensorflow_api.names import Attribute, Name

# Makes each operation of a graph.
create_op = Name("tf.Graph._create_op_internal")
# The key by which a function finds its trace.
key_of_trace = Name(
    "tensorflow.python.eager.polymorphic_function.function_context.make_function_context"
)
# Makes a function of a graph.
function_of_graph = Name(
    "tensorflow.python.eager.polymorphic_function.atomic_function.from_func_graph"
)
# A function that operations of a graph call, by its name.
function_of_name = Name("tf.Graph._get_function")
# Runs a function that was traced, with tensors.
call_flat = Name(
    "tensorflow.python.eager.polymorphic_function.concrete_function.ConcreteFunction._call_flat"
)
# Calls a function of Python that takes arrays, for `tf.numpy_function` and its older form.
run_in_numpy = Name("tensorflow.python.ops.script_ops.py_func_common")
# The shape and dtype of the variable behind a handle.
handle_data = Name("tensorflow.python.ops.handle_data_util.get_handle_data")
# The context of XLA that is around the code, or None.
xla_context = Name("tf.__internal__.get_enclosing_xla_context")
# Gives an operation another input.
update_input = Name("tf.Operation._update_input")
# Gives an operation another attribute.
set_attribute = Name("tf.Operation._set_attr")
# The gradient function of an operation other than that of its type.
gradient_function = Attribute("tf.Operation._gradient_function")

# AutoGraph: whether it converts the caller, and how it converts a function.
autograph_status = Name("tf.__internal__.autograph.control_status_ctx")
autograph_convert = Name("tf.__internal__.autograph.tf_convert")
