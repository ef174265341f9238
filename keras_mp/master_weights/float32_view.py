"""A float32 variable that is kept in 16 bits.

Optimizers of Keras 3 and the new ones of Keras 2 read a variable and assign to it, which a view
does without ever having a variable in float32. The legacy optimizers of Keras 2 update a variable
with one operation of TensorFlow's, which takes the variable's handle. So a view borrows a variable
in float32 for as long as its update takes.
"""

import collections
import contextlib
import functools
import itertools
import operator
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.master_weights import methods
from keras_mp.master_weights.methods import Method
from keras_mp.support import host
from keras_mp.variables.wrapper import AsWrapped, VariableWrapper, WrapperType


class Scratch:
    """Float32 variables for one weight and its slots at a time.

    They are given back when a handle for another weight is asked for, or the step is over. Outside
    of XLA their memory is freed then. XLA keeps one for each shape, since compiled code neither
    frees variables nor changes their shapes.
    """

    def __init__(self) -> None:
        self._name = f"keras_mp_scratch_{uuid.uuid4().hex}"
        self._handles: dict[tuple[Any, ...], tf.Tensor] = {}
        # The views that have borrowed a variable, by device.
        self._borrowers: dict[str, list[Any]] = collections.defaultdict(list)

    def lend(self, view: Any) -> tf.Tensor:
        """Lends a variable with the value of a view, which has its handle as `borrowed`.

        Args:
            view: the view of a weight or of a slot, whose `take_back` gets the value later.
        """
        borrowers, value = self._borrowers[view.device], view.value()
        view.borrowed = self._handle(view.device, value.shape, len(borrowers))
        borrowers.append(view)
        tf.raw_ops.AssignVariableOp(resource=view.borrowed, value=value)
        return view.borrowed

    def give_back(self) -> None:
        """Gives the values of all borrowed variables back to the borrowers."""
        keeps = host.is_compiled_by_xla()
        for device, borrowers in self._borrowers.items():
            while borrowers:
                view = borrowers.pop()
                handle, view.borrowed = view.borrowed, None
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
                with tf.device(device):
                    view.take_back(value)
                if not keeps:
                    tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

    def forget(self) -> None:
        """Forgets the borrowed variables, as after an error."""
        for view in itertools.chain(*self._borrowers.values()):
            view.borrowed = None
        self._borrowers.clear()

    def _handle(self, device: str, shape: tf.TensorShape, number: int) -> tf.Tensor:
        key = (device, tuple(shape), number)
        if key not in self._handles:
            needs_value = host.is_compiled_by_xla()  # also of variables that are written first
            with tf.init_scope(), tf.device(device):
                handle = tf.raw_ops.VarHandleOp(
                    dtype=tf.float32,
                    shape=shape,
                    container="",
                    shared_name=f"{self._name}_{len(self._handles)}",
                )
                if needs_value:
                    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros(shape))
            weakref.finalize(self, _destroy, handle)
            self._handles[key] = handle
        return self._handles[key]


def _destroy(handle: tf.Tensor) -> None:
    with tf.init_scope():
        if tf.executing_eagerly():  # and not while a graph of TensorFlow 1 is made
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


