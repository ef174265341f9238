"""The base class for layers that need no casts (RFC 293, "Layers")."""

import collections
import contextlib
import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api, variables
from keras_mp.hooks import faces
from keras_mp.layer_calls import initial_weights
from keras_mp.op_autocast import promotion
from keras_mp.support import marks, messages, validation
from keras_mp.support.dtypes import FLOATING
from keras_mp.variables import scope, type_errors

scope.shared.dtype, scope.shared.enter = keras_api.autocast_dtype, keras_api.autocast_scope

_TENSORS = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices, tf.Variable)
# Containers that are always copied. Others are copied if something in them is cast.
_CONTAINERS = (list, tuple, dict, collections.OrderedDict, collections.defaultdict)

_PROMOTED = contextlib.nullcontext()
_warned_of: weakref.WeakSet[type] = weakref.WeakSet()


class Layer(keras_api.BaseLayer):
    """A `tf.keras.layers.Layer` whose author writes no casts.

    Before `call` runs, the floating-point tensors in all of its arguments are cast to the layer's
    compute dtype: positional and keyword arguments, also nested in lists, tuples and dicts, also
    ragged and sparse tensors and NumPy arrays. Integers, booleans and strings stay as they are.
    While `call` runs, weights made by `add_weight` appear in the compute dtype. Lists and dicts are
    copied, so that the caller's own never change. All this also holds if `call` is called directly,
    as `recompute_grad` does.

    An `InputSpec` with a dtype is checked before the cast. Regularizers see weights in the variable
    dtype. If you make a layer inside another one, give it the outer one's policy:
    `Dense(10, dtype=self.dtype_policy)`.

    A bare `tf.Variable` attribute does not cast itself; in a mixed layer, a `MixedPrecisionWarning`
    says so, once for each class. Where 16-bit and float32 tensors meet, TensorFlow's operations
    compute in float32. If they are refused all the same, or because of `strict_dtypes`, the error
    is raised again as a `TypeError` that names the layer, the line, both dtypes and the likely
    cure.

    Args:
        *args: for Keras 2, whose layers take `trainable`, `name` and `dtype` by position.
        strict_dtypes: bool. True raises an error where a 16-bit tensor meets a float32 one inside
            `call`. Defaults to False: the operation is computed in float32, which is slower.
        **kwargs: those of `tf.keras.layers.Layer`: `name`, `dtype` (a policy or its name),
            `trainable`, `autocast` (False casts no argument) and others.

    Attributes:
        keep_dtype: names of arguments of `call` that are passed on as they are, neither cast nor
            copied. A class sets it. By default there are none.
        reads_raw: bool. True makes it a layer for numbers as they come from the world: whatever its
            16-bit policy, it is a float32 layer, its arguments are not rounded first, and its
            result is rounded once. A class sets it. Defaults to False.
        dtype_policy: the layer's dtype policy.
        compute_dtype: str. The dtype of computations and outputs.
        variable_dtype: str. The dtype of weights.
        dtype: the same as `variable_dtype`.

    Raises:
        ValueError: when a class is defined, if `keep_dtype` has a name that `call` does not have.

    Example:

    >>> class AddRandom(keras_mp.layers.Layer):
    ...     def build(self, input_shape):
    ...         self.gain = self.add_weight(shape=[input_shape[-1]], initializer="ones")
    ...     def call(self, x, positions=None):
    ...         return x * self.gain + tf.random.normal(tf.shape(x), dtype=self.compute_dtype)
    >>> layer = AddRandom(dtype="mixed_bfloat16")
    >>> layer(tf.ones([2, 3])).dtype
    tf.bfloat16

    Source: RFC 293, "Layers", "Layer variables" and the appendix on casting all inputs.
    """

    keep_dtype: Collection[str] = ()
    reads_raw: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _adopt_call(cls)

    def __init__(self, *args: Any, strict_dtypes: bool = False, **kwargs: Any) -> None:
        vars(self)["_strict_dtypes"] = validation.boolean("strict_dtypes", strict_dtypes)
        # By now, the class may have another `call`.
        _adopt_call(type(self))
        super().__init__(*args, **kwargs)

    def add_weight(
        self,
        *args: Any,
        autocast: bool | None = None,
        experimental_autocast: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Makes a weight that appears in the compute dtype inside `call`.

        Args:
            *args: by position either `name, shape, dtype, initializer, regularizer, trainable,
                constraint`, where a string comes first, or `shape, initializer, dtype`.
            autocast: bool. Whether the weight casts itself if the layer is mixed. Defaults to True;
                False is for weights that the layer needs in float32, such as statistics.
            experimental_autocast: bool. TensorFlow 2's name of `autocast`.
            **kwargs: those of `tf.keras.layers.Layer.add_weight`. `dtype` defaults to
                `variable_dtype`.

        Returns:
            On Keras 2, an `AutoCastVariable` or a `tf.Variable`. On Keras 3, a `keras.Variable`
            that reads and writes as an `AutoCastVariable`, since Keras trains and saves nothing
            else.

        Raises:
            TypeError: an argument is given twice, or `autocast` and `experimental_autocast` differ.

        Source: RFC 293, "Layer variables".
        """
        order = initial_weights.positional_arguments(args)
        positional = dict(zip(order, args))
        if len(args) > len(order) or positional.keys() & kwargs.keys():
            raise TypeError(
                f"add_weight takes {', '.join(order)} by position, each of them once. "
                f"Received: {args} and {kwargs}"
            )
        casts = {cast for cast in (autocast, experimental_autocast) if cast is not None}
        if len(casts) > 1:
            raise TypeError(
                "`experimental_autocast` is the older name of `autocast`; pass one of them. "
                f"Received: {autocast=}, {experimental_autocast=}"
            )
        return super().add_weight(autocast=casts.pop() if casts else True, **positional, **kwargs)

    @property
    def losses(self) -> list[tf.Tensor]:
        """The losses of `add_loss` and of regularizers.

        Regularizers see weights in the variable dtype.
        """
        with variables.autocast_scope(None):
            return super().losses

    @contextlib.contextmanager
    def weights_cast_once(self) -> Iterator[None]:
        """Context manager in which each weight of the layer is cast once, even in loops.

        This includes the weights of sublayers that are `keras_mp.layers.Layer`s. Use it in a `call`
        that reads its weights in a `tf.while_loop`, or many times in eager code. As with
        `keras_mp.cast_once`, no weight may be assigned to inside.

        Example:

        >>> class Repeat(keras_mp.layers.Layer):
        ...     def build(self, _):
        ...         self.kernel = self.add_weight(shape=[2, 2])
        ...     def call(self, x):
        ...         with self.weights_cast_once():
        ...             return tf.while_loop(lambda x: True, lambda x: (x @ self.kernel,), (x,),
        ...                                  maximum_iterations=9)[0]
        >>> Repeat(dtype="mixed_float16")(tf.ones([1, 2])).dtype
        tf.float16
        """
        with variables.cast_once(keras_api.autocast_variables(self.weights)):
            yield

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, and warns of a variable that does not cast itself."""
        # Keras 2 replaces `call` while it saves, and then puts the original back.
        is_own = getattr(value, "__self__", None) is self and hasattr(value, "_runs_in_the_policy")
        if name == "call" and not (is_own or keras_api.is_call_for_saving(value)):
            value = types.MethodType(_run_in_the_policy(_unbound(value)), self)
        is_bare = any(self._is_bare(v) for v in _variables_in(value))
        super().__setattr__(name, value)
        if not is_bare:
            return
        object.__setattr__(self, "_bare", (*vars(self).get("_bare", ()), name))
        if type(self) not in _warned_of:
            _warned_of.add(type(self))
            messages.warn(
                f"{type(self).__name__} computes in {self.compute_dtype}, but its attribute "
                f"`{name}` is a bare tf.Variable, which does not cast itself. Make it with "
                f"`self.add_weight`, or wrap it: `self.{name} = keras_mp.autocast_variable(...)`, "
                f"or cast it where it is used: `tf.cast(self.{name}, self.compute_dtype)`."
            )

    def _is_bare(self, variable: tf.Variable) -> bool:
        """Whether a new attribute does not cast itself, though it should."""
        if not hasattr(self, "dtype_policy") or not self._is_mixed():
            return False
        is_cast = hasattr(variable, "true_dtype") or variable.dtype == self.compute_dtype
        if is_cast or variable.dtype not in FLOATING:
            return False
        return not any(variable is weight for weight in self.weights)

    def _is_mixed(self) -> bool:
        return self.compute_dtype != self.variable_dtype

    def _scope(self) -> contextlib.AbstractContextManager[None]:
        # In a layer that is not mixed, weights of another dtype are meant to have that dtype.
        if self._is_mixed() or variables.autocast_dtype() is not None:
            return variables.autocast_scope(_float_dtype(self.compute_dtype))
        return contextlib.nullcontext()

    def _cast_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], signature: inspect.Signature
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = _float_dtype(self.compute_dtype)
        if dtype is None or not self.autocast:
            return args, kwargs
        if not self.keep_dtype:
            return _cast(args, dtype), _cast(kwargs, dtype)
        if _takes(signature, inspect.Parameter.VAR_POSITIONAL):
            # They are passed on to a `call` that has names for them, and casts them.
            return args, kwargs
        call = signature.bind(self, *args, **kwargs)
        for name, value in list(call.arguments.items())[1:]:
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                unchanged = {key: each for key, each in value.items() if key in self.keep_dtype}
                call.arguments[name] = {**_cast(value, dtype), **unchanged}
            elif name not in self.keep_dtype:
                call.arguments[name] = _cast(value, dtype)
        return call.args[1:], call.kwargs


