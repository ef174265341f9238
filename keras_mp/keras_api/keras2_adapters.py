"""The adapters of Keras 2's optimizers, new and legacy."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.hooks import Method, Replacement
from keras_mp.keras_api import keras2_names
from keras_mp.step.optimizer_adapter import Applied, Loss, OptimizerAdapter, Pairs, VarList
from keras_mp.support import features, new_variables
from keras_mp.variables.wrapper import WrapperType

keras = tf.keras

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


def let_functions_find_variables() -> None:
    """Lets a `tf.function` find the trace for a variable that Keras casts.

    Keras's own type of such a variable equals no other, so each call makes another trace. On a GPU
    optimizers compile that, for each variable in each step.
    """

    def type_of(variable: Any, context: object) -> WrapperType:
        del context
        return WrapperType(variable, variable.dtype, lambda same: same)

    if features.is_on(keras2_names.TRACES):
        keras2_names.AutoCastVariable.get().__tf_tracing_type__ = type_of


def making_at_once(
    optimizer: Any, variables: Sequence[Any]
) -> contextlib.AbstractContextManager[None]:
    del variables
    # Nadam counts its traces: with one less, it would make other steps than without keras_mp.
    is_nadam = isinstance(optimizer, keras.optimizers.Nadam)
    return contextlib.nullcontext() if is_nadam else new_variables.made_at_once()


def _with_weights_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_weight(metric: Any, *args: Any, **kwargs: Any) -> Any:
        with new_variables.made_at_once():
            return original(metric, *args, **kwargs)

    return add_weight


# Not the methods of layers: only a second trace knows which of their weights a skipped step is to
# put back.
IN_ONE_TRACE = (Replacement(Method(keras.metrics.Metric, "add_weight"), _with_weights_at_once),)


class _Keras2Adapter(OptimizerAdapter):
    """The common base of both families, which knows the methods that are Keras's own.

    Attributes:
        base: Keras's own class.
        computing: names of its methods that compute gradients.
    """

    is_revived_without_state = True
    base: Any
    computing: tuple[str, ...]

    @property
    def only_differentiates(self) -> bool:
        return all(map(self._is_keras_own, self.computing))

    @property
    def overrides_minimize(self) -> bool:
        return not self._is_keras_own("minimize")

    def _is_keras_own(self, method: str) -> bool:
        bound = getattr(self.optimizer, method)
        return getattr(bound, "__func__", None) is getattr(self.base, method)


class _KerasAdapter(_Keras2Adapter):
    """`tf.keras.optimizers.*`."""

    base = _Optimizer
    computing = ("compute_gradients",)

    def build(self, variables: Sequence[Any]) -> None:
        with (
            tf.name_scope(self.optimizer.name),
            tf.init_scope(),
            making_at_once(self.optimizer, ()),
        ):
            self.optimizer.build(variables)

    def compute_gradients(
        self,
        loss: Loss,
        var_list: VarList,
        tape: tf.GradientTape | None,
        grad_loss: tf.Tensor | None,
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
    is_saved_by_keras = False

    def hyperparameters(self) -> frozenset[str]:
        return frozenset(self.optimizer._hyper) | {"clipnorm", "clipvalue", "global_clipnorm"}

    def build(self, variables: Sequence[Any]) -> None:
        with (
            tf.name_scope(self.optimizer._name),
            tf.init_scope(),
            making_at_once(self.optimizer, ()),
        ):
            self.optimizer._create_all_weights(variables)

    def compute_gradients(
        self,
        loss: Loss,
        var_list: VarList,
        tape: tf.GradientTape | None,
        grad_loss: tf.Tensor | None,
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
