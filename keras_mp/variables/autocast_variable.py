"""Variables that cast themselves (RFC 293, "AutoCastVariable API").

The module `casts` decides how often a read is cast. This module needs TensorFlow only.
"""

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import tensorflow as tf

from keras_mp.hooks import reach
from keras_mp.variables import casts
from keras_mp.variables.scope import autocast_dtype
from keras_mp.variables.wrapper import AsWrapped, VariableWrapper, WrapperType


def autocast_variable(variable: tf.Variable) -> "AutoCastVariable":
    """Wraps a variable so that it casts itself in an `autocast_scope`.

    Args:
        variable: tf.Variable of a floating-point dtype. One that casts itself already is returned
            as it is.

    Returns:
        An `AutoCastVariable`.

    Raises:
        TypeError: it is not a `tf.Variable`, or one of TensorFlow 1's reference variables.
        ValueError: its dtype is not floating.

    Example:

    >>> class Dense(tf.Module):
    ...     def __init__(self, inputs, outputs):
    ...         kernel = tf.Variable(tf.random.normal([inputs, outputs]))
    ...         self.kernel = keras_mp.autocast_variable(kernel)
    ...     def __call__(self, x):
    ...         return x @ self.kernel
    >>> dense = Dense(3, 2)
    >>> with keras_mp.autocast_scope("bfloat16"):
    ...     dense(tf.ones([1, 3], "bfloat16")).dtype
    tf.bfloat16
    >>> dense.kernel.dtype
    tf.float32

    Source: RFC 293, "AutoCastVariable API".
    """
    return variable if isinstance(variable, AutoCastVariable) else AutoCastVariable(variable)


@contextlib.contextmanager
def cast_once(variables: Iterable["AutoCastVariable"]) -> Iterator[None]:
    """Casts variables now, for all reads until the end of the context.

    In a graph, the second read of a variable reuses the cast of the first one anyway. This does not
    reach into the body of a loop, which runs many times and might write to the variable, and there
    is no reuse in eager, where writes cannot be seen. With this context you promise that nothing is
    written, so that a recurrent cell in `tf.while_loop` casts its kernel once instead of once per
    time step. Gradients are still summed in the true dtype. A `tf.function` that is traced inside
    makes its own casts, since it may be called again outside.

    Args:
        variables: variables that cast themselves; others are ignored. They are cast to the dtype in
            force; where none is, nothing happens.

    Raises:
        RuntimeError: one of the variables is assigned to, inside of the context.

    Example:

    >>> v = keras_mp.autocast_variable(tf.Variable(1.5))
    >>> with keras_mp.autocast_scope("float16"), keras_mp.cast_once([v]):
    ...     tf.while_loop(lambda i, x: i < 9, lambda i, x: (i + 1, x * v), (0, v.value()))[1].dtype
    tf.float16
    """
    held = {
        id(variable._variable): tf.cast(variable._variable, variable.dtype)
        for variable in variables
        if isinstance(variable, AutoCastVariable) and variable.dtype != variable.true_dtype
    }
    with casts.hold(held):
        yield