def _adopt_call(cls: type[Layer]) -> None:
    """Makes the `call` of a class run in the policy, and checks `keep_dtype`."""
    if not hasattr(cls.call, "_runs_in_the_policy"):
        cls.call = _run_in_the_policy(cls.call)
    signature = inspect.signature(cls.call)
    names = [
        name
        for name, parameter in list(signature.parameters.items())[1:]
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    is_list = isinstance(cls.keep_dtype, Collection) and not isinstance(cls.keep_dtype, str)
    takes_others = _takes(signature, inspect.Parameter.VAR_KEYWORD)
    if not is_list or not (takes_others or set(cls.keep_dtype) <= set(names)):
        raise ValueError(
            f"`keep_dtype` lists names of arguments of `call`. Expected some of {names}. "
            f"Received: {cls.__name__}.keep_dtype={cls.keep_dtype!r}"
        )


def _takes(signature: inspect.Signature, kind: object) -> bool:
    return any(parameter.kind is kind for parameter in signature.parameters.values())


def _unbound(call: Callable[..., object]) -> Callable[..., object]:
    """Gives a function that needs no `self` such a first parameter."""

    @functools.wraps(call)
    def unbound(self: Layer, *args: Any, **kwargs: Any) -> object:
        return call(*args, **kwargs)

    signature = inspect.signature(call)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [this, *signature.parameters.values()]
    if len(parameters) > 1 and parameters[1].kind is not inspect.Parameter.POSITIONAL_ONLY:
        parameters[0] = this.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    unbound.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return unbound


def _run_in_the_policy(call: Callable[..., object]) -> Callable[..., object]:
    """Makes `call` get arguments, and read weights, in the compute dtype."""
    signature = inspect.signature(call)

    @functools.wraps(call)
    def run(self: Layer, *args: Any, **kwargs: Any) -> object:
        with self._scope(), promotion.refused() if self._strict_dtypes else _PROMOTED:
            args, kwargs = self._cast_arguments(args, kwargs, signature)
            try:
                return call(self, *args, **kwargs)
            except type_errors.ERRORS as error:
                described = f"Layer {self.name!r} (of type {type(self).__name__})"
                bare = vars(self).get("_bare", ())
                explained = type_errors.explain(error, described, self.compute_dtype, bare)
                if explained is None:
                    raise
                raise explained from error

    # Keras 2 looks up the arguments in a way that does not see through wrappers.
    run.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    run._runs_in_the_policy = True  # pyright: ignore[reportAttributeAccessIssue]
    return run


@functools.cache
def _float_dtype(compute_dtype: str | None) -> tf.DType | None:
    """Returns the dtype to cast to, or None.

    It is None if a layer does not compute in floating point.
    """
    dtype = None if compute_dtype is None else tf.as_dtype(compute_dtype)
    return dtype if dtype in FLOATING else None


def _cast(value: Any, dtype: tf.DType) -> Any:
    """Casts the tensors in an argument, and copies its containers."""
    if isinstance(value, _TENSORS):
        return _cast_input(value, dtype)
    if keras_api.is_weight(value):
        return marks.cast(tf.convert_to_tensor(value), dtype)
    if isinstance(value, np.ndarray | np.generic) and value.dtype in (np.float16, "f4", "f8"):
        return _cast_input(tf.convert_to_tensor(np.asarray(value)), dtype)
    if isinstance(value, dict):
        before = list(value.values())
    elif isinstance(value, list | tuple):
        before = list(value)
    elif tf.nest.is_nested(value) and not isinstance(value, range):
        before = tf.nest.flatten(value)
    else:
        return value
    after = [_cast(each, dtype) for each in before]
    is_as_before = all(old is new for old, new in zip(before, after))
    if is_as_before and type(value) not in _CONTAINERS and not hasattr(value, "_fields"):
        return value
    try:
        return _copy_with(value, after)
    except Exception as error:
        raise TypeError(
            f"An argument of type {type(value)} has to be copied, so that a tensor in it can be "
            "cast, but cannot be copied. Name the argument in the `keep_dtype` of the layer's "
            f"class. Received: {value}"
        ) from error


def _cast_input(value: Any, dtype: tf.DType) -> Any:
    """Casts an input, whose float32 face is exact."""
    return faces.cast_input(value, marks.cast(value, dtype))


def _copy_with(container: Any, values: list[Any]) -> Any:
    """Returns a container of the same type with other values."""
    if hasattr(container, "_fields"):
        return container._make(values)
    if isinstance(container, tuple):
        return type(container)(values)
    if not isinstance(container, dict | list):
        return tf.nest.pack_sequence_as(container, values)
    result = copy.copy(container)
    if result is container:
        result = dict(container) if isinstance(container, dict) else list(container)
    keys = list(container) if isinstance(container, dict) else range(len(values))
    for key, each in zip(keys, values):
        result[key] = each
    return result


def _variables_in(value: object) -> Iterator[tf.Variable]:
    """Yields an attribute's variables: itself, or the elements of its containers."""
    if isinstance(value, tf.Variable):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _variables_in(each)
