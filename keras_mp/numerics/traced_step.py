"""Traces the training step of a model, for hazards to inspect its graph, and for the census."""

import functools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.layer_calls import layer_observers
from keras_mp.numerics import origins
from keras_mp.numerics.batches import Batch
from keras_mp.numerics.graph import COUNTED
from keras_mp.support import autograph, messages
from keras_mp.support.dtypes import LOW_PRECISION
from keras_mp.support.kept_casts import as_float32

# They hand on what a layer has asked for.
_MOVES = {"Cast", *origins.MOVES}

# In what `health` returns: how many values are -inf, inf and NaN, and how many are zero; its size.
BAD, ZEROS, COUNTS = slice(5, 8), 9, 11

_OTHER_REPLICA = re.compile(r"(^|/)replica_[1-9]\d*/")

# Functions of libraries that scale a loss, and those that run after the gradients.
_SCALING = ("scale_loss", "get_scaled_loss")
_APPLYING = (
    *("apply_gradients", "apply", "minimize", "unscale", "get_unscaled_gradients"),
    *("compute_metrics", "update_state"),
)


class TracedStep:
    """A step of a model that is being traced, for hazards to inspect.

    Attributes:
        model: the model.
        optimizer: that of the model, or None.
        batch: `Batch`.
        result: what the step returns.
        layers: `Layers` of the model.
        operations: all operations of the graph, but for those of further replicas, in the order in
            which they were made.

    Args:
        model: a model of `tf.keras`.
        batch: `Batch`.
        result: what the step returns.
        layers: `Layers` of the model, which have seen its calls.
    """

    def __init__(
        self, model: tf.keras.Model, batch: Batch, result: object, layers: origins.Layers
    ) -> None:
        self.model, self.batch, self.result, self.layers = model, batch, result, layers
        self.optimizer = getattr(model, "optimizer", None)
        made = layers.graph.get_operations()
        self.operations = [each for each in made if not _OTHER_REPLICA.search(each.name)]

    @functools.cached_property
    def backward(self) -> list[tf.Operation]:
        """Those operations that belong to the backward pass."""
        return [each for each in self.operations if origins.is_of_backward_pass(each.name)]

    @functools.cached_property
    def forward(self) -> list[tf.Operation]:
        """Those operations that neither the backward pass nor the optimizer has made."""
        begins = self.operations.index(self.backward[0]) if self.backward else len(self.operations)
        # The optimizer comes after the backward pass, and so may another loss.
        later = [o for o in self.operations[begins:] if not origins.is_of_backward_pass(o.name)]
        return self.operations[:begins] + [o for o in later if not origins.is_made_in(o, _APPLYING)]

    def where(self, operation: tf.Operation) -> str:
        """Returns the path of an operation's layer, or words for what is outside of layers.

        A model casts what a layer takes, and that is the layer's: it has asked for the dtype.
        """
        takers = _takers(operation.outputs, _MOVES, steps=3) if operation.type in _MOVES else ()
        paths = (self.layers.name(each.name) for each in (operation, *takers))
        return next(filter(None, paths), "the training step, outside of layers")

    def line(self, operation: tf.Operation) -> messages.Line | None:
        """Returns the program's line that made an operation, or that of which it is a gradient."""
        if origins.is_of_backward_pass(operation.name):
            name = origins.forward_name(operation.name, operation.type, self._by_name)
            operation = self._by_name.get(name, operation)
        return origins.line_of(operation)

    @functools.cached_property
    def _by_name(self) -> dict[str, tf.Operation]:
        return {origins.layers_of_scope(each.name): each for each in self.forward}

    def in_16_bits(self, types: Container[str], forward: bool = True) -> Iterator[tf.Operation]:
        """Yields operations of some types that return numbers in 16 bits.

        Args:
            types: names of operations.
            forward: bool. Whether only those of the forward pass are wanted. Defaults to True.
        """
        for operation in self.forward if forward else self.operations:
            if operation.type in types and operation.outputs[0].dtype in LOW_PRECISION:
                yield operation

    @functools.cached_property
    def backward_products(self) -> list[tf.Tensor]:
        """The gradients that products and convolutions of the backward pass return."""
        return [each.outputs[0] for each in self.backward if each.type in COUNTED]

    @functools.cached_property
    def scaling(self) -> Any:
        """The operation that multiplies the loss by the loss scale, if there is one."""
        found = (o for o in self.forward if o.type == "Mul" and origins.is_made_in(o, _SCALING))
        return next(found, None)

    @property
    def scale(self) -> tf.Tensor:
        """The loss scale, where there is one, as float32."""
        return as_float32(self.scaling.inputs[1])

    @functools.cached_property
    def scaled(self) -> dict[tf.Operation, None]:
        """The operations on scaled gradients before they are unscaled, in order."""
        if self.scaling is None:
            return {}
        # The scaled loss is used for its gradient only.
        begins = f"gradient_tape/{self.scaling.name}/"
        found: dict[tf.Operation, None] = {}
        for operation in self.operations:  # The maker of a tensor comes before its consumers.
            is_gradient = begins in f"/{operation.name}"
            is_behind = any(tensor.op in found for tensor in operation.inputs)
            if is_gradient or (is_behind and not origins.is_made_in(operation, _APPLYING)):
                found[operation] = None
        return found

    def leads_to(
        self, tensor: tf.Tensor, types: Container[str], through: Container[str], steps: int
    ) -> tf.Operation | None:
        """Finds an operation that takes a tensor, at once or by way of others.

        Args:
            tensor: where to start.
            types: names of operations to find.
            through: names of operations on the way.
            steps: int. How many there may be.
        """
        found = (each for each in _takers([tensor], through, steps) if each.type in types)
        return next((each for each in found if not origins.is_of_backward_pass(each.name)), None)


