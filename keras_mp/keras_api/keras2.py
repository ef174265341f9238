"""`tf.keras` as Keras 2, the package tf_keras."""

import contextlib
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.hooks import wrapped
from keras_mp.keras_api import keras2_names
from keras_mp.keras_api.predictions import let_gather_bfloat16, widen_for
from keras_mp.support import features
from keras_mp.support.attributes import replaced
from keras_mp.variables import AutoCastVariable, autocast_variable

keras = tf.keras

CROSSENTROPY_NAMES = ()


def rename(layer: Any, name: str) -> None:
    layer._name = name


def compile_without_wrapping(
    keras_compile: Callable[..., None], call: inspect.BoundArguments
) -> None:
    """Compiles a model without Keras 2 wrapping its optimizer.

    Keras 2 wraps by the policy's name alone, and only its private method can leave it out.
    """

    def get_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        return tf.nest.map_structure(keras.optimizers.get, optimizer)

    if not keras2_names.optimizer_of_model.is_there():
        optimizers = tf.nest.flatten(call.arguments.get("optimizer"))
        scaling = keras.mixed_precision.LossScaleOptimizer
        may_wrap = call.args[0].dtype_policy.name == "mixed_float16"
        if not may_wrap or all(isinstance(each, scaling) for each in optimizers):
            return keras_compile(*call.args, **call.kwargs)
        # Keras would scale the loss as well, or refuse the optimizer.
        keras2_names.optimizer_of_model.get()
    with replaced(call.args[0], "_get_optimizer", get_optimizer):
        return keras_compile(*call.args, **call.kwargs)


def steps_per_execution(model: keras.Model) -> int:
    variable = getattr(model, "_steps_per_execution", None)
    return 1 if variable is None else variable.numpy().item()


def calls_of_layers(model: Any) -> list[tuple[Any, list[Any], list[Any]]] | None:
    if getattr(model, "outputs", None) is None or not features.is_on(keras2_names.OUTPUTS):
        return None
    nodes = (node for depth in keras2_names.nodes.of(model).values() for node in depth)
    return [(node.layer, node.keras_inputs, tf.nest.flatten(node.outputs)) for node in nodes]


def patch_fit(model: keras.Model) -> None:
    let_gather_bfloat16(model.distribute_strategy)  # All else works.


def autocast_dtype() -> tf.DType | None:
    if not features.is_on(keras2_names.THREADS):
        return None
    return getattr(keras2_names.autocast_dtype.get(), "dtype", None)


def autocast_scope(dtype: tf.DType | None) -> contextlib.AbstractContextManager[None]:
    if not features.is_on(keras2_names.THREADS):
        return contextlib.nullcontext()
    return keras2_names.autocast_scope(dtype)


class BaseLayer(keras.layers.Layer):
    """The base of `layers.Layer`: Keras's own layer, without the casts of its inputs."""

    def __init__(self, *args: Any, autocast: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, autocast=False, **kwargs)
        self.autocast = autocast

    def add_weight(
        self, *, autocast: bool, getter: Callable[..., Any] | None = None, **kwargs: Any
    ) -> Any:
        def get_casting(*args: Any, **kwargs: Any) -> AutoCastVariable:
            make = getter or keras2_names.make_variable.get()
            return autocast_variable(make(*args, **kwargs))

        dtype = tf.as_dtype(kwargs.get("dtype") or self.variable_dtype)
        casts = autocast and dtype.is_floating and self.compute_dtype != self.variable_dtype
        original: Any = super()
        if casts and not features.is_on(keras2_names.WEIGHTS):
            return original.add_weight(**kwargs)  # Keras's own casts itself, too.
        chosen = get_casting if casts else getter
        getters = {} if chosen is None else {"getter": chosen}
        return original.add_weight(experimental_autocast=False, **getters, **kwargs)


def name_functions(layer: keras.layers.Layer, config: dict[str, Any]) -> dict[str, Any]:
    del layer, config  # Keras writes the module of a function, too.
    return {}


def is_weight(value: Any) -> bool:
    return isinstance(value, tf.Variable)


def autocast_variables(weights: Sequence[Any]) -> list[Any]:
    return [weight for weight in weights if isinstance(weight, AutoCastVariable)]


class BaseLoss(keras.losses.Loss):
    """The base of `losses.Loss`: Keras's own loss, which casts nothing, with a dtype."""

    def __init__(self, *args: Any, dtype: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dtype = dtype

    @property
    def dtype(self) -> str:
        """The dtype that `call` runs in."""
        return self._dtype

    def reduce(
        self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor | None
    ) -> tf.Tensor:
        """Computes and reduces the loss, as Keras's own `__call__` does."""
        return super().__call__(y_true, y_pred, sample_weight)


def is_in_a_layer(layer: Any) -> bool:
    if not features.is_on(keras2_names.THREADS):
        return True  # Else each model would return float32, also inside of another one.
    context = keras2_names.call_context()
    # While Keras saves a model, the model is in itself.
    return context.in_call and not (context.saving and context.layer is layer)


def is_symbolic_input(value: Any) -> bool:
    is_tensor = isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor)
    return not is_tensor and hasattr(value, "type_spec")


def is_symbolic() -> bool:
    return False


def widen_predictions(model: keras.Model) -> None:
    # Keras casts labels to the dtype of predictions.
    dtypes = [getattr(each, "dtype", None) for each in tf.nest.flatten(model.loss)]
    widest = "float64" if "float64" in dtypes else "float32"
    widen_for(model, "compiled_loss", "__call__", widest)
    widen_for(model, "compiled_metrics", "update_state")


def build_loss(model: keras.Model, predictions: Any) -> None:
    if not model.compiled_loss.built:
        with model.distribute_strategy.scope():
            model.compiled_loss.build(predictions)


@contextlib.contextmanager
def own_seeds(seed: int) -> Iterator[None]:
    if not features.is_on(keras2_names.SEEDS):
        yield
        return
    counts: dict[int, tuple[Any, Iterator[int]]] = {}

    def make_legacy_seed(original: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
        del original

        def make(generator: Any) -> int | None:
            # Keras counts in the generator, which is the program's.
            if generator._seed is None:
                return None
            count = counts.setdefault(id(generator), (generator, itertools.count(generator._seed)))
            return next(count[1])

        return make

    with (
        replaced(keras2_names.seeds.get(), "generator", random.Random(seed)),
        wrapped.here(keras2_names.RandomGenerator.get(), "make_legacy_seed", make_legacy_seed),
    ):
        yield
