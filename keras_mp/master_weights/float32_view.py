"""A float32 variable that is kept in 16 bits.

Optimizers of Keras 3 and the new ones of Keras 2 read a variable and assign to it, which a view
does without ever having a variable in float32. What takes the handle of a variable gets that of a
borrowed one.
"""

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.master_weights import rounding
from keras_mp.master_weights.methods import Method
from keras_mp.master_weights.scratch import Scratch


class Updates:
    """What all views of an optimizer share: the order of updates, borrowed variables, noise.

    Attributes:
        seed: int64 variable, or None where nothing is rounded stochastically.

    Args:
        steps: returns how many steps were made, an int64 scalar tensor.
    """

    def __init__(self, steps: Callable[[], tf.Tensor | None]) -> None:
        self.scratch = Scratch()
        self.seed: Any = None
        self._steps = steps
        # By graph and device, which view was written last, and the operations that wrote it.
        self._last: dict[tuple[tf.Graph, str], tuple[Any, list[tf.Operation]]] = {}
        # How often a view has drawn noise in this step, by its id.
        self._draws: collections.Counter[int] = collections.Counter()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context manager in which views are written; in the end, what was borrowed is returned."""
        self._draws.clear()
        try:
            yield
            self.scratch.give_back()
        finally:
            self.scratch.forget()
            self._last.clear()

    def noise(self, view: "Float32View") -> tf.Tensor:
        """Returns random bits for a value of a view: the same on all replicas, others in each step.

        Args:
            view: which view they are for.

        Returns:
            uint32 tensor.
        """
        self._draws[id(view)] += 1
        stream = tf.constant([view.number, self._draws[id(view)]], tf.int64)
        step = tf.stack([tf.convert_to_tensor(self.seed), self._steps()])
        # Philox mixes both of its seeds well, so neighbours will do.
        seed = step * tf.constant([1 << 32, 1 << 24], tf.int64) + stream
        return rounding.noise(view.shape, seed)

    def after_others(self, view: Any) -> Any:
        """Context manager in which a view is read when other views have been written.

        So that a graph does not hold all weights in float32 at once.
        """
        if tf.executing_eagerly():
            return tf.control_dependencies([])
        key = (tf.compat.v1.get_default_graph(), view.device)
        written, operations = self._last.get(key, (None, ()))
        return tf.control_dependencies([] if written is view else operations)

    def wrote(self, view: Any, operations: Sequence[tf.Operation]) -> None:
        """Notes that a view was written."""
        if not tf.executing_eagerly():
            key = (tf.compat.v1.get_default_graph(), view.device)
            self._last[key] = view, list(operations)


class Float32View(
    tf.__internal__.tracking.DelegatingTrackableMixin,
    tf.Variable,
    tf.__internal__.types.Tensor,
):
    """A variable in 16 bits, and what is kept beside it, as one float32 variable.

    Args:
        stored: variable in 16 bits; not a distributed one.
        beside: what `method` keeps beside it.
        method: how float32 values are kept in them.
        updates: what the views of the optimizer share.
        number: int. Tells the view from others of the optimizer.
        described: what else is asked for is an attribute of it: a constraint, a path.
        is_weight: bool. Whether it is a weight of a model, and not a slot.
    """

    def __init__(
        self,
        stored: tf.Variable,
        beside: Sequence[tf.Variable],
        method: Method,
        updates: Updates,
        number: int,
        *,
        described: Any = None,
        is_weight: bool = True,
    ) -> None:
        self._stored, self._beside = stored, tuple(beside)
        self._method, self._updates, self.number = method, updates, number
        self._described = stored if described is None else described
        self._is_weight = is_weight

    @property
    def dtype(self) -> tf.DType:
        """float32."""
        return tf.float32

    @property
    def stored_dtype(self) -> tf.DType:
        """The dtype of the variable in 16 bits."""
        return self._stored.dtype

    def value(self) -> tf.Tensor:
        """Returns the value."""
        handle = self._updates.scratch.find(self, self.device)
        if handle is not None:
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
            return tf.ensure_shape(value, self.shape)
        with self._updates.after_others(self):
            return self._method.join(
                self._stored.read_value(), [each.read_value() for each in self._beside]
            )

    read_value = value

    def read_value_no_copy(self) -> tf.Tensor:
        """Returns the value."""
        return self.value()

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Returns some rows."""
        return tf.gather(self.value(), indices, name=name)

    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Returns some elements or slices."""
        return tf.gather_nd(self.value(), indices, name=name)

    def numpy(self) -> Any:
        """Returns the value as an array; in eager only."""
        return self.value().numpy()

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        """Converts to a float32 tensor."""
        return tf.convert_to_tensor(self.value(), dtype=dtype, name=name)

    @property
    def handle(self) -> tf.Tensor:
        """The handle of a float32 variable that is borrowed for the update of one weight."""
        scratch, device = self._updates.scratch, self.device
        found = scratch.find(self, device)
        if found is None:
            if self._is_weight:
                scratch.give_back()  # what was borrowed for the weight before
            found = scratch.handle_for(self, self.value(), device)
        return found

    def take_back(self, value: tf.Tensor) -> None:
        """Stores the value of the borrowed variable."""
        self._store(tf.ensure_shape(value, self.shape))

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Stores a value."""
        del use_locking, name
        value = tf.convert_to_tensor(value, tf.float32)
        value.shape.assert_is_compatible_with(self.shape)
        return self._updated(tf.ensure_shape(value, self.shape), read_value)

    def assign_add(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Adds to the value."""
        del use_locking, name
        return self._updated(self._after(delta) + delta, read_value)

    def assign_sub(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Subtracts from the value."""
        del use_locking, name
        return self._updated(self._after(delta) - delta, read_value)

    def _after(self, delta: Any) -> tf.Tensor:
        """The value, read no sooner than it is needed: it takes memory."""
        with tf.control_dependencies([delta] if tf.is_tensor(delta) else []):
            return self.value()

    def scatter_add(self, sparse_delta: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        """Adds to some rows."""
        return self._scatter(tf.tensor_scatter_nd_add, sparse_delta)

    def scatter_sub(self, sparse_delta: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        """Subtracts from some rows."""
        return self._scatter(tf.tensor_scatter_nd_sub, sparse_delta)

    def scatter_update(self, sparse_delta: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        """Stores some rows."""
        return self._scatter(tf.tensor_scatter_nd_update, sparse_delta)

    def scatter_max(self, sparse_delta: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        """Keeps the greater one of rows and their updates."""
        return self._scatter(tf.tensor_scatter_nd_max, sparse_delta)

    def scatter_min(self, sparse_delta: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        """Keeps the smaller one of rows and their updates."""
        return self._scatter(tf.tensor_scatter_nd_min, sparse_delta)

    def _scatter(self, scatter: Callable[..., tf.Tensor], slices: tf.IndexedSlices) -> Any:
        indices = tf.expand_dims(slices.indices, -1)
        return self._updated(scatter(self._after(slices.values), indices, slices.values), True)

    def _updated(self, value: tf.Tensor, read_value: bool) -> Any:
        """Stores a value and returns what an assignment to a variable does."""
        operations = self._store(value)
        if tf.executing_eagerly():
            return self
        with tf.control_dependencies(operations):
            return tf.identity(value) if read_value else tf.group(*operations)

    def _store(self, value: tf.Tensor) -> list[tf.Operation]:
        handle = self._updates.scratch.find(self, self.device)
        if handle is not None:
            operation = tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            return [] if operation is None else [operation]

        def noise() -> tf.Tensor:
            with tf.control_dependencies([value]):  # not of all variables at once
                return self._updates.noise(self)

        values = self._method.split(value, self._stored.dtype, noise)
        targets = (self._stored, *self._beside)
        # All of the values before any of the assignments: they are computed from reads.
        with tf.control_dependencies(values):
            assigned = [
                target.assign(each, read_value=False)
                for target, each in zip(targets, values, strict=True)
            ]
        operations = [] if tf.executing_eagerly() else assigned
        self._updates.wrote(self, operations)
        return operations

    # As the variable in 16 bits: by its key, an optimizer knows either.

    @property
    def shape(self) -> tf.TensorShape:
        """The shape."""
        return self._stored.shape

    def get_shape(self) -> tf.TensorShape:
        """Returns the shape."""
        return self._stored.shape

    @property
    def name(self) -> str:
        """The name of the variable in 16 bits."""
        return self._described.name

    @property
    def device(self) -> str:
        """The device of the variable in 16 bits."""
        return self._stored.device

    @property
    def trainable(self) -> bool:
        """Whether it is trained."""
        return self._described.trainable

    @property
    def constraint(self) -> Any:
        """The constraint of the variable in 16 bits."""
        return self._described.constraint

    @property
    def synchronization(self) -> tf.VariableSynchronization:
        """That of the variable in 16 bits."""
        return self._stored.synchronization

    @property
    def aggregation(self) -> tf.VariableAggregation:
        """That of the variable in 16 bits."""
        return self._stored.aggregation

    @property
    def _shared_name(self) -> str:
        return self._stored._shared_name

    @property
    def op(self) -> Any:
        """The operation of the variable in 16 bits; None in eager, as after an assignment."""
        return None if tf.executing_eagerly() else self._stored.op

    @property
    def graph(self) -> tf.Graph:
        """The graph of the variable in 16 bits."""
        return self._stored.graph

    @property
    def initializer(self) -> Any:
        """The initializer of the variable in 16 bits."""
        return self._stored.initializer

    @property
    def _trackable(self) -> tf.Variable:
        return self._stored

    def _export_to_saved_model_graph(self, object_map: Any, *args: Any, **kwargs: Any) -> Any:
        exported = self._stored._export_to_saved_model_graph(object_map, *args, **kwargs)
        object_map[self] = object_map[self._stored]
        return exported

    def _should_act_as_resource_variable(self) -> None:
        # That it is there is how TensorFlow knows a resource variable of a foreign class.
        return

    def __tf_tracing_type__(self, context: Any) -> tf.types.experimental.TraceType:
        del context
        return _ViewType(self)

    def __getattr__(self, name: str) -> Any:
        if name in ("_stored", "_described"):
            raise AttributeError(name)  # It is being copied or unpickled.
        if name.startswith("_") or not hasattr(self._described, name):
            return getattr(self._stored, name)
        return getattr(self._described, name)

    def __repr__(self) -> str:
        return f"<Float32View of {self._stored!r}>"


class _ViewType(tf.types.experimental.TraceType):
    """What `tf.function` knows of a view that is an argument: which one it is."""

    def __init__(self, view: Float32View) -> None:
        self._view = weakref.ref(view)
        self._hash = hash(id(view))

    def is_subtype_of(self, other: Any) -> bool:
        return self == other

    def most_specific_common_supertype(self, others: Any) -> Any:
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: Any) -> Float32View:
        del placeholder_context
        return self._view()

    def to_tensors(self, value: Any) -> list[tf.Tensor]:
        del value
        return []

    def cast(self, value: Any, cast_context: Any) -> Any:
        del cast_context
        return value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _ViewType) and self._view() is other._view() is not None
