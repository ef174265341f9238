"""The private names of Keras 3, and the features that need them."""

from keras_mp.keras_api.shared_features import shared
from keras_mp.tensorflow_api.features import Feature
from keras_mp.tensorflow_api.names import Attribute, Name

# What this thread has: the policy, the scope in which weights are cast, the call of a layer.
get_attribute = Name("keras.src.backend.common.global_state.get_global_attribute")
set_attribute = Name("keras.src.backend.common.global_state.set_global_attribute")
AutocastScope = Name("keras.src.backend.AutocastScope")
in_symbolic_scope = Name("keras.src.backend.common.symbolic_scope.in_symbolic_scope")
# What writes files in h5py's format.
WRITERS = (Name("keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5"),)
exported_signature = Name("keras.src.export.export_utils._infer_input_signature_from_model")
saved_signature = Name("keras.src.backend.tensorflow.layer.TFLayer._default_save_signature")
SafeModeScope = Name("keras.src.saving.serialization_lib.SafeModeScope")

convert_inputs_of_model = Name("keras.src.models.functional.Functional._convert_inputs_to_tensors")
converts_inputs = Attribute("keras.src.layers.layer.Layer._convert_input_args")
build_once = Name("keras.src.layers.layer.Layer._maybe_build")
flatten_layers = Name("keras.src.layers.layer.Layer._flatten_layers")
output_shape_of_lambda = Attribute("keras.src.layers.core.lambda_layer.Lambda._output_shape")
nodes = Attribute("keras.src.ops.function.Function._nodes_by_depth")
arguments_of_loss = Attribute("keras.src.losses.losses.LossFunctionWrapper._fn_kwargs")
metrics = Attribute("keras.src.trainers.trainer.Trainer._compile_metrics")

sum_gradients = Name("keras.src.backend.tensorflow.optimizer.TFOptimizer._all_reduce_sum_gradients")
iterations = Attribute("keras.src.optimizers.base_optimizer.BaseOptimizer._iterations")
trained = Attribute("keras.src.optimizers.base_optimizer.BaseOptimizer._trainable_variables")
accumulated = Attribute("keras.src.optimizers.base_optimizer.BaseOptimizer._accumulated_gradients")

build_of_a_batch = Name(
    "keras.src.backend.tensorflow.trainer.TensorFlowTrainer._maybe_symbolic_build"
)
function_of_steps = Name("keras.src.backend.tensorflow.trainer.TensorFlowTrainer._make_function")
reduce_replicas = Name("keras.src.backend.tensorflow.trainer.reduce_per_replica")
save_model = Name("keras.src.callbacks.model_checkpoint.ModelCheckpoint._save_model")

THREADS = Feature(
    "what a thread knows: its policy, its scope for weights, its call of a layer",
    "Each thread has the policy that Keras gives it. Layers that read their weights in float32 "
    "read them in 16 bits, as Keras's do, and models return their outputs in 16 bits.",
    (get_attribute, set_attribute, AutocastScope),
)
SHAPES = Feature(
    "recurrent layers and batch normalization in one compiled piece",
    "Keras computes them, which is slower and rounds more often.",
    (in_symbolic_scope,),
)
TRUST = Feature(
    "layers with Python code in `keras_mp.convert` and `keras_mp.numerics`",
    "Keras refuses to copy them, with an error, before keras.config.enable_unsafe_deserialization. "
    "A copy of a `Lambda` has no output shape.",
    (SafeModeScope, output_shape_of_lambda),
)
RAW_INPUTS = Feature(
    "layers that read raw inputs, in float32 or as a `keras_mp.layers.Layer` without casts does",
    "Preprocessing, normalization and sums of squares compute in 16 bits, from rounded inputs. "
    "Keras casts the inputs of a `keras_mp.layers.Layer` with `autocast_inputs=False`.",
    (convert_inputs_of_model, converts_inputs),
)
BUILDS, LAYERS_INSIDE, OUTPUTS = shared(build_once, flatten_layers, nodes)
LOSSES = Feature(
    "Keras's own losses and metrics, computed in float32",
    "A loss that is an object of Keras's class stays as it is. Its name, or that of a class of "
    "keras_mp.losses, gives one of keras_mp. Metrics get predictions in the dtype of the outputs.",
    (arguments_of_loss, metrics),
)
OPTIMIZERS = Feature(
    "wrapped optimizers that sum gradients: of several replicas, or of several steps",
    "Under a strategy with several replicas, and with `gradient_accumulation_steps`, training ends "
    "with an error.",
    (sum_gradients, iterations, trained, accumulated),
)
FILES = Feature(
    "files that others read: `.h5` with weights in bfloat16, exported subclassed models",
    "The former cannot be loaded. Signatures of the latter take 16 bits.",
    (*WRITERS, exported_signature, saved_signature),
)
WORKERS = Feature(
    "`fit` on several workers",
    "It works as far as Keras's own does, and each worker writes the files of callbacks.",
    (build_of_a_batch, function_of_steps, reduce_replicas, save_model),
)

FEATURES = tuple(each for each in list(globals().values()) if isinstance(each, Feature))
