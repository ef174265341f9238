"""What Keras 2's optimizers, new and legacy, are to a step and to wrappers."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.keras_api import keras2_names
from keras_mp.step.optimizer_adapter import Applied, Loss, OptimizerAdapter, Pairs, Tape, VarList
from keras_mp.support import features, new_variables
from keras_mp.tensorflow_api import saving

keras = tf.keras

# A wrapper is an instance of both bases, whichever family it wraps: `.keras` files have the
# variables of new optimizers, and none of legacy ones.
OPTIMIZER_BASES: tuple[Any, ...] = (
    keras.optimizers.Optimizer,
    keras.optimizers.legacy.Optimizer,
)
READ_BY_CALLBACKS = ("_learning_rate", "_built")
CLIPS_ON_EACH_REPLICA = False
KERAS_LAYOUT_CHILD = None

_Optimizer: Any = keras.optimizers.Optimizer
_LegacyOptimizer: Any = keras.optimizers.legacy.Optimizer


def optimizer_adapter(optimizer: keras.optimizers.Optimizer) -> OptimizerAdapter | None:
    if isinstance(optimizer, _LegacyOptimizer):
        for name in keras2_names.LEGACY.names:
            name.get()
        return _LegacyAdapter(optimizer)
    if isinstance(optimizer, _Optimizer):
        return _KerasAdapter(optimizer)
    return None


def making_at_once(
    optimizer: Any, variables: Sequence[Any]
) -> contextlib.AbstractContextManager[None]:
    del variables
    # Nadam counts its traces: with one less, it would make other steps than without keras_mp.
    is_nadam = isinstance(optimizer, keras.optimizers.Nadam)
    return contextlib.nullcontext() if is_nadam else new_variables.made_at_once()


class _Keras2Adapter(OptimizerAdapter):
    """The common base of both families, which knows the methods that are Keras's own.

    Attributes:
        base: Keras's own class.
        computing: names of its methods that compute gradients.
        building: names of its name, and of the method that makes its variables.
    """

    is_revived_without_state = True
    base: Any
    computing: tuple[str, ...]
    building: tuple[str, str]

    @property
    def only_differentiates(self) -> bool:
        return all(map(self._is_keras_own, self.computing))

    @property
    def overrides_minimize(self) -> bool:
        return not self._is_keras_own("minimize")

    def build(self, variables: Sequence[Any]) -> None:
        name, make = (getattr(self.optimizer, each) for each in self.building)
        with tf.name_scope(name), tf.init_scope(), making_at_once(self.optimizer, ()):
            make(variables)

    def _is_keras_own(self, method: str) -> bool:
        bound = getattr(self.optimizer, method)
        return getattr(bound, "__func__", None) is getattr(self.base, method)


class _KerasAdapter(_Keras2Adapter):
    """`tf.keras.optimizers.*`."""

    base = _Optimizer
    computing = ("compute_gradients",)
    building = ("name", "build")

    def compute_gradients(
        self, loss: Loss, var_list: VarList, tape: Tape, grad_loss: tf.Tensor | None
    ) -> list[tuple[Any, Any]]:
        if grad_loss is not None:
            raise ValueError(
                "`grad_loss` is for tf.keras.optimizers.legacy optimizers; multiply the loss by it "
                f"instead. Received: grad_loss={grad_loss!r} with {type(self.optimizer)}"
            )
        # Keras's own method takes a list only; the others also take a single variable.
        flat = tf.nest.flatten
        as_list = (lambda: flat(var_list())) if callable(var_list) else flat(var_list)
        return self.optimizer.compute_gradients(loss, as_list, tape=tape)

    def custom_aggregation(self) -> Callable[[list[tuple[Any, Any]]], Pairs] | None:
        if type(self.optimizer).aggregate_gradients is _Optimizer.aggregate_gradients:
            return None
        return self.optimizer.aggregate_gradients

    def apply(self, grads_and_vars: Pairs, name: str | None, aggregate: bool) -> Applied:
        return self.optimizer.apply_gradients(
            grads_and_vars, **_named(name), skip_gradients_aggregation=not aggregate
        )


class _LegacyAdapter(_Keras2Adapter):
    """`tf.keras.optimizers.legacy.*`, also in the graph mode of TensorFlow 1."""

    base = _LegacyOptimizer
    computing = ("_compute_gradients", "get_gradients")
    building = ("_name", "_create_all_weights")
    is_saved_by_keras = False

    def hyperparameters(self) -> frozenset[str]:
        return frozenset(self.optimizer._hyper) | {"clipnorm", "clipvalue", "global_clipnorm"}

    def compute_gradients(
        self, loss: Loss, var_list: VarList, tape: Tape, grad_loss: tf.Tensor | None
    ) -> list[tuple[Any, Any]]:
        return self.optimizer._compute_gradients(loss, var_list, grad_loss=grad_loss, tape=tape)

    def custom_aggregation(self) -> Callable[[list[tuple[Any, Any]]], Pairs] | None:
        optimizer = self.optimizer
        is_keras_own = (
            optimizer.gradient_aggregator is _keras_aggregator()
            and type(optimizer)._aggregate_gradients is _LegacyOptimizer._aggregate_gradients
            and type(optimizer)._transform_unaggregated_gradients
            is _LegacyOptimizer._transform_unaggregated_gradients
        )
        if is_keras_own:
            return None
        return lambda pairs: optimizer._aggregate_gradients(
            optimizer._transform_unaggregated_gradients(pairs)
        )

    def apply(self, grads_and_vars: Pairs, name: str | None, aggregate: bool) -> Applied:
        if isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy):
            # A worker has one replica, so nothing is summed twice, and legacy optimizers do not
            # allow leaving the sum out.
            aggregate = aggregate or self.custom_aggregation() is None
        return self.optimizer.apply_gradients(
            grads_and_vars, **_named(name), experimental_aggregate_gradients=aggregate
        )


@functools.cache
def _keras_aggregator() -> Callable[..., Any]:
    """Returns the function with which legacy optimizers sum gradients by default."""
    return _LegacyOptimizer("default").gradient_aggregator


def _named(name: str | None) -> dict[str, str]:
    # A user's optimizer may leave `name` out, as Keras's own wrappers allow.
    return {} if name is None else {"name": name}


def deserialize_optimizer(
    config: dict[str, Any], custom_objects: dict[str, Any] | None = None
) -> keras.optimizers.Optimizer:
    package, _, _ = (config.get("module") or "").partition(".")
    is_older = package == "" or not keras2_names.saving_options.is_there()
    if is_older or (saving.is_version_2.is_there() and not saving.is_version_2()):
        # In the older format Keras does not look up registered names by itself.
        class_name = config.get("registered_name") or config["class_name"]
        return keras.optimizers.deserialize({**config, "class_name": class_name}, custom_objects)
    # While it loads an .h5 file, Keras reads the older format only.
    with keras2_names.saving_options(save_traces=False, in_tf_saved_model_scope=False):
        if package in ("keras", "tf_keras"):
            found = keras.optimizers.deserialize(dict(config), custom_objects)
            if not isinstance(found, str):  # the name of a class that is not in its table
                return found
        return keras.utils.deserialize_keras_object(config, custom_objects=custom_objects)


def track_variables(variables: Iterable[tf.Variable]) -> None:
    if tf.compat.v1.executing_eagerly_outside_functions():
        return  # Only graphs of TensorFlow 1 have to be told.
    if features.is_on(keras2_names.GRAPH_VARIABLES):
        for variable in variables:
            keras2_names.track_variable(variable)


def keras_layout(optimizer: keras.optimizers.Optimizer) -> Any:
    return optimizer


def is_in_keras_wrapper(optimizer: keras.optimizers.Optimizer) -> bool:
    return getattr(optimizer, "_is_wrapped_by_loss_scale_optimizer", False) is True


def note_wrapper(
    optimizer: keras.optimizers.Optimizer, wrapper: keras.optimizers.Optimizer
) -> None:
    del wrapper
    # Keras's own sets it to True, and refuses any true value.
    optimizer._is_wrapped_by_loss_scale_optimizer = "by keras_mp"
