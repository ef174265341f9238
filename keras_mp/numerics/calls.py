"""What is observed of a run in eager: calls of layers, operations, and random numbers.

A call of a layer is a call of a Python function then. The method `call` of each layer is watched:
its arguments have been cast by then.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar, cast

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.layer_calls import layer_observers, model_outputs
from keras_mp.layer_calls.layer_observers import LayerCall, LayerObserver
from keras_mp.models.layer_paths import layers_by_path
from keras_mp.numerics import origins, own_thread
from keras_mp.numerics.distances import UNIT_ROUNDOFF
from keras_mp.support import op_callbacks
from keras_mp.support.messages import Line

_Structure = TypeVar("_Structure")

Position = tuple[int, ...]


# A layer, an operation of Keras, a loss.
Called = tf.keras.layers.Layer | Callable[..., Any]

Change = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass
class Call:
    """One call of a layer, of a loss or of an operation: what went in, and what came out.

    Attributes:
        position: the number of the call within the call around it, from the outermost to this one.
            Calls of two runs of the same model have the same positions, whatever the layers' names.
        path: str. The names of the layers from below the model to this one; of the model its name;
            of an operation its name scope and type.
        kind: str. The class of the layer, the type of an operation, or "loss".
        layer: the layer, or what else was called; None for an operation.
        args: its positional arguments.
        kwargs: its keyword arguments.
        outputs: list of the floating-point tensors that it returned; of an operation, all tensors.
        gradients: list of the gradients of these, multiplied by the loss scale; None where there is
            none. Empty until a backward pass has told.
        trained_through: set of the ids of those arguments whose gradients training computes, since
            trainable weights lie before them. Empty until a backward pass has told.
        is_widened: whether the model has computed its outputs in float32, to return them.
        numbers: RandomNumbers that the run draws.
        is_gradient: whether it is an operation that ran for a gradient.
        line: the line of the program that an operation came from; None where only libraries had to
            do with it.
    """

    position: Position
    path: str
    kind: str
    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: list[tf.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[tf.Tensor | None] = dataclasses.field(default_factory=list)
    trained_through: set[int] = dataclasses.field(default_factory=set)
    is_widened: bool = False
    numbers: "RandomNumbers | None" = None
    is_gradient: bool = False
    line: Line | None = None

    @property
    def inputs(self) -> list[tf.Tensor]:
        """The floating-point tensors among its arguments."""
        return floating((self.args, self.kwargs))

    @property
    def dtype(self) -> str:
        """The coarsest of the dtypes of inputs and outputs and of the compute dtypes.

        A model that was loaded may have another policy than the layers inside of it.
        """
        dtypes = [value.dtype.name for value in (*self.inputs, *self.outputs)]
        if isinstance(self.layer, tf.keras.layers.Layer):
            dtypes += [layer.compute_dtype for layer in keras_api.flatten_layers(self.layer)]
        known = [dtype for dtype in dtypes if dtype in UNIT_ROUNDOFF]
        return max(known, key=UNIT_ROUNDOFF.__getitem__, default="float32")

    @property
    def unit(self) -> float:
        """The unit roundoff of that dtype."""
        return UNIT_ROUNDOFF[self.dtype]

    def return_instead(self, others: Mapping[int, tf.Tensor]) -> bool:
        """Replaces outputs, and returns whether there are any.

        Args:
            others: what takes the place of outputs, by their ids.
        """
        is_one = any(id(value) in others for value in self.outputs)
        self.outputs = [others.get(id(value), value) for value in self.outputs]
        return is_one

    def contains(self, other: "Call") -> bool:
        """Whether the other call was made inside of this one."""
        around = other.position[: len(self.position)]
        return other.position != self.position and self.position == around


class RandomNumbers:
    """Keeps the random numbers that the first run draws, for the other runs.

    TensorFlow draws other numbers in float16 than in float32 from the same seed, so the numbers
    are kept. Let the narrowest dtype run first: wider dtypes hold its numbers exactly.
    """

    def __init__(self) -> None:
        self._drawn: dict[tuple[Position, int], tf.Tensor] = {}

    def take(self, position: Position, count: int, own: tf.Tensor) -> tf.Tensor:
        """Returns the numbers that were drawn at that place, or keeps and returns `own`."""
        drawn = self._drawn.setdefault((position, count), own)
        return tf.cast(drawn, own.dtype) if drawn.shape == own.shape else own


class Watch(LayerObserver):
    """Watches the calls of layers.

    Attributes:
        calls: list of Call, each when it ends: those inside of a layer come before its own.
        kept: KeptOperations, if somebody keeps them.

    Args:
        numbers: RandomNumbers. Runs that are to be compared share them.
        change: called with each floating-point tensor that a layer returns; the result takes its
            place. By default nothing is changed.
        start: the position of the first call.
    """

    def __init__(
        self, numbers: RandomNumbers, change: Change | None = None, start: Position = (0,)
    ) -> None:
        self.calls: list[Call] = []
        self.kept = KeptOperations()
        self._numbers = numbers
        self._change = change
        # The position of the next call, and how many times each call around it has drawn numbers.
        self._next, self._around, self._counts = start[-1], start[:-1], [0]

    def run(
        self,
        path: str,
        kind: str,
        layer: Called,
        function: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls a function, and notes that as the call of a layer of that name and kind."""
        outputs = layer_observers.observed(self, path, layer, function)(*args, **kwargs)
        self.calls[-1].kind = kind
        return outputs

    def inputs(self, call: LayerCall) -> None:
        """Begins a call."""
        self._around, self._next = (*self._around, self._next), 0
        self._counts.append(0)

    def outputs(self, call: LayerCall, outputs: Any) -> Any:
        """Notes a call, and changes what it returns."""
        position = self._around
        self.failed(call)
        if self._change is not None:
            outputs = map_floating(self._change, outputs)
        path, layer, args, kwargs = call
        kind = type(layer).__name__
        seen = Call(position, path, kind, layer, args, kwargs, floating(outputs))
        seen.is_widened, seen.numbers = model_outputs.is_last(layer), self._numbers
        self.calls.append(seen)
        return outputs

    def failed(self, call: LayerCall) -> None:
        """Ends a call."""
        *outside, number = self._around
        self._around, self._next = tuple(outside), number + 1
        self._counts.pop()

    @contextlib.contextmanager
    def over(self, root: Any) -> Iterator[None]:
        """Watches a model or layer, with the layers inside of it, and the numbers that are drawn.

        Args:
            root: the model or layer. If it has no `call`, only the numbers are watched.
        """
        # Each once, by its first path.
        named = {id(layer): (path, layer) for path, layer in reversed(list(_named(root)))}
        with (
            layer_observers.attached(self, named.values()),
            own_thread.drawing(self._take),
            own_thread.eager_functions(),
        ):
            yield

    def _take(self, own: tf.Tensor) -> tf.Tensor:
        self._counts[-1] += 1
        return self._numbers.take(self._around, self._counts[-1], own)


