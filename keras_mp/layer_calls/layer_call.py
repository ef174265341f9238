"""The one hook on `Layer.__call__`, for layers with a 16-bit policy of keras_mp.

Keras asks a policy for dtypes only. Everything else that a policy says is done here: the layer is
in the reach of what keras_mp replaces; with an `output_dtype`, it is a float32 layer whose products
have gradients in 16 bits; and a model that no other layer calls returns float32 (`model_outputs`).
All other layers are called as if there were no hook.
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_mp import hooks, keras_api
from keras_mp.hooks import Method, Replacement, When, faces, reach
from keras_mp.hooks.once import once
from keras_mp.hooks.reach import Region
from keras_mp.kernels import functions
from keras_mp.layer_calls import added_losses, data_layers, initial_weights, model_outputs
from keras_mp.op_autocast import context_manager
from keras_mp.policy import Policy
from keras_mp.support import marks
from keras_mp.support.autograph import allow_conversion, do_not_convert
from keras_mp.variables import type_errors


@once
def install() -> None:
    """Makes layers of `tf.keras` heed the whole of their policy, once in a process."""
    place = Method.of(tf.keras.layers.Layer, "__call__")
    hooks.install([Replacement(place, _heeding_policies, When.ALWAYS)])
    added_losses.install()
    initial_weights.install()
    data_layers.install()
    hooks.install(functions.rows(keras_api.exact_functions()))


def _heeding_policies(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method that calls a layer."""

    # If it were given `original` itself, AutoGraph would convert the function below the
    # decorators, and change the decorators.
    def converted_call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def call(self: tf.keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        keras_call = original
        if keras_api.AUTOGRAPH_MAY_CONVERT and not tf.executing_eagerly():
            keras_call = allow_conversion(converted_call)
        policy, dtype = policy_of(self)
        try:
            outputs = _call_in(policy, dtype, keras_call, self, args, kwargs)
            if dtype is not None and reach.current() is None and tf.executing_eagerly():
                faces.leave(outputs, (args, kwargs))
            return outputs
        except type_errors.ERRORS as error:
            explained = _explained(error, self) if dtype is not None else None
            if explained is None:
                raise
            # Keras removes the cause of an error, and with it the user's lines.
            raise explained.with_traceback(error.__traceback__) from None

    return call


def policy_of(layer: Any) -> tuple[Any, tf.DType | None]:
    """Returns the policy of a layer, and its 16-bit dtype if it is one of keras_mp."""
    policy: Any = getattr(layer, "dtype_policy", None)
    return policy, policy.low_precision_dtype if isinstance(policy, Policy) else None


_NOTHING = contextlib.nullcontext()
# What stands in the place of methods of classes.
_own_calls: "weakref.WeakSet[Any]" = weakref.WeakSet()


def call_of_its_own(cls: type) -> None:
    """Lets models whose class defines `__call__` return float32.

    Args:
        cls: a class of models.
    """
    for each in itertools.takewhile(lambda each: each is not tf.keras.Model, cls.__mro__):
        own = vars(each).get("__call__")
        if own is not None and own not in _own_calls:
            each.__call__ = _returning_float32(own)
            _own_calls.add(each.__call__)


def _returning_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a model's method that calls it in the place of Keras's."""

    @functools.wraps(original)
    @do_not_convert
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        _, dtype = policy_of(self)
        own_call = allow_conversion(original)
        is_symbolic = any(map(keras_api.is_symbolic_input, tf.nest.flatten((args, kwargs))))
        if dtype is None or is_symbolic or keras_api.is_in_a_layer(self):
            return own_call(self, *args, **kwargs)
        reach.begins()
        return model_outputs.call(own_call, self, dtype, args, kwargs)

    return __call__


# AutoGraph converts `__call__` where a `tf.function` is made of the layer itself.
@do_not_convert
def _call_in(
    policy: Any,
    dtype: tf.DType | None,
    keras_call: Callable[..., Any],
    layer: tf.keras.layers.Layer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    region = reach.region()
    if dtype is not None and region is not None and not region.gradients_only:
        # The policy has chosen the dtypes of all that the layer computes.
        with reach.without_region():
            return _call_in(policy, dtype, keras_call, layer, args, kwargs)
    is_model = isinstance(layer, tf.keras.Model)
    if dtype is not None:
        reach.begins()
    elif layer.compute_dtype == "float32":
        args, kwargs = _with_exact_faces(layer, args, kwargs)
    is_at_rim = model_outputs.is_last(layer) or (
        is_model
        and not keras_api.is_in_a_layer(layer)
        and (dtype is not None or _has_outputs_of_ours(layer))
    )
    # A model that Keras 2 builds in its first call would get a layer for each cast.
    if is_at_rim and not any(map(keras_api.is_symbolic_input, tf.nest.flatten((args, kwargs)))):
        return model_outputs.call(keras_call, layer, dtype, args, kwargs)
    if dtype is not None and policy.is_of_float32:
        return data_layers.call(keras_call, layer, args, kwargs)
    # In a region, all layers are in reach.
    if dtype is None and (reach.current() is None or reach.region() is not None):
        outputs = keras_call(layer, *args, **kwargs)
    else:
        if dtype is None and layer.compute_dtype == "float32" and tf.executing_eagerly():
            args, kwargs = tf.nest.map_structure(_with_logits, (args, kwargs))
        with reach.entered(dtype), _gradients(policy, dtype):
            outputs = keras_call(layer, *args, **kwargs)
            outputs = model_outputs.with_float32(layer, data_layers.rounded(layer, dtype, outputs))
    if not is_model:
        model_outputs.note_call(outputs, layer, args, kwargs)
    return outputs


def _with_exact_faces(layer: tf.keras.layers.Layer, args: Any, kwargs: Any) -> Any:
    """Returns arguments with exact float32 faces in the place of 16-bit tensors.

    They are for a float32 layer, whose own cast would take what was rounded.
    """
    has_any = any(map(faces.is_low_tensor, tf.nest.flatten((args, kwargs))))
    if not has_any or not keras_api.casts_inputs(layer):
        return args, kwargs

    def exact(value: Any) -> Any:
        is_one = faces.is_low_tensor(value) and faces.is_exact(value)
        return data_layers.unrounded(value) if is_one else value

    return tf.nest.map_structure(exact, (args, kwargs))


def _with_logits(value: Any) -> Any:
    """Casts a tensor of which Keras knows the logits, which a layer's own cast loses."""
    return marks.cast_prediction(value, "float32") if hasattr(value, "_keras_logits") else value


def _has_outputs_of_ours(model: tf.keras.Model) -> bool:
    """Whether a layer with a policy of keras_mp makes an output of a model.

    Keras does not save the policy of a model, only those of its layers.
    """
    return any(
        isinstance(layer.dtype_policy, Policy)
        or (isinstance(layer, tf.keras.Model) and _has_outputs_of_ours(layer))
        for layer in keras_api.output_layers(model) or ()
    )


@contextlib.contextmanager
def entered(layer: Any) -> Iterator[None]:
    """Context manager for what a layer computes if Keras traces it without a call.

    Args:
        layer: the layer.
    """
    policy, dtype = policy_of(layer)
    if dtype is not None:
        reach.begins()
    with reach.entered(dtype), _gradients(policy, dtype):
        yield


def _explained(error: Exception, layer: tf.keras.layers.Layer) -> Exception | None:
    return type_errors.explain_refusal(
        error,
        f"Layer {layer.name!r} (of type {type(layer).__name__}) computes in "
        f"{layer.compute_dtype}. It",
        'make the layer in float32: with dtype="float32", or under '
        '`keras_mp.policy_scope("float32")`',
    )


def _gradients(policy: Any, dtype: tf.DType | None) -> contextlib.AbstractContextManager[Any]:
    if dtype is None or policy.output_dtype is None:
        return _NOTHING
    return context_manager.entered(Region(dtype, gradients_only=True))