class AutoCastVariable(VariableWrapper):
    """A variable that appears in another dtype inside of a scope.

    It wraps a `tf.Variable`. Outside of an `autocast_scope` it behaves as that variable does, in
    every respect. Inside, everything that reads it (`value`, `read_value`, `sparse_read`,
    `gather_nd`, conversion to a tensor, hence operators, slicing and every operation) gives a
    tensor of the scope's dtype. Assignments are made in the true dtype, and take values of either
    dtype. Gradients have the true dtype. `numpy()` and `repr` show the true value.

    The wrapper of a variable of `tf.distribute` is also an instance of that variable's class.

    Args:
        variable: tf.Variable of a floating-point dtype.

    Raises:
        TypeError: it is not a `tf.Variable`, or one of TensorFlow 1's reference variables.
        ValueError: its dtype is not floating.

    Example:

    >>> v = keras_mp.AutoCastVariable(tf.Variable(0.5, name="v"))
    >>> with keras_mp.autocast_scope("float16"):
    ...     print(v.dtype.name, v.true_dtype.name, tf.identity(v).dtype.name)
    float16 float32 float16
    >>> v
    <AutoCastVariable cast_to=None of <tf.Variable 'v:0' shape=() dtype=float32, numpy=0.5>>

    Source: RFC 293, "AutoCastVariable API".
    """

    def __new__(cls, variable: tf.Variable) -> "AutoCastVariable":
        """Makes an instance of the class that fits the class of the wrapped variable."""
        _check(variable)
        return super().__new__(_class_for(type(variable)))

    def __init__(self, variable: tf.Variable) -> None:
        object.__setattr__(self, "_variable", variable)

    @property
    def dtype(self) -> tf.DType:
        """The dtype in which the variable appears: the scope's, or else the true one."""
        return autocast_dtype() or self.true_dtype

    @property
    def true_dtype(self) -> tf.DType:
        """The dtype in which the value is kept."""
        return self._variable.dtype

    def value(self) -> tf.Tensor:
        """Returns the value, in the dtype in which the variable appears."""
        return casts.read(self._variable, self.dtype)

    def read_value(self) -> tf.Tensor:
        """Returns a copy of the value, in the dtype in which the variable appears."""
        return self._cast(self._variable.read_value())

    def read_value_no_copy(self) -> tf.Tensor:
        """Returns the value in the dtype in which the variable appears, without a copy."""
        return self._cast(self._variable.read_value_no_copy())

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Returns some rows, which alone are cast."""
        return self._cast(self._variable.sparse_read(indices, name=name))

    def gather_nd(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Returns some elements or slices, which alone are cast."""
        return self._cast(self._variable.gather_nd(indices, name=name))

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        """Converts to a tensor of the dtype in which the variable appears."""
        del name
        appears_as = self.dtype
        if dtype == self._variable.dtype and not reach.thread.is_strict:
            appears_as = self._variable.dtype
        if dtype is not None and not dtype.is_compatible_with(appears_as):
            raise ValueError(
                f"Cannot convert a variable that appears as {appears_as.name} to a tensor of "
                f"{dtype.name}; `tf.cast` does. Received: {self!r}"
            )
        return casts.read(self._variable, appears_as)

    def _cast(self, value: tf.Tensor) -> tf.Tensor:
        return casts.cast(value, self.dtype)

    def _update(self, method: str, *args: Any, **kwargs: Any) -> Any:
        casts.refuse_if_held(self._variable)
        args = tuple(self._in_true_dtype(arg) for arg in args)
        kwargs = {key: self._in_true_dtype(arg) for key, arg in kwargs.items()}
        result = getattr(self._variable, method)(*args, **kwargs)
        reads = kwargs.get("read_value", args[3] if len(args) > 3 else True)
        if result is self._variable or (reads and self._is_updated_on_replicas()):
            return self
        return AutoCastVariable(result) if isinstance(result, tf.Variable) else result

    def _is_updated_on_replicas(self) -> bool:
        """Whether an update returns a value (on one replica or each), not the variable."""
        is_tensorflow_2 = tf.compat.v1.executing_eagerly_outside_functions()
        return _is_distributed(type(self._variable)) and is_tensorflow_2

    def _as_graph_element(self) -> tf.Tensor | tf.Operation:
        """Returns what `tf.control_dependencies` waits for when it is given the variable.

        An update of all replicas returns the variable. In a function, reading it comes after the
        update.
        """
        if self._is_updated_on_replicas() and tf.distribute.in_cross_replica_context():
            return tf.convert_to_tensor(self._variable)
        return self._variable._as_graph_element()

    def _in_true_dtype(self, value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            values = self._in_true_dtype(value.values)
            return tf.IndexedSlices(values, value.indices, value.dense_shape)
        if self.dtype == self.true_dtype or not tf.is_tensor(value) or value.dtype != self.dtype:
            return value
        # The value of another AutoCastVariable is not rounded on the way.
        value = value._variable if isinstance(value, AutoCastVariable) else value
        return tf.cast(value, self.true_dtype)

    def _copy_trackable_to_cpu(self, object_map: MutableMapping[object, Any]) -> None:
        self._variable._copy_trackable_to_cpu(object_map)
        if self not in object_map:
            object_map[self] = AutoCastVariable(object_map[self._variable])

    def __tf_tracing_type__(self, context: object) -> WrapperType:
        del context
        return WrapperType(self._variable, self.dtype, AutoCastVariable)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._variable, name, value)

    def __copy__(self) -> "AutoCastVariable":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "AutoCastVariable":
        return AutoCastVariable(copy.deepcopy(self._variable, memo))

    def __reduce__(self) -> tuple[Callable[[tf.Variable], "AutoCastVariable"], tuple[tf.Variable]]:
        return autocast_variable, (self._variable,)

    # Defined here, they come before those of `tf.distribute`, which would not cast.
    __eq__ = tf.Variable.__eq__
    __ne__ = tf.Variable.__ne__
    __hash__ = tf.Variable.__hash__

    def __repr__(self) -> str:
        dtype = autocast_dtype()
        cast_to = None if dtype is None else dtype.name
        return f"<AutoCastVariable cast_to={cast_to} of {self._variable!r}>"


