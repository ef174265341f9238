"""Variables around another variable, converting values that are read or written.

This module needs TensorFlow only.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import tensorflow as tf

from keras_mp.support import features, trackables
from keras_mp.tensorflow_api import saving
from keras_mp.tensorflow_api.features import TENSORS

# A class cannot change its bases later, so the private name is looked up now.
_TENSOR_BASES: tuple[Any, ...] = (saving.Tensor.get(),) if features.is_on(TENSORS) else ()


class VariableWrapper(trackables.DelegatingTrackable, tf.Variable, *_TENSOR_BASES):
    """A variable of TensorFlow around another one.

    Subclasses say how it is read and assigned to. All other attributes are those of the wrapped
    variable, which is also the one that is saved and restored.
    """

    _variable: tf.Variable

    def _should_act_as_resource_variable(self) -> None:
        # TensorFlow recognizes a resource variable of a foreign class by the presence of this
        # method.
        return

    @property
    def _trackable(self) -> tf.Variable:
        return self._variable

    def _export_to_saved_model_graph(
        self, object_map: MutableMapping[object, object], *args: Any, **kwargs: Any
    ) -> list[tf.Tensor]:
        exported = self._variable._export_to_saved_model_graph(object_map, *args, **kwargs)
        object_map[self] = object_map[self._variable]
        return exported

    def __getattr__(self, name: str) -> Any:
        if name == "_variable":
            raise AttributeError(name)  # It is being copied or unpickled.
        return getattr(self._variable, name)


class AsWrapped:
    """An attribute of the wrapped variable: a property or a (special) method.

    Args:
        name: str. The attribute.
        documentation: str. Defaults to that of `tf.Variable`.
        holder: str. The attribute of the wrapper in which the variable is.
    """

    def __init__(
        self, name: str, documentation: str | None = None, holder: str = "_variable"
    ) -> None:
        self._name, self._holder = name, holder
        self.__doc__ = documentation or inspect.getdoc(getattr(tf.Variable, name, None))

    def __get__(self, instance: VariableWrapper | None, owner: type) -> Any:
        return self if instance is None else getattr(getattr(instance, self._holder), self._name)

    def __set__(self, instance: VariableWrapper, value: object) -> None:
        setattr(getattr(instance, self._holder), self._name, value)


for _name in (
    *("name", "_shared_name", "shape", "get_shape", "device", "graph", "op", "initializer"),
    *("trainable", "constraint", "synchronization", "aggregation", *trackables.OF_VALUES),
):
    setattr(VariableWrapper, _name, AsWrapped(_name))


class WrapperType(tf.types.experimental.TraceType):
    """The type of a wrapper as the argument of a `tf.function`, one per variable.

    So a function is traced for each variable, as for a Python object, and again for another dtype.
    With plain variables, one trace serves all variables of a shape, but only TensorFlow's own
    classes can have that.

    Args:
        variable: the variable. It is not kept alive.
        dtype: DType in which it appears.
        wrapper_of: takes the variable and returns the wrapper that the function gets.
    """

    def __init__(
        self, variable: tf.Variable, dtype: tf.DType, wrapper_of: Callable[[Any], VariableWrapper]
    ) -> None:
        self._variable, self._dtype, self._wrapper_of = weakref.ref(variable), dtype, wrapper_of
        self._hash = hash((id(variable), dtype))

    def is_subtype_of(self, other: tf.types.experimental.TraceType) -> bool:
        """Whether another type is that of the same variable in the same dtype."""
        return self == other

    def most_specific_common_supertype(
        self, others: Iterable[tf.types.experimental.TraceType]
    ) -> "WrapperType | None":
        """Returns this type if all others equal it."""
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: object) -> VariableWrapper:
        """Returns the argument that the function is traced with."""
        del placeholder_context
        return self._wrapper_of(self._variable())

    def cast(self, value: VariableWrapper, cast_context: object) -> VariableWrapper:
        """Returns the argument as it is."""
        del cast_context
        return value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, WrapperType)
            and self._dtype == other._dtype
            and self._variable() is other._variable() is not None
        )
