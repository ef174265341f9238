"""How TensorFlow runs operations, and what it knows about them."""

from keras_mp.tensorflow_api.names import Name

# Runs an operation in eager code.
run_in_eager = Name("tensorflow.python.pywrap_tfe.TFE_Py_FastPathExecute")
# Runs one whose arguments are not all tensors.
run_in_slower_way = Name("tensorflow.python.pywrap_tfe.TFE_Py_Execute")
# Makes an operation in a graph.
make_in_graph = Name("tensorflow.python.framework.op_def_library._apply_op_helper")
# What the quick way raises, and generated code catches.
QuickWayFailed = Name("tensorflow.python.eager.core._NotOkStatusException")
# What makes it take its slower way at once.
TakeSlowerWay = Name("tensorflow.python.eager.core._FallbackException")
# Makes a tensor of any value.
to_tensor = Name("tensorflow.python.framework.tensor_conversion_registry.convert")
# The base of objects that are asked where a function has refused its arguments.
GlobalOpDispatcher = Name("tf.__internal__.dispatch.GlobalOpDispatcher")

# The definition of an operation, by its type.
definition = Name("tensorflow.python.framework.op_def_registry.get")
all_kernels = Name("tensorflow.python.framework.kernels.get_all_registered_kernels")

# Callbacks after each operation of a thread.
add_callback = Name("tensorflow.python.framework.op_callbacks.add_op_callback")
remove_callback = Name("tensorflow.python.framework.op_callbacks.remove_op_callback")
# The context of a thread, which notes whether callbacks are being called.
context = Name("tensorflow.python.eager.context.context")
is_calling_back = Name("tensorflow.python.eager.context.Context.invoking_op_callbacks")

# The device that the program has named, in eager.
device_name = Name("tf.__internal__.eager_context.get_device_name")
# The name by which a variable exists for as long as its handle.
anonymous_name = Name("tensorflow.python.eager.context.anonymous_name")