def _takers(tensors: Sequence[tf.Tensor], through: Container[str], steps: int) -> Iterator[Any]:
    """Yields the operations that take some tensors, at once or by way of others."""
    for _ in range(steps):
        takers = [taker for each in tensors for taker in each.consumers()]
        yield from takers
        tensors = [made for each in takers if each.type in through for made in each.outputs]


def trains(model: tf.keras.Model) -> bool:
    """Whether a model was compiled with an optimizer, so that it has a training step."""
    return getattr(model, "optimizer", None) is not None


def name_of_step(model: tf.keras.Model) -> str:
    """Returns a name for the step that `trace` traces."""
    step = "the training step" if trains(model) else "the forward pass"
    return f"{step} of {model.name!r}"


def trace(
    model: tf.keras.Model,
    batch: Batch,
    layers: origins.Layers,
    inspect: Callable[[TracedStep], object] = lambda step: step.result,
) -> tf.types.experimental.ConcreteFunction:
    """Traces the training step of a compiled model, or the forward pass of another one.

    It is the model's own `train_step`, under its strategy, without XLA. Nothing runs; weights and
    slots that are not there yet are made, as `fit` makes them.

    Args:
        model: a model of `tf.keras`.
        batch: Batch.
        layers: `Layers` of the model, which then know the scopes of the graph.
        inspect: called in the graph when the step is complete. The function returns what it
            returns. Defaults to what the step returns.

    Returns:
        `tf.types.experimental.ConcreteFunction` of `batch.data`.
    """

    def run(data: tuple[Any, ...]) -> object:
        # In the thread of a replica, which is that of its layers' calls.
        with layer_observers.attached(layers, {"": model, **layers.named}.items()):
            return model.train_step(data) if trains(model) else model(data[0], training=True)

    strategy = model.distribute_strategy
    optimizer: Any = getattr(model, "optimizer", None)
    is_distributed = strategy.num_replicas_in_sync > 1
    if model.built and hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
        with strategy.scope():
            optimizer.build(model.trainable_variables)

    inspected = autograph.do_not_convert(
        lambda data, result: inspect(TracedStep(model, Batch(*data), result, layers))
    )

    @tf.function
    def step(data: tuple[Any, ...]) -> object:
        layers.begin()
        result = strategy.run(run, args=(data,)) if is_distributed else run(data)
        return inspected(data, result)

    with np.errstate(over="ignore"):  # NumPy warns of a constant that 16 bits do not hold.
        return step.get_concrete_function(batch.data)


def before(tensor: tf.Tensor, types: Container[str]) -> tf.Tensor:
    """Returns the tensor from which operations have made this one.

    Args:
        tensor: tensor of the graph.
        types: names of operations, which are followed from their results to their first inputs.
    """
    while tensor.op.type in types:
        tensor = tensor.op.inputs[0]
    return tensor


def static_value(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns the value of a constant, or of the cast of one, or None."""
    if before(tensor, ("Cast", "Identity")).op.type != "Const":
        return None
    with np.errstate(over="ignore"):
        return tf.get_static_value(tensor)


def is_narrow(dtype: tf.DType) -> bool:
    """Whether numbers of a dtype have 16 bits, or fewer."""
    return dtype.is_floating and dtype.size < 4


def in_float32(operation: tf.Operation, widen: Callable[..., tf.Tensor] = as_float32) -> Any:
    """Computes an operation again, in float32 on the same inputs.

    Args:
        operation: of the graph.
        widen: called with each input in 16 bits; returns what is taken in its place.

    Returns:
        What it returns first; None if it has a state, or has no kernel for float32.
    """
    if operation.op_def.is_stateful:
        return None
    attrs = {}
    for name, value in operation.node_def.attr.items():
        if not name.startswith("_"):
            is_low = value.WhichOneof("value") == "type" and is_narrow(tf.as_dtype(value.type))
            attrs[name] = type(value)(type=tf.float32.as_datatype_enum) if is_low else value
    inputs = [widen(each) if is_narrow(each.dtype) else each for each in operation.inputs]
    try:
        return operation.graph.create_op(operation.type, inputs, attrs=attrs).outputs[0]
    except (TypeError, ValueError, tf.errors.OpError):
        return None


def not_finite_of(values: Iterable[tf.Tensor | tf.Variable]) -> tf.Tensor:
    """Counts the values of tensors and variables that are infinite or NaN."""
    counts = [health(tf.convert_to_tensor(each)) for each in values]
    return tf.cast(tf.reduce_sum(tf.stack([*counts, np.zeros(COUNTS)])[:, BAD]), tf.int64)


def health(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a float64 vector with counts of values, `BAD` and `ZEROS` among them."""
    # The operation of `tf.debugging.experimental.enable_dump_debug_info`, mode FULL_HEALTH.
    # It has no kernel for 8 bits.
    tensor = as_float32(tensor) if tensor.dtype.size == 1 else tensor
    summary = tf.raw_ops.DebugNumericSummaryV2
    return summary(input=tensor, output_dtype=tf.float64, tensor_debug_mode=4)
