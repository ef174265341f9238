"""What keras_mp does by private names of TensorFlow, and what is lost without."""

import dataclasses

from keras_mp.tensorflow_api import gradients, graphs, grappler, operations, replicas, saving
from keras_mp.tensorflow_api.names import MissingName, Name


@dataclasses.dataclass(frozen=True, eq=False)
class Feature:
    """Something that is off where one of its names is missing.

    Attributes:
        title: str. What it is.
        without: str. A sentence: what happens without it, and what that means for numbers.
        names: the private names that it needs.
    """

    title: str
    without: str
    names: tuple[Name, ...]

    def missing(self) -> list[str]:
        """Returns a sentence about each name that is missing."""
        result = []
        for name in self.names:
            try:
                name.get()
            except MissingName as error:
                result.append(str(error))
        return result


_TRACED = (
    operations.run_in_eager,
    gradients.record_in_graph,
    gradients.of_graph,
    gradients.custom_in_eager,
    gradients.custom_in_graph,
    graphs.key_of_trace,
)
_KERNELS = (operations.definition, operations.all_kernels)

FACES = Feature(
    "the float32 faces of 16-bit tensors, gradients that are computed like their layer, regions of "
    "`keras_mp.autocast`, and products with gradients in 16 bits",
    "Layers in 16 bits compute as Keras's do: what 16 bits cannot hold is lost, some sums are "
    "wrong and some kernels slow, and mixtures of dtypes are errors. Code in a region, and the "
    "gradients of layers with an `output_dtype`, run in float32.",
    (
        *(*_TRACED, *_KERNELS, gradients.registry, gradients.find, gradients.of_tape),
        *(gradients.could_record, gradients.record_gradient, gradients.stop_recording),
        *(graphs.create_op, graphs.gradient_function, graphs.function_of_graph),
        *(graphs.update_input, gradients.record_operation, gradients.possible_types),
        *(operations.make_in_graph, operations.run_in_slower_way, operations.to_tensor),
        *(operations.TakeSlowerWay, operations.QuickWayFailed, operations.GlobalOpDispatcher),
    ),
)
VECTORIZED = Feature(
    "`tf.vectorized_map` and `jacobian` in a region of `keras_mp.autocast`",
    "Operations that they convert are autocast again: some round their inputs once more.",
    (gradients.vectorize,),
)
SIGNATURES = Feature(
    "functions that were traced for float32, in layers of 16 bits",
    "They refuse 16 bits, as they do in TensorFlow.",
    (graphs.call_flat, graphs.run_in_numpy, saving.is_callable_with),
)
UNOBSERVED = Feature(
    "hiding keras_mp's own operations from `tf.debugging`",
    "Numbers stay the same. `tf.debugging.enable_check_numerics` may find Inf in a skipped step.",
    (operations.context, operations.is_calling_back),
)
REPLICA_THREADS = Feature(
    "regions and policy scopes in the threads of replicas",
    "Replicas do not inherit them: code in them runs in float32, and layers that it makes have "
    "the global policy.",
    (replicas.start_thread,),
)
WITHOUT_MEETING = Feature(
    "replicas that need not meet",
    "Numbers stay the same. TensorFlow may refuse steps that XLA compiles under a strategy.",
    (replicas.reduces_alone,),
)
WITHOUT_BRANCHES = Feature(
    "compiled steps without branches",
    "Numbers stay the same. A GPU waits in a step that XLA compiles (`jit_compile=True`).",
    (graphs.handle_data, graphs.update_input),
)
XLA = Feature(
    "ordinary graphs, as opposed to those that XLA compiles",
    "Numbers stay the same. All graphs count as compiled, so warnings about steps come late.",
    (graphs.xla_context,),
)
AUTOGRAPH = Feature(
    "AutoGraph in functions that keras_mp calls",
    "Numbers stay the same. An `if` or a loop over tensors is an error in such a function.",
    (graphs.autograph_status, graphs.autograph_convert),
)
TENSORS = Feature(
    "`AutoCastVariable`s that count as tensors",
    "Numbers stay the same. `tf.is_tensor` of one may be False, and a function may refuse it.",
    (saving.Tensor,),
)
SAVED_MODELS = Feature(
    "optimizers in a SavedModel",
    "A SavedModel may be loaded without the state of its optimizer. Other files have all of it.",
    (saving.register, saving.revived),
)
SESSIONS = Feature(
    "the graph rewrite in sessions of TensorFlow 1",
    "A session with a config of its own computes in float32.",
    (grappler.rewrite_in_sessions, grappler.is_rewrite_in_sessions),
)
TOOLS = Feature(
    "tools that look at each operation: `check`, `watch` and `profile` of `numerics`, "
    "and the report of the graph rewrite",
    "They end with an error that names what is missing.",
    (
        *(operations.add_callback, operations.remove_callback, operations.anonymous_name),
        *(graphs.function_of_name, gradients.record_operation, *_KERNELS),
        *(grappler.optimize, grappler.Cluster, grappler.Device),
    ),
)

FEATURES = tuple(each for each in list(globals().values()) if isinstance(each, Feature))
