"""Preprocessing layers, and those that say `reads_raw`, are float32 layers.

So are metrics, where these are layers. Their job is with numbers as they come, in calls, `adapt`
and `build`, with variables in float32. What such a layer returns is rounded once, to the compute
dtype of the policy that it was given, and has a float32 face that is exact. So the next layer reads
it unrounded.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_mp import hooks, keras_api, kernels
from keras_mp.hooks import Method, Replacement, When, faces, reach
from keras_mp.policy import Policy
from keras_mp.support import marks

_KERASES = ("keras.", "tf_keras.")


@functools.cache
def reads_raw(cls: type) -> bool:
    """Whether layers of a class are float32 layers, whatever their policy is.

    Args:
        cls: class of layers.
    """
    declared = getattr(cls, "reads_raw", None)
    if declared is not None:
        return bool(declared)
    if issubclass(cls, tf.keras.metrics.Metric):
        return True  # On Keras 2, a metric is a layer of the global policy.
    names = [base.__module__ for base in cls.__mro__]
    return any(".preprocessing." in each and each.startswith(_KERASES) for each in names)


def install() -> None:
    """Gives such layers their float32 policy when they are made, once in a process."""
    place = Method.of(tf.keras.layers.Layer, "__init__")
    hooks.install([Replacement(place, _with_float32_policy, When.ALWAYS)])
    if kernels.have_faces():
        hooks.install(_of_inputs())


def _of_inputs() -> Iterator[Replacement]:
    """Yields the rows of methods that cast inputs of layers, which then have faces."""
    for place in keras_api.input_casts(Policy):
        yield Replacement(place, _noting_casts, When.ALWAYS, keras_api.names.RAW_INPUTS)
    for place in keras_api.EARLY_CASTING:
        yield Replacement(place, _with_unrounded_inputs, When.ALWAYS)
    yield from keras_api.CASTS_OF_STATES


def _noting_casts(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast(self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, given, *args, **kwargs)
        if isinstance(result, list):
            return list(map(faces.cast_input, given, result))
        return faces.cast_input(given, result)

    return cast


def _with_unrounded_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, inputs: Any, **kwargs: Any) -> Any:
        return original(self, tf.nest.map_structure(unrounded, inputs), **kwargs)

    return call


def _with_float32_policy(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        policy: Any = self.dtype_policy if reads_raw(type(self)) else None
        if isinstance(policy, Policy) and policy.low_precision_dtype is not None:
            keras_api.set_policy(self, policy.in_float32())
            place = keras_api.report_of_outputs(type(self))
            hooks.install([Replacement(place, _reporting, When.ALWAYS, keras_api.names.RAW_INPUTS)])

    return __init__


def _reporting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method that tells what results are like, which are rounded."""

    def report(self: Any, *args: Any, **kwargs: Any) -> Any:
        dtype, outputs = _rounds_to(self), original(self, *args, **kwargs)
        if dtype is None:
            return outputs
        return _map_rounded(functools.partial(keras_api.with_dtype, dtype), outputs)

    return report


def is_one(layer: Any) -> bool:
    """Whether a layer is a float32 layer whose results are rounded.

    Args:
        layer: a layer whose policy is one of keras_mp with a 16-bit dtype.
    """
    return _rounds_to(layer) is not None


def _rounds_to(layer: Any) -> tf.DType | None:
    """Returns the 16-bit dtype to which a layer's float32 result is rounded, or None."""
    policy: Any = getattr(layer, "dtype_policy", None)
    return policy.low_precision_dtype if getattr(policy, "is_of_float32", False) else None


def call(keras_call: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
    """Calls such a layer.

    Args:
        keras_call: `Layer.__call__` of Keras.
        layer: the layer.
        args: its arguments. In the place of 16-bit tensors it gets their float32 faces.
        kwargs: its keyword arguments.

    Returns:
        What the layer returns, rounded.
    """
    args, kwargs = tf.nest.map_structure(unrounded, (args, kwargs))
    with reach.entered(None):
        outputs = keras_call(layer, *args, **kwargs)
    return _map_rounded(functools.partial(_rounded, _rounds_to(layer)), outputs)


def rounded(layer: Any, dtype: tf.DType | None, outputs: Any) -> Any:
    """Rounds what a wrapper returns that calls `call` of such a layer.

    Args:
        layer: the wrapper, or any other layer.
        dtype: the 16-bit DType of its policy; None if it has none.
        outputs: what it returns.
    """
    is_wrapper = dtype is not None and isinstance(layer, tf.keras.layers.Wrapper)
    if not is_wrapper or not is_one(layer.layer):
        return outputs
    return tf.nest.map_structure(functools.partial(_rounded, dtype), outputs)


def unrounded(value: Any) -> Any:
    """Returns the float32 face of a 16-bit tensor, if it has one, else the value."""
    face = faces.float32_of(value) if faces.is_low_tensor(value) else None
    return value if face is None else marks.copy(value, face)


def _map_rounded(function: Callable[[Any], Any], outputs: Any) -> Any:
    """Maps the outputs that a layer rounds.

    Among images with labels, boxes and masks, only the images are rounded.
    """
    if isinstance(outputs, dict) and "images" in outputs:
        return {**outputs, "images": tf.nest.map_structure(function, outputs["images"])}
    return tf.nest.map_structure(function, outputs)


def _rounded(dtype: Any, value: Any) -> Any:
    if not tf.is_tensor(value) or value.dtype not in (tf.float32, tf.float64):
        return value
    return faces.cast_input(value, marks.cast(value, dtype))
