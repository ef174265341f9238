"""The one list of the names that both Kerases offer to the rest of keras_mp."""

# Where Keras is missing, `tf.keras.Model` raises an error that does not say what to install.
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import tensorflow as tf

from keras_mp.tensorflow_api.features import Feature
from keras_mp.tensorflow_api.names import Name

if TYPE_CHECKING:
    from keras_mp.hooks import Replacement
    from keras_mp.step.optimizer_adapter import OptimizerAdapter


class KerasApi(Protocol):
    """The names that `keras2` and `keras3` define, and `keras_api` offers.

    Attributes:
        BaseCallback: `tf.keras`'s own callback, for which Keras does not wait for batches.
        BaseLayer: `tf.keras`'s own layer, but its inputs are not cast, and `add_weight` makes
            `AutoCastVariable`s; it takes keyword arguments only, and requires `autocast`.
        BaseLoss: `tf.keras`'s own loss, with a `dtype` that is a str, and `reduce(y_true, y_pred,
            sample_weight)`, which is Keras's own `__call__` without casts of the labels.
        BasePolicy: `tf.keras`'s own dtype policy class.
        LossFunctionWrapper: the loss that computes a function.
        OPTIMIZER_BASES: the classes that Keras takes for an optimizer.
        IN_ONE_TRACE: rows for the methods that make the variables of optimizers and metrics.
        CROSSENTROPY_NAMES: the names in `compile(loss=)` of the cross entropy that fits the shapes.
        READ_BY_CALLBACKS: the private attributes of optimizers that callbacks of Keras read.
        CLIPS_ON_EACH_REPLICA: whether optimizers clip gradients before replicas sum them.
        KERAS_LAYOUT_CHILD: a child of optimizers in checkpoints of Keras's own only, or None.
        FEATURES: the features that need private names of Keras.
        BUILD_ONCE: the private method of layers that calls `build`.
        BUILDS: the feature that needs it.
        LAYERS_INSIDE: that of layers in attributes of others.
        LOSSES: that of Keras's own losses, made anew.
    """

    BaseCallback: ClassVar[type]
    BaseLayer: ClassVar[type]
    BaseLoss: ClassVar[type]
    BasePolicy: ClassVar[type]
    LossFunctionWrapper: ClassVar[type]
    OPTIMIZER_BASES: ClassVar[tuple[type, ...]]
    IN_ONE_TRACE: ClassVar[tuple[Replacement, ...]]
    CROSSENTROPY_NAMES: ClassVar[tuple[str, ...]]
    READ_BY_CALLBACKS: ClassVar[tuple[str, ...]]
    CLIPS_ON_EACH_REPLICA: ClassVar[bool]
    KERAS_LAYOUT_CHILD: ClassVar[str | None]
    FEATURES: ClassVar[tuple[Feature, ...]]
    BUILD_ONCE: ClassVar[Name]
    BUILDS: ClassVar[Feature]
    LAYERS_INSIDE: ClassVar[Feature]
    LOSSES: ClassVar[Feature]

    def arguments_of_loss(self, loss: Any) -> dict[str, Any]:
        """Returns the arguments with which a built-in loss was made."""
        ...

    def autocast_dtype(self) -> tf.DType | None:
        """Returns the dtype that `tf.keras` casts variables to in this thread, or None."""

    def autocast_scope(self, dtype: tf.DType | None) -> AbstractContextManager[None]:
        """Returns a context manager that sets that dtype."""
        ...

    def autocast_variables(self, weights: Sequence[Any]) -> list[Any]:
        """Returns the `AutoCastVariable`s among the weights of a layer, or in them."""
        ...

    def build_loss(self, model: tf.keras.Model, predictions: Any) -> None:
        """Makes the metrics that the loss of a compiled model updates."""

    def calls_of_layers(
        self, model: tf.keras.Model
    ) -> list[tuple[Any, list[Any], list[Any]]] | None:
        """Returns the calls of which a functional model consists, or None.

        It is None where nothing tells.

        Returns:
            list of tuples of a layer (on Keras 3 an operation, too) and of its symbolic inputs and
            outputs.
        """

    def compile_without_wrapping(
        self, keras_compile: Callable[..., None], call: inspect.BoundArguments
    ) -> None:
        """Calls Keras's own `compile` with bound arguments, so that it wraps nothing."""

    def convert_wrappers_to_legacy(
        self, wrapper_class: type, convert_wrapper: Callable[[Any, Any], Any]
    ) -> None:
        """Lets Keras 2 convert wrappers of a class, too.

        It does so where it converts optimizers to legacy ones. `convert_wrapper` takes a wrapper
        and the legacy optimizer made of its inner optimizer.
        """

    def deserialize_optimizer(
        self, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> tf.keras.optimizers.Optimizer:
        """Makes an optimizer of the result of `serialize_optimizer`.

        Keras's own function knows few classes, and each by a name that a program's may have, too.
        """
        ...

    def enter_while_saving(self, around: Callable[[Any], AbstractContextManager[None]]) -> None:
        """Lets Keras enter a context manager while it writes models for h5py.

        Args:
            around: takes the model and returns the context manager.
        """

    def exact_functions(self) -> list[Any]:
        """Returns Keras's own functions that need float32 as a whole."""
        ...

    def get_global_policy(self) -> tf.keras.mixed_precision.Policy:
        """Returns `tf.keras`'s global policy."""

    def init_base_policy(self, policy: tf.keras.mixed_precision.Policy, name: str | None) -> None:
        """Initializes the base class of a policy; a subclass calls it first."""

    def is_in_keras_wrapper(self, optimizer: tf.keras.optimizers.Optimizer) -> bool:
        """Whether Keras's own `LossScaleOptimizer` wraps an optimizer, if known."""
        ...

    def is_call_for_saving(self, call: Any) -> bool:
        """Whether this is the `call` that a layer has while Keras saves it."""
        ...

    def is_in_a_layer(self, layer: tf.keras.layers.Layer) -> bool:
        """Whether another layer or model than this one is about to call it in this thread."""
        ...

    def is_operation(self, layer: tf.keras.layers.Layer) -> bool:
        """Whether a layer is an operation on a symbolic tensor.

        Keras 2 makes such a layer of `2.0 * x`.
        """
        ...

    def is_symbolic_input(self, value: Any) -> bool:
        """Whether a value is an input or output of layers of functional models."""
        ...

    def is_symbolic(self) -> bool:
        """Whether Keras computes shapes only."""
        ...

    def is_weight(self, value: Any) -> bool:
        """Whether a value is a weight as layers of `tf.keras` have them."""
        ...

    def name_functions(
        self, layer: tf.keras.layers.Layer, config: dict[str, Any]
    ) -> dict[str, Any]:
        """Writes names for the functions of a `Lambda` into its config.

        Returns:
            dict of the functions by these names, for a `custom_object_scope`; empty if the config
            is enough to make the layer anew in this process.
        """
        ...

    def keras_layout(self, optimizer: tf.keras.optimizers.Optimizer) -> Any:
        """Returns a trackable of what ours and Keras's `LossScaleOptimizer` share.

        It has their names in checkpoints of the latter.
        """

    def note_input_casts(
        self,
        policy_class: type,
        noted: Callable[[Any, Any], Any],
        before: Callable[[Any], Any],
    ) -> None:
        """Has the casts noted that layers and models make of their inputs.

        Args:
            policy_class: class of the policies whose layers do.
            noted: takes an input and what it became, and returns the latter.
            before: takes an input of a preprocessing layer, and returns it unrounded.
        """

    def optimizer_adapter(
        self, optimizer: tf.keras.optimizers.Optimizer
    ) -> OptimizerAdapter | None:
        """Returns the adapter of an optimizer of `tf.keras`, or None."""

    def output_layers(self, model: tf.keras.Model) -> list[Any] | None:
        """Returns the layers that make a model's outputs, or None where nothing tells.

        Of an operation that is no layer, such as `2.0 * output`, those that make its inputs.
        """

    def own_seeds(self, seed: int) -> AbstractContextManager[None]:
        """Returns a context manager in which Keras draws random numbers of its own.

        What it makes in this thread gets seeds of a generator that begins with `seed`.
        """
        ...

    def patch_fit(self, model: tf.keras.Model) -> None:
        """Lets several workers train a compiled model with `fit`."""

    def policy_name(self, policy: tf.keras.mixed_precision.Policy, name: str) -> str:
        """Returns the name of a policy, by which Keras finds the policy and not its own.

        It looks for it when it makes a layer of a config: from a file, or for a clone.
        """
        ...

    def policy_scope(
        self, policy: tf.keras.mixed_precision.Policy | None
    ) -> AbstractContextManager[None]:
        """Returns a context manager with another global policy.

        It holds in this thread, and in replicas that it starts. `set_global_policy` in it changes
        the policy of the scope.
        """
        ...

    def quantized_policy(self, name: str) -> tf.keras.mixed_precision.Policy | None:
        """Returns the quantized policy of that name, or None."""

    def note_wrapper(
        self, optimizer: tf.keras.optimizers.Optimizer, wrapper: tf.keras.optimizers.Optimizer
    ) -> None:
        """Keeps Keras's own `LossScaleOptimizer` from wrapping an optimizer of ours.

        It is one that our optimizer wraps.
        """

    def register_policy(self, cls: type) -> type:
        """Registers a policy class.

        Without keras_mp, `tf.keras` makes a policy of its own class from the config.
        """
        ...

    def register_serializable(self, cls: type) -> type:
        """Registers a class that Keras saves."""
        ...

    def rename(self, layer: tf.keras.layers.Layer, name: str) -> None:
        """Gives a layer another name. Its weights keep theirs."""

    def replace_slow_layers(
        self, lstm: Callable[..., Any], batch_normalization: Callable[..., Any]
    ) -> None:
        """Replaces the slow parts of layers in 16 bits that are not kernels of TensorFlow.

        Args:
            lstm: function with the arguments of `kernels.recurrent.lstm`, which runs the loop of an
                LSTM where Keras would run that of cuDNN on a GPU. It may return None.
            batch_normalization: function with the arguments of
                `kernels.normalization.batch_normalization`. It may return None.
        """

    def report_rounded(
        self,
        cls: type,
        rounds_to: Callable[[Any], tf.DType | None],
        mapped: Callable[..., Any],
    ) -> None:
        """Lets layers of a class say the dtype to which their float32 results are rounded.

        Args:
            cls: class of layers.
            rounds_to: takes a layer and returns that DType, or None.
            mapped: takes a function, a layer and its outputs, and maps those that are rounded.
        """

    def set_policy(self, layer: tf.keras.layers.Layer, policy: Any) -> None:
        """Gives a layer without variables another policy."""

    def set_global_policy(self, policy: tf.keras.mixed_precision.Policy | None) -> None:
        """Sets `tf.keras`'s global policy; None follows floatx."""

    def steps_per_execution(self, model: tf.keras.Model) -> int:
        """Returns how many steps a call of `train_function` makes, in `fit`."""
        ...

    def track_variables(self, variables: Iterable[tf.Variable]) -> None:
        """Lets Keras initialize variables together with its own.

        It is for graphs of TensorFlow 1.
        """

    def trusted_scope(self) -> AbstractContextManager[Any]:
        """Returns a context manager in which layers may be made from configs with code."""
        ...

    def export_as_called(
        self,
        is_ours: Callable[[Any], bool],
        around: Callable[[Any], AbstractContextManager[None]],
        is_function: Callable[[Any], bool],
    ) -> None:
        """Lets what a SavedModel has of a model compute what the model does.

        Signatures of subclassed models take float32, where Keras notes their 16 bits. Keras 2 saves
        the calls of layers, too.

        Args:
            is_ours: tells whether a model is saved in this way.
            around: takes a layer and returns the context manager in which its call is traced.
            is_function: tells whether an activity regularizer is a function of the program, which
                is saved as its trace.
        """

    def widen_predictions(self, model: tf.keras.Model) -> None:
        """Lets the metrics of a compiled model see predictions in float32.

        It also keeps labels from being cast to the predictions' dtype before our losses see them.
        """


NAMES = (
    *KerasApi.__annotations__,
    *(n for n, v in vars(KerasApi).items() if inspect.isfunction(v) and not n.startswith("_")),
)