class Updates:
    """State that all views of an optimizer share.

    It has the order of updates, borrowed variables and noise.

    Attributes:
        seed: int64 variable, or None where nothing is rounded stochastically.

    Args:
        steps: returns the number of steps that were made, an int64 scalar tensor.
    """

    def __init__(self, steps: Callable[[], tf.Tensor | None]) -> None:
        self.scratch = Scratch()
        self.seed: Any = None
        self._steps = steps
        # The view that was written last, and the operations that wrote it, by graph and device.
        self._last: dict[tuple[tf.Graph, str], tuple[Float32View, list[tf.Operation]]] = {}
        # How often a view has drawn noise in this step, by its id.
        self._draws: collections.Counter[int] = collections.Counter()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Gives borrowed variables back at the end of the block.

        Views are written inside of the block.
        """
        self._draws.clear()
        try:
            yield
            self.scratch.give_back()
        finally:
            self.scratch.forget()
            self._last.clear()

    def noise(self, view: "Float32View") -> tf.Tensor:
        """Returns random bits for a view: the same on all replicas, others in each step.

        Args:
            view: the view.

        Returns:
            uint32 tensor.
        """
        self._draws[id(view)] += 1
        stream = tf.constant([view.number, self._draws[id(view)]], tf.int64)
        step = tf.stack([tf.convert_to_tensor(self.seed), self._steps()])
        # Philox mixes both of its seeds well, so neighbours will do.
        seed = step * tf.constant([1 << 32, 1 << 24], tf.int64) + stream
        return methods.noise(view.shape, seed)

    def after_others(self, view: "Float32View") -> contextlib.AbstractContextManager[object]:
        """Returns a context manager in which a view is read after others were written.

        It keeps a graph from holding all weights in float32 at once.
        """
        if tf.executing_eagerly():
            return tf.control_dependencies([])
        key = (tf.compat.v1.get_default_graph(), view.device)
        written, operations = self._last.get(key, (None, []))
        return tf.control_dependencies([] if written is view else operations)

    def wrote(self, view: "Float32View", operations: Sequence[tf.Operation]) -> None:
        """Notes that a view was written."""
        if not tf.executing_eagerly():
            key = (tf.compat.v1.get_default_graph(), view.device)
            self._last[key] = view, list(operations)


class Float32View(VariableWrapper):
    """A variable in 16 bits, and those kept beside it, as one float32 variable.

    An optimizer knows the view by the key of the variable in 16 bits.

    Args:
        stored: variable in 16 bits; not a distributed one.
        beside: the variables that `method` keeps beside it.
        method: how float32 values are kept in them.
        updates: the state that the views of the optimizer share.
        number: int. Tells the view from others of the optimizer.
        described: the variable of Keras 3 that has other attributes, a path for one. Defaults to
            `stored`.
        is_weight: bool. Whether it is a weight of a model, and not a slot.

    Attributes:
        borrowed: the handle of the float32 variable that it has borrowed, or None.
    """

    def __init__(
        self,
        stored: tf.Variable,
        beside: Sequence[tf.Variable],
        method: Method,
        updates: Updates,
        number: int,
        *,
        described: tf.Variable | None = None,
        is_weight: bool = True,
    ) -> None:
        self._variable, self._beside = stored, tuple(beside)
        self._method, self._updates, self.number = method, updates, number
        self._described = stored if described is None else described
        self._is_weight = is_weight
        self.borrowed: tf.Tensor | None = None

    @property
    def dtype(self) -> tf.DType:
        """float32."""
        return tf.float32

    # Optimizers of Keras 2 ask for this one first, which variables of a normalization have.
    true_dtype = dtype

    @property
    def stored(self) -> tf.Variable:
        """The variable in 16 bits."""
        return self._variable

    def value(self) -> tf.Tensor:
        """Returns the value."""
        if self.borrowed is not None:
            value = tf.raw_ops.ReadVariableOp(resource=self.borrowed, dtype=tf.float32)
            return tf.ensure_shape(value, self.shape)
        with self._updates.after_others(self):
            return self._method.join(
                *(each.read_value() for each in (self._variable, *self._beside))
            )

    read_value = read_value_no_copy = value

    def numpy(self) -> np.ndarray:
        """Returns the value as an array; in eager only."""
        return self.value().numpy()

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        """Converts to a float32 tensor."""
        return tf.convert_to_tensor(self.value(), dtype=dtype, name=name)

    @property
    def handle(self) -> tf.Tensor:
        """The handle of a float32 variable that is borrowed for the update of one weight."""
        if self.borrowed is not None:
            return self.borrowed
        if self._is_weight:
            self._updates.scratch.give_back()  # those that the weight before has borrowed
        return self._updates.scratch.lend(self)

    def take_back(self, value: tf.Tensor) -> None:
        """Stores the value of the borrowed variable."""
        self._store(tf.ensure_shape(value, self.shape))

    def assign(
        self,
        value: tf.Tensor,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> "Float32View | tf.Tensor | tf.Operation":
        """Stores a value."""
        del use_locking, name
        value = tf.convert_to_tensor(value, tf.float32)
        value.shape.assert_is_compatible_with(self.shape)
        return self._updated(tf.ensure_shape(value, self.shape), read_value)

    def _updated(
        self, value: tf.Tensor, read_value: bool
    ) -> "Float32View | tf.Tensor | tf.Operation":
        """Stores a value, and returns the result of an assignment to a variable."""
        operations = self._store(value)
        if tf.executing_eagerly():
            return self
        with tf.control_dependencies(operations):
            return tf.identity(value) if read_value else tf.group(*operations)

    def _store(self, value: tf.Tensor) -> list[tf.Operation]:
        if self.borrowed is not None:
            operation = tf.raw_ops.AssignVariableOp(resource=self.borrowed, value=value)
            return [] if operation is None else [operation]

        def noise() -> tf.Tensor:
            with tf.control_dependencies([value]):  # not of all variables at once
                return self._updates.noise(self)

        values = self._method.split(value, noise)
        targets = (self._variable, *self._beside)
        # All of the values before any of the assignments: they are computed from reads.
        with tf.control_dependencies(values):
            assigned = [
                target.assign(each, read_value=False)
                for target, each in zip(targets, values, strict=True)
            ]
        operations = [] if tf.executing_eagerly() else assigned
        self._updates.wrote(self, operations)
        return operations

    name = AsWrapped("name", holder="_described")  # pyright: ignore[reportAssignmentType]
    trainable = AsWrapped("trainable", holder="_described")
    constraint = AsWrapped("constraint", holder="_described")

    @property
    def op(self) -> tf.Operation | None:
        """The operation of the variable in 16 bits; None in eager, as after an assignment."""
        return None if tf.executing_eagerly() else self._variable.op

    def __tf_tracing_type__(self, context: object) -> WrapperType:
        del context
        return WrapperType(self, self.dtype, lambda view: view)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self._described, name):
            return getattr(self._described, name)
        return super().__getattr__(name)

    def __repr__(self) -> str:
        return f"<Float32View of {self._variable!r}>"


def _updates(name: str, update: Callable[..., tf.Tensor]) -> Callable[..., object]:
    """Returns a method that stores what a function makes of value and argument."""

    @functools.wraps(getattr(tf.Variable, name))
    def method(
        self: Float32View,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> object:
        del use_locking, name
        args = (delta,)
        if is_of_rows:
            args = tf.expand_dims(delta.indices, -1), delta.values
        # The value is read no sooner than it is needed: it takes memory. `tf.is_tensor` is true for
        # variables too. SGD of Keras 2 adds its momentum, on replicas a distributed variable, on
        # which operations of a branch cannot depend.
        with tf.control_dependencies([args[-1]] if isinstance(args[-1], tf.Tensor) else []):
            value = self.value()
        return self._updated(update(value, *args), read_value)

    is_of_rows = name.startswith("scatter")
    return method


for _name, _update in {
    "assign_add": operator.add,
    "assign_sub": operator.sub,
    "scatter_add": tf.tensor_scatter_nd_add,
    "scatter_sub": tf.tensor_scatter_nd_sub,
    "scatter_update": tf.tensor_scatter_nd_update,
    "scatter_max": tf.tensor_scatter_nd_max,
    "scatter_min": tf.tensor_scatter_nd_min,
}.items():
    setattr(Float32View, _name, _updates(_name, _update))
