"""The private names of Keras 2, and the features that need them."""

from keras_mp.keras_api.shared_features import shared
from keras_mp.tensorflow_api.features import Feature
from keras_mp.tensorflow_api.names import Attribute, Name

autocast_dtype = Name("tf_keras.src.mixed_precision.autocast_variable._autocast_dtype")
autocast_scope = Name("tf_keras.src.mixed_precision.autocast_variable.enable_auto_cast_variables")
AutoCastVariable = Name("tf_keras.src.mixed_precision.autocast_variable.AutoCastVariable")
call_context = Name("tf_keras.src.engine.base_layer_utils.call_context")
policy_of_layer = Name("tf_keras.src.mixed_precision.policy.get_policy")
SafeModeScope = Name("tf_keras.src.saving.serialization_lib.SafeModeScope")
saving_options = Name("tf_keras.src.saving.legacy.saved_model.utils.keras_option_scope")
track_variable = Name("tf_keras.src.backend.track_variable")
save_spec = Name("tf_keras.src.engine.base_layer.Layer._get_save_spec")
functions_of_layer = Name("tf_keras.src.saving.legacy.saved_model.save_impl.wrap_layer_functions")

layer_calls = Name("tf_keras.src.saving.legacy.saved_model.save_impl.LayerCallCollection")
outputs_only = Name("tf_keras.src.saving.legacy.saved_model.save_impl._extract_outputs_from_fn")
tracing_scope = Name("tf_keras.src.saving.legacy.saved_model.save_impl.tracing_scope")
traced_call = Name("tf_keras.src.saving.legacy.saved_model.save_impl.layer_call_wrapper")

# All that write files in h5py's format. Keras calls them in their modules.
WRITERS = (
    Name("tf_keras.src.saving.saving_lib._save_state"),
    Name("tf_keras.src.saving.legacy.hdf5_format.save_model_to_hdf5"),
    Name("tf_keras.src.saving.legacy.hdf5_format.save_weights_to_hdf5_group"),
)

seeds = Name("tf_keras.src.backend._SEED_GENERATOR")
RandomGenerator = Name("tf_keras.src.backend.RandomGenerator")

cast_input = Name("tf_keras.src.engine.base_layer.Layer._cast_single_input")
build_once = Name("tf_keras.src.engine.base_layer.Layer._maybe_build")
flatten_layers = Name("tf_keras.src.engine.base_layer.Layer._flatten_layers")
set_policy = Name("tf_keras.src.engine.base_layer.Layer._set_dtype_policy")
output_signature = Name("tf_keras.src.engine.base_layer.Layer._infer_output_signature")
convert_input_of_model = Name(
    "tf_keras.src.engine.functional.Functional._conform_to_reference_input"
)
inputs_of_rnn = Name("tf_keras.src.layers.rnn.base_rnn.RNN._process_inputs")
lstm_in_eager = Name("tf_keras.src.layers.rnn.lstm.standard_lstm")
lstm_in_graphs = Name("tf_keras.src.layers.rnn.lstm.lstm_with_backend_selection")
nodes = Attribute("tf_keras.src.engine.functional.Functional._nodes_by_depth")

arguments_of_loss = Attribute("tf_keras.src.losses.LossFunctionWrapper._fn_kwargs")
optimizer_of_model = Name("tf_keras.src.engine.training.Model._get_optimizer")

make_variable = Name("tf_keras.src.engine.base_layer_utils.make_variable")

hyper = Attribute("tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2._hyper")
name_of_legacy = Attribute("tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2._name")
create_weights = Name("tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2._create_all_weights")
legacy_gradients = Name(
    "tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2._compute_gradients"
)
legacy_sum = Name("tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2._aggregate_gradients")
legacy_transform = Name(
    "tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2._transform_unaggregated_gradients"
)

THREADS = Feature(
    "what a thread knows: the dtype to which weights are cast, its call of a layer",
    "Layers that read their weights in float32 read them in 16 bits, as Keras's do, and models "
    "return their outputs in 16 bits.",
    (autocast_dtype, autocast_scope, call_context),
)
TRACES = Feature(
    "traces of functions that get weights of Keras",
    "Where there is a GPU, loops without `tf.function` compile each update again in each step.",
    (AutoCastVariable,),
)
POLICIES = Feature(
    "policies of keras_mp in files, and under a `ParameterServerStrategy`",
    "Layers from an `.h5` file have a policy of Keras's, which refuses float16 under such a "
    "strategy.",
    (policy_of_layer,),
)
TRUST = Feature(
    "layers with Python code in `keras_mp.convert` and `keras_mp.numerics`",
    "Keras refuses to copy them, with an error.",
    (SafeModeScope,),
)
RAW_INPUTS = Feature(
    "layers that read raw inputs in float32, and recurrent layers that cast their initial states",
    "Preprocessing, normalization and sums of squares compute in 16 bits, from rounded inputs. A "
    "float32 state is an error in a layer in 16 bits, as it is in Keras.",
    (set_policy, cast_input, output_signature, convert_input_of_model, inputs_of_rnn),
)
LSTM = Feature(
    "LSTM in one compiled piece",
    "Keras computes it, which is slower and rounds more often.",
    (lstm_in_eager, lstm_in_graphs),
)
BUILDS, LAYERS_INSIDE, OUTPUTS = shared(build_once, flatten_layers, nodes)
LOSSES = Feature(
    "Keras's own losses, computed in float32",
    "A loss that is an object of Keras's class stays as it is. Its name, or that of a class of "
    "keras_mp.losses, gives one of keras_mp.",
    (arguments_of_loss,),
)
LEGACY = Feature(
    "wrappers of optimizers of `tf.keras.optimizers.legacy`",
    "Making one ends with an error that names what is missing.",
    (hyper, name_of_legacy, create_weights, legacy_gradients, legacy_sum, legacy_transform),
)
WEIGHTS = Feature(
    "`AutoCastVariable`s in layers of `keras_mp.layers.Layer`",
    "Their weights are those of Keras, which cast themselves as well.",
    (make_variable,),
)
SEEDS = Feature(
    "random numbers of the tools",
    "`keras_mp.numerics` draws seeds of Keras's generator, so that later layers get others.",
    (seeds, RandomGenerator),
)
GRAPH_VARIABLES = Feature(
    "variables in graphs of TensorFlow 1",
    "Keras does not initialize those of keras_mp.",
    (track_variable,),
)
COMPILED = Feature(
    "the optimizer of a compiled model, which Keras would wrap",
    "`compile` ends with an error where Keras would scale the loss, too.",
    (optimizer_of_model,),
)
FILES = Feature(
    "files of models and optimizers",
    "Those with weights in bfloat16 cannot be loaded, and some optimizers are not found by their "
    "names. SavedModels take and return 16 bits where subclassed models take and return float32. "
    "Layers that are loaded without their classes compute in 16 bits what others have in float32, "
    "such as losses that they add; with a function as activity regularizer they are not loaded.",
    (
        *(*WRITERS, saving_options, save_spec, functions_of_layer, traced_call),
        *(layer_calls, outputs_only, tracing_scope),
    ),
)

FEATURES = tuple(each for each in list(globals().values()) if isinstance(each, Feature))
