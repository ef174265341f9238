"""`tf.keras` as Keras 3 on the TensorFlow backend."""

import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Method, Replacement, When, wrapped
from keras_mp.keras_api import keras3_names, keras3_optimizers
from keras_mp.keras_api.keras3_policies import thread_with
from keras_mp.keras_api.predictions import widen_for
from keras_mp.support import features
from keras_mp.variables import autocast_variable, casts

keras = tf.keras

# The names in `compile(loss=)` of the cross entropy that fits the shapes.
CROSSENTROPY_NAMES = ("crossentropy", "ce")


def rename(layer: Any, name: str) -> None:
    """Gives a layer another name. Its weights keep theirs."""
    layer.name = name


def compile_without_wrapping(
    keras_compile: Callable[..., None], call: inspect.BoundArguments
) -> None:
    """Calls Keras's own `compile` with bound arguments, so that it wraps nothing."""
    call.arguments["auto_scale_loss"] = False
    return keras_compile(*call.args, **call.kwargs)


def steps_per_execution(model: keras.Model) -> int:
    """Returns how many steps a call of `train_function` makes, in `fit`."""
    return model.steps_per_execution


def calls_of_layers(model: Any) -> list[tuple[Any, list[Any], list[Any]]] | None:
    """Returns the calls of a functional model's layers, None where nothing tells.

    Returns:
        list of tuples of a layer (on Keras 3 an operation, too) and of its symbolic inputs and
        outputs.
    """
    if getattr(model, "outputs", None) is None or not features.is_on(keras3_names.OUTPUTS):
        return None
    nodes = (node for depth in keras3_names.nodes.of(model).values() for node in depth)
    return [(node.operation, node.input_tensors, node.outputs) for node in nodes]


def autocast_dtype() -> tf.DType | None:
    """Returns the dtype that `tf.keras` casts variables to in this thread, or None."""
    if not features.is_on(keras3_names.THREADS):
        return None
    scope = keras3_names.get_attribute("autocast_scope")
    return None if scope is None or scope.dtype is None else tf.as_dtype(scope.dtype)