def _updates(name: str) -> Callable[..., object]:
    """Returns a method that writes, in the true dtype, by the wrapped variable's own."""

    def update(self: AutoCastVariable, *args: Any, **kwargs: Any) -> object:
        return self._update(name, *args, **kwargs)

    own = getattr(tf.Variable, name, None)
    if own is not None:
        return functools.wraps(own)(update)
    update.__name__ = name
    update.__doc__ = f"Calls `{name}` of the variable, in its true dtype."
    return update


for _name in (
    *("assign", "assign_add", "assign_sub", "batch_scatter_update", "load"),
    *("scatter_add", "scatter_div", "scatter_max", "scatter_min", "scatter_mul", "scatter_sub"),
    *("scatter_update", "scatter_nd_add", "scatter_nd_max", "scatter_nd_min", "scatter_nd_sub"),
    *("scatter_nd_update", "_strided_slice_assign"),  # The last one is `variable[1:].assign`.
):
    setattr(AutoCastVariable, _name, _updates(_name))


# Methods of `tf.Variable` that call `value()`, and so cast: operators, slicing, iteration.
_THROUGH_VALUE = frozenset(
    name for name in vars(tf.Variable) if name.startswith("__") and name not in vars(object)
) - {"__module__", "__dict__", "__weakref__", "__abstractmethods__"}

# Attributes that belong to the wrapper, and one that would make it a composite tensor.
_OWN = frozenset(("ref", "experimental_ref", "_type_spec"))


@functools.cache
def _class_for(wrapped_class: type) -> type[AutoCastVariable]:
    """Makes the class of the wrapper for variables of a class."""
    namespace: dict[str, Any] = {"__module__": __name__, "__doc__": AutoCastVariable.__doc__}
    explicit = dir(object) + [name for base in AutoCastVariable.__mro__[:2] for name in vars(base)]
    for name in dir(wrapped_class):
        attribute = inspect.getattr_static(wrapped_class, name)
        if name in _THROUGH_VALUE:
            namespace[name] = getattr(tf.Variable, name)
        elif name in _OWN or name in explicit:
            continue
        elif inspect.isfunction(attribute) or inspect.isdatadescriptor(attribute):
            namespace[name] = AsWrapped(name, inspect.getdoc(attribute))
    bases = (AutoCastVariable, *([wrapped_class] if _is_distributed(wrapped_class) else []))
    name = "AutoCast" + wrapped_class.__name__.lstrip("_")
    return types.new_class(name, bases, {}, lambda body: body.update(namespace))


def _is_distributed(variable_class: type) -> bool:
    """Whether a class is one of `tf.distribute`.

    That library asks for its own classes by `isinstance`.
    """
    return "distribute" in variable_class.__module__.split(".")


def _check(variable: object) -> None:
    # TensorFlow 1's reference variables, which are no resources, have no handle.
    if not isinstance(variable, tf.Variable) or not hasattr(type(variable), "handle"):
        raise TypeError(
            "Only a `tf.Variable` can be made to cast itself (weights of Keras layers do so by "
            f"themselves). Received: {variable!r} (of type {type(variable)})"
        )
    if not variable.dtype.is_floating:
        raise ValueError(
            "Only a variable of a floating-point dtype can be cast. "
            f"Received: {variable!r} with dtype={variable.dtype.name!r}"
        )
