"""The graph of one step with the tensors of a batch, for hazards to inspect."""

import functools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.layer_calls import model_outputs
from keras_mp.models import layer_paths
from keras_mp.numerics import graph as work
from keras_mp.numerics import origins
from keras_mp.numerics.batches import Batch
from keras_mp.support.dtypes import LOW_PRECISION
from keras_mp.support.kept_casts import as_float32
from keras_mp.support.messages import Line

# In what `health` returns: how many values are -inf, inf and NaN, and how many are zero; its size.
BAD, ZEROS, COUNTS = slice(5, 8), 9, 11
_NOTHING = np.zeros(COUNTS)

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
        forward: those that neither the backward pass nor the optimizer has made.

    Args:
        model: a model of `tf.keras`.
        batch: `Batch`.
        result: what the step returns.
        scopes: dict of the scopes of calls and the paths of layers, as `origins.step_of` notes it.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        batch: Batch,
        result: object,
        scopes: Mapping[str, str],
    ) -> None:
        self.model, self.batch, self.result = model, batch, result
        self.optimizer = getattr(model, "optimizer", None)
        self.layers = origins.Layers(model, scopes)
        graph = tf.compat.v1.get_default_graph()
        self.operations = [o for o in graph.get_operations() if not _OTHER_REPLICA.search(o.name)]
        self.forward = list(_forward(self.operations))

    def where(self, operation: tf.Operation) -> str:
        """Returns the path of an operation's layer, or words for what is outside of layers.

        A model casts what a layer takes, and that is the layer's: it has asked for the dtype.
        """
        takers = [operation]
        for _ in range(4):
            for each in takers:
                if path := self.layers.name(each.name):
                    return path
            moved = (each for each in takers if each.type in ("Cast", *origins.MOVES))
            takers = [to for each in moved for out in each.outputs for to in out.consumers()]
        return "the training step, outside of layers"

    def line(self, operation: tf.Operation) -> Line | None:
        """Returns the program's line that made an operation, or that of which it is a gradient."""
        return origins.line_of(self.forward_of(operation))

    def forward_of(self, operation: tf.Operation) -> tf.Operation:
        """Returns the operation of the forward pass that one of the backward pass belongs to."""
        if not origins.is_of_backward_pass(operation.name):
            return operation
        name = origins.forward_name(operation.name, operation.type, self._by_name)
        return self._by_name.get(name, operation)

    @functools.cached_property
    def _by_name(self) -> dict[str, tf.Operation]:
        return {origins.layers_of_scope(each.name): each for each in self.forward}

    def in_16_bits(self, types: Iterable[str], forward: bool = True) -> Iterator[tf.Operation]:
        """Yields operations of some types that return numbers in 16 bits.

        Args:
            types: names of operations.
            forward: bool. Whether only those of the forward pass are wanted. Defaults to True.
        """
        types = frozenset(types)
        for operation in self.forward if forward else self.operations:
            if operation.type in types and operation.outputs[0].dtype in LOW_PRECISION:
                yield operation

    @functools.cached_property
    def products(self) -> list[tuple[tf.Operation, int]]:
        """The products and convolutions of the forward pass, and how much each computes."""
        return [(each, count) for each in self.forward if (count := work.of(each))]

    @functools.cached_property
    def backward_products(self) -> list[tf.Tensor]:
        """The gradients that products and convolutions of the backward pass return."""
        return [
            operation.outputs[0]
            for operation in self.operations
            if origins.is_of_backward_pass(operation.name) and operation.type in work.COUNTED
        ]

    @functools.cached_property
    def output_layers(self) -> set[int]:
        """The `id`s of layers whose outputs are the model's, and of those around them.

        A program may call a model inside of another one by itself, as those of a GAN.
        """
        found = layer_paths.output_layers(self.model)
        for layer in keras_api.flatten_layers(self.model):
            if isinstance(layer, tf.keras.Model):
                found.update(map(id, model_outputs.last_layers(layer)))
        if not found and self.products:
            last, _ = self.products[-1]
            found = {id(layer) for _, layer in self.layers.path(last.name)}
        return found

    @functools.cached_property
    def scaling(self) -> tf.Operation | None:
        """The operation that multiplies the loss by the loss scale, if there is one."""
        for operation in self.forward:
            if operation.type == "Mul" and origins.is_made_in(operation, (), _SCALING):
                return operation
        return None

    @property
    def scale(self) -> tf.Tensor:
        """The loss scale, where there is one, as float32."""
        assert self.scaling is not None
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
            if is_gradient or (is_behind and not origins.is_made_in(operation, (), _APPLYING)):
                found[operation] = None
        return found

    def leads_to(
        self, tensor: tf.Tensor, types: Iterable[str], through: Iterable[str], steps: int
    ) -> tf.Operation | None:
        """Finds an operation that takes a tensor, at once or by way of others.

        Args:
            tensor: where to start.
            types: names of operations to find.
            through: names of operations on the way.
            steps: int. How many there may be.
        """
        types, through = frozenset(types), frozenset(through)
        known = [tensor]
        for _ in range(steps):
            takers = [taker for each in known for taker in each.consumers()]
            for taker in takers:
                if taker.type in types and not origins.is_of_backward_pass(taker.name):
                    return taker
            known = [t.outputs[0] for t in takers if t.type in through and t.outputs]
        return None


def _forward(operations: Sequence[tf.Operation]) -> Iterator[tf.Operation]:
    is_backward_pass_begun = False
    for operation in operations:
        if origins.is_of_backward_pass(operation.name):
            is_backward_pass_begun = True
        # The optimizer comes after the backward pass, and so may another loss.
        elif not is_backward_pass_begun or not origins.is_made_in(operation, (), _APPLYING):
            yield operation


def before(tensor: tf.Tensor, types: Container[str], until: Container[tf.DType] = ()) -> tf.Tensor:
    """Returns the tensor from which operations have made this one.

    Args:
        tensor: tensor of the graph.
        types: names of operations, which are followed from their results to their first inputs.
        until: dtypes, of which a tensor is not followed further. Defaults to none.
    """
    while tensor.op.type in types and tensor.dtype not in until:
        tensor = tensor.op.inputs[0]
    return tensor


def static_value(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns the value of a constant, or of the cast of one, or None."""
    if before(tensor, ("Cast", "Identity")).op.type != "Const":
        return None
    with np.errstate(over="ignore"):
        return tf.get_static_value(tensor)


def static_number(tensor: tf.Tensor) -> float | None:
    """Returns the same of a constant that is a single number; None for others."""
    value = static_value(tensor)
    return None if value is None or np.size(value) != 1 else float(np.ravel(value)[0])


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
    return tf.cast(tf.reduce_sum(tf.stack([*counts, _NOTHING])[:, BAD]), tf.int64)


def health(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a float64 vector with counts of values, `BAD` and `ZEROS` among them."""
    # The operation of `tf.debugging.experimental.enable_dump_debug_info`, mode FULL_HEALTH.
    # It has no kernel for 8 bits.
    tensor = as_float32(tensor) if tensor.dtype.size == 1 else tensor
    return tf.raw_ops.DebugNumericSummaryV2(
        input=tensor, output_dtype=tf.float64, tensor_debug_mode=4
    )
