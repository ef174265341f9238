"""Graphs, the functions that are made of them, and whether XLA compiles them."""

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

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

T = TypeVar("T")
_WITH_BODIES = ("If", "StatelessIf", "While", "StatelessWhile")


def kept_whole(build: Callable[[], T]) -> T:
    """Builds conditions and loops that stay operations where there is one device.

    Elsewhere TensorFlow puts their operations into the graph around them, goes through all of them,
    and switches each input of a condition. (One operation runs on one device, which may have no
    kernels for its body.)

    Args:
        build: function that builds them with `tf.cond` or `tf.while_loop`.

    Returns:
        The result of the function.
    """
    is_one_device = len(tf.config.list_logical_devices()) == 1
    if tf.executing_eagerly() or not is_one_device or not set_attribute.is_there():
        return build()
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    result = build()
    for op in graph.get_operations()[before:]:
        if op.type in _WITH_BODIES:
            no = tf.compat.v1.AttrValue(b=False)
            set_attribute(op, "_lower_using_switch_merge", no)
    return result