def autocast_scope(dtype: tf.DType | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that sets that dtype."""
    if not features.is_on(keras3_names.THREADS):
        return contextlib.nullcontext()
    # Not `AutocastScope(None)`, in which the dtype of a weight is floatx.
    scope = None if dtype is None else keras3_names.AutocastScope(dtype.name)
    return thread_with("autocast_scope", scope)


class BaseLayer(keras.layers.Layer):
    """The base of `layers.Layer`: Keras's own layer, without the casts of its inputs."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if features.is_on(keras3_names.RAW_INPUTS):
            keras3_names.converts_inputs.set_of(self, False)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Converts arrays to tensors, as Keras's own no longer does, and runs the layer."""
        named = {name: self._as_tensors(arg) for name, arg in kwargs.items()}
        return super().__call__(*map(self._as_tensors, args), **named)

    def _as_tensors(self, value: Any) -> Any:
        if isinstance(value, tf.Tensor):
            return value
        convert = functools.partial(
            self.dtype_policy.convert_input, autocast=False, dtype=self.compute_dtype
        )
        # If there is nothing to convert, it is not copied.
        if all(convert(each) is each for each in keras.tree.flatten(value)):
            return value
        return keras.tree.map_structure(convert, value)

    def add_weight(self, *, autocast: bool, **kwargs: Any) -> Any:
        weight = super().add_weight(autocast=autocast, **kwargs)
        if autocast and tf.as_dtype(weight.dtype).is_floating:
            # `add_weight` always makes a `keras.Variable`, and tracks it.
            weight.__class__ = AutoCastWeight
        return weight


class AutoCastWeight(keras.Variable):
    """A weight that is read and written as an `AutoCastVariable` is."""

    @property
    def true_dtype(self) -> str:
        """The dtype in which the value is kept."""
        with autocast_scope(None):
            return self.dtype

    @property
    def value(self) -> tf.Variable | tf.Tensor:
        """The variable; where it is cast, a tensor, which in a graph reads may share."""
        dtype, variable = autocast_dtype(), self.variable()
        if dtype is not None and isinstance(variable, tf.Variable):
            return casts.read(variable, dtype)
        return super().value

    def variable(self) -> tf.Variable | tf.Tensor:
        """The uncast value, which is the `tf.Variable`.

        In Keras's stateless and symbolic scopes it is another value.
        """
        with autocast_scope(None):
            return super().value

    def assign(self, value: tf.Tensor) -> tf.Tensor:
        casts.refuse_if_held(self.variable())
        with autocast_scope(None):
            return super().assign(value)

    def assign_add(self, value: tf.Tensor) -> tf.Tensor:
        with autocast_scope(None):
            return super().assign_add(value)

    def assign_sub(self, value: tf.Tensor) -> tf.Tensor:
        with autocast_scope(None):
            return super().assign_sub(value)


def is_weight(value: Any) -> bool:
    """Whether a value is a weight as layers of `tf.keras` have them."""
    return isinstance(value, keras.Variable)


def autocast_variables(weights: Sequence[Any]) -> list[Any]:
    """Returns the `AutoCastVariable`s among the weights of a layer, or in them."""
    inner = [weight.variable() for weight in weights if isinstance(weight, AutoCastWeight)]
    return [autocast_variable(v) for v in inner if isinstance(v, tf.Variable)]


class BaseLoss(keras.losses.Loss):
    """The base of `losses.Loss`: Keras's own loss, without the casts of labels."""

    def reduce(
        self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor | None
    ) -> tf.Tensor:
        """Computes the loss as Keras's own `__call__` does, but casts no labels to floats."""
        return _WithLabels(self, y_true)((), y_pred, sample_weight)


class _WithLabels(keras.losses.Loss):
    """A loss that has its labels already."""

    def __init__(self, loss: Any, labels: tf.Tensor) -> None:
        super().__init__(name=loss.name, reduction=loss.reduction, dtype=loss.dtype)
        self._loss, self._labels = loss, labels

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        del y_true
        return self._loss.call(self._labels, y_pred)


def is_in_a_layer(layer: Any) -> bool:
    """Whether another layer or model than this one is about to call it in this thread."""
    del layer
    if not features.is_on(keras3_names.THREADS):
        return True  # Else each model would return float32, also inside of another one.
    return keras3_names.get_attribute("current_call_ctx") is not None


def is_symbolic_input(value: Any) -> bool:
    """Whether a value is an input or output of layers of functional models."""
    return isinstance(value, keras.KerasTensor)


def is_symbolic() -> bool:
    """Whether Keras computes shapes only."""
    return keras3_names.in_symbolic_scope.is_there() and keras3_names.in_symbolic_scope()


def widen_predictions(model: keras.Model) -> None:
    """Lets the metrics of a compiled model see predictions in float32.

    On Keras 2 losses, too, which get labels in the dtype of predictions.
    """
    if features.is_on(keras3_names.LOSSES):
        widen_for(model, keras3_names.metrics.attribute, "update_state")


def build_loss(model: keras.Model, predictions: Any) -> None:
    """Makes the metrics that the loss of a compiled model updates."""
    del model, predictions


@contextlib.contextmanager
def own_seeds(seed: int) -> Iterator[None]:
    """Returns a context manager in which Keras draws random numbers of its own.

    What it makes in this thread gets seeds of a generator that begins with `seed`.
    """

    def randint(original: Callable[[int, int], int]) -> Callable[[int, int], int]:
        del original
        return seeds.randint

    if not features.is_on(keras3_names.THREADS):
        yield
        return
    seeds = random.Random(seed)
    with (
        wrapped.here(random, "randint", randint),  # by which Keras makes seeds
        # The generator of `keras.random` is one for each thread.
        thread_with("global_seed_generator", keras.random.SeedGenerator(seed)),
    ):
        yield


_init = Method(keras.mixed_precision.LossScaleOptimizer, "__init__")
hooks.install([Replacement(_init, keras3_optimizers.noting_what_is_wrapped, When.ALWAYS)])
if keras3_names.sum_gradients.is_there():
    _sum = Replacement(keras3_names.sum_gradients, keras3_optimizers.unless_summed, When.ALWAYS)
    hooks.install([_sum])