class KeptOperations:
    """Operations that ran, in their order.

    Attributes:
        operations: list of Call. Those that compute floating-point numbers. One whose result is
            only rounded to 16 bits, as a sum in float32 is, has the rounded result.
    """

    def __init__(self) -> None:
        self.operations: list[Call] = []
        # The operation that computed a tensor, by the tensor's id, and the tensors, which are held
        # so that no other one gets the id.
        self._makers: dict[int, int] = {}
        self._held: list[Any] = []

    def is_computed(self, value: tf.Tensor) -> bool:
        """Whether one of the operations has computed a tensor."""
        return id(value) in self._makers

    def keep(
        self,
        kind: str | bytes,
        inputs: Sequence[tf.Tensor],
        attrs: object,
        outputs: Sequence[tf.Tensor],
        *_: Any,
        **__: Any,
    ) -> None:
        """Keeps an operation; `op_callbacks.observed` calls it."""
        del attrs
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if not any(value.dtype.is_floating for value in outputs):
            return
        if not origins.is_safe(kind, outputs):
            maker, origin = len(self.operations), origins.running()
            path = f"{tf.get_current_name_scope()}/{kind}".strip("/")
            made = Call((maker,), path, kind, None, tuple(inputs), outputs=list(outputs))
            made.is_gradient, made.line = origin.is_gradient, origin.line
            self.operations.append(made)
        else:
            maker = next((self._makers[id(v)] for v in inputs if self.is_computed(v)), None)
            if maker is None:
                return
            if kind == "Cast" and outputs[0].dtype.size < inputs[0].dtype.size:
                self.operations[maker].return_instead({id(inputs[0]): outputs[0]})
        self._makers.update((id(value), maker) for value in outputs)
        self._held.extend(outputs)


@contextlib.contextmanager
def kept() -> Iterator[KeptOperations]:
    """Keeps the operations of the block."""
    seen = KeptOperations()
    with op_callbacks.observed(seen.keep):
        yield seen


def floating(structure: Any) -> list[tf.Tensor]:
    """Returns the floating-point tensors in a structure, each once."""
    found = {id(value): value for value in tf.nest.flatten(structure) if is_floating(value)}
    return list(found.values())


def map_floating(change: Change, structure: _Structure) -> _Structure:
    """Returns the structure, with its floating-point tensors changed."""
    return tf.nest.map_structure(
        lambda value: change(value) if is_floating(value) else value, structure
    )


def is_floating(value: object) -> TypeGuard[tf.Tensor]:
    """Whether a value is a floating-point tensor."""
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def shape_of(tensor: tf.Tensor) -> tuple[int, ...]:
    """Returns the shape of an eager tensor."""
    return cast(tuple[int, ...], tuple(tensor.shape))


def _named(root: Any) -> Iterator[tuple[str, Any]]:
    """Yields a model or layer, and the layers inside of it, with their paths."""
    if not hasattr(root, "call"):
        return
    yield root.name, root
    if not isinstance(root, tf.keras.layers.Layer):
        return
    layers = layers_by_path(root)
    yield from layers.items()
    for path, layer in {"": root, **layers}.items():
        # A functional model of Keras 3 has operations that are no layers.
        for operation in getattr(layer, "operations", ()):
            if not isinstance(operation, tf.keras.layers.Layer):
                yield f"{path}/{operation.name}".strip("/"), operation


def named_weights(layer: Any) -> dict[str, Any]:
    """Returns the trainable weights of a layer or model, by names that a copy of it has as well.

    Keras 3 may give a copy other paths, so equal names are told apart by their order.
    """
    weights = getattr(layer, "trainable_weights", ())
    names = [weight.name.partition(":")[0].rpartition("/")[2] for weight in weights]
    return {
        name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})": weight
        for i, (name, weight) in enumerate(zip(names, weights))
    }
