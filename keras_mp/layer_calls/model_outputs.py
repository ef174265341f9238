"""Outputs of a model in float32, though its layers compute in 16 bits.

A model that no other layer calls returns float32 to the program; it is *at the rim*. A cast would
only widen numbers that have been rounded already. So the layers that make the outputs of a
functional or Sequential model are exact: their products take 16-bit inputs and float32 weights, and
all that they compute has a float32 face (`hooks/faces.py`), which is the output. A model among
these layers is at the rim, too. An activation, or a layer that only moves numbers, is exact
together with the layer before it.

Before a call, nothing tells which layers make the outputs of a subclassed model. If an output is
what one of Keras's layers has returned, this layer is called once more, as an exact one. All others
are the float32 face, or a cast.
"""

import collections
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.hooks import faces, reach
from keras_mp.layer_calls import data_layers
from keras_mp.support import marks, objects
from keras_mp.support.attributes import replaced
from keras_mp.support.dtypes import LOW_PRECISION

_layers = tf.keras.layers
_PROBABILITIES = (_layers.Activation, _layers.Softmax)
# These layers have no weights. They return probabilities, or the numbers that they get.
_PASS_ON: tuple[Any, ...] = (
    *(*_PROBABILITIES, _layers.Lambda, _layers.Reshape, _layers.Flatten, _layers.Permute),
    *(_layers.RepeatVector, _layers.Concatenate, _layers.Identity, _layers.Rescaling),
    *(_layers.Cropping1D, _layers.Cropping2D, _layers.Cropping3D),
    *(_layers.ZeroPadding1D, _layers.ZeroPadding2D, _layers.ZeroPadding3D),
)


class _Rim(threading.local):
    """What this thread knows about the model at the rim that it calls.

    Attributes:
        layers: ids of the layers that make its outputs, including such a layer that is being
            called.
        policy: the policy of the outermost model.
        calls: the last calls of layers inside of it; None outside of such models, and where one of
            these calls is made again.
    """

    layers: frozenset[int] = frozenset()
    policy: Any = None
    calls: "collections.deque[_Call] | None" = None


class _Call(NamedTuple):
    """A call of a layer of Keras that may be made once more.

    Attributes:
        output: weak reference to what it has returned.
        layer: the layer.
        args: its arguments.
        kwargs: its keyword arguments.
    """

    output: "weakref.ref[Any]"
    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# More calls would keep more activations alive.
_CALLS = 32


_thread = _Rim()


def is_last(layer: Any) -> bool:
    """Whether a layer makes outputs of the model at the rim that this thread calls."""
    return id(layer) in _thread.layers


def is_made_again() -> bool:
    """Whether this thread calls a layer once more, for a float32 output of a model."""
    return bool(_thread.layers) and _thread.calls is None


@contextlib.contextmanager
def as_last(layer: Any) -> Iterator[None]:
    """Context manager in which a layer is called as one that makes a model's outputs.

    Args:
        layer: a layer.
    """
    policy = getattr(layer, "dtype_policy", None)
    with (
        replaced(_thread, "layers", frozenset([id(layer)])),
        replaced(_thread, "policy", policy),
        replaced(_thread, "calls", collections.deque(maxlen=_CALLS)),
    ):
        yield


def call(
    keras_call: Callable[..., Any],
    layer: Any,
    dtype: tf.DType | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a model at the rim, or a layer that makes its outputs.

    Args:
        keras_call: `Layer.__call__` of Keras.
        layer: the layer or model.
        dtype: the 16-bit DType of its policy; None if it has none.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        What the layer returns, with float32 in the place of 16 bits.
    """
    is_outermost = not is_last(layer)
    policy = _policy_of(layer) if is_outermost else _thread.policy
    is_to_be = functools.partial(_is_to_be_float32, policy)
    last = [each for each in last_layers(layer) if _has_a_part(each, is_to_be)]
    ids = frozenset(map(id, last if is_outermost else [layer, *last]))
    # A layer without others inside computes what it returns.
    is_exact = not is_outermost and _computes_itself(layer)
    calls = collections.deque(maxlen=_CALLS) if is_outermost else _thread.calls
    # A layer without a 16-bit policy stays in a region of the program.
    region = reach.region()
    stays = dtype is None and region is not None and not region.gradients_only
    with (
        reach.entered(reach.current() if stays else dtype, is_exact),
        replaced(_thread, "layers", ids),
        replaced(_thread, "policy", policy),
        replaced(_thread, "calls", calls),
    ):
        if dtype is not None and data_layers.is_one(layer):
            outputs = data_layers.call(keras_call, layer, args, kwargs)
        else:
            outputs = keras_call(layer, *args, **kwargs)
        return widened(outputs, is_to_be) if is_outermost else outputs


def _computes_itself(layer: Any) -> bool:
    """Whether a layer has no others inside, or wraps one."""
    if isinstance(layer, tf.keras.Model):
        return False
    inside = keras_api.layers_inside(layer)
    return not inside or (isinstance(layer, tf.keras.layers.Wrapper) and inside == [layer.layer])


def returns_float32(model: tf.keras.Model, layer_policy: Any) -> bool:
    """Whether a model returns the 16-bit output of one of its layers as float32.

    Args:
        model: a model that no other layer calls.
        layer_policy: the policy of the layer.
    """
    return _is_to_be_float32(_policy_of(model), layer_policy)


def _is_to_be_float32(model_policy: Any, layer_policy: Any) -> bool:
    """Whether an output is to be float32, given the policies of model and layer.

    The layer is the one that made the output.
    """
    if getattr(model_policy, "model_outputs", "float32") is None:
        return False
    policy = layer_policy or model_policy
    # A policy other than the model's, or one of Keras, is there on purpose.
    is_ours = getattr(policy, "model_outputs", None) is not None
    return is_ours and (policy == model_policy or policy.compute_dtype != policy.variable_dtype)


def _policy_of(model: tf.keras.Model) -> Any:
    """Returns the policy of a model.

    For a model from a file, it is that of its last 16-bit layer, of a mixed one if there is any.
    """
    policy: Any = getattr(model, "dtype_policy", None)
    if getattr(policy, "low_precision_dtype", None) is not None:
        return policy
    policies = [layer.dtype_policy for layer in keras_api.flatten_layers(model)]
    low = [each for each in policies if getattr(each, "low_precision_dtype", None) is not None]
    mixed = [each for each in low if each.compute_dtype != each.variable_dtype]
    return (mixed or low or [policy])[-1]


def _has_a_part(layer: Any, is_to_be: Callable[[Any], bool]) -> bool:
    """Whether a layer, or one inside of it, may be called for a float32 output."""
    policy: Any = layer.dtype_policy
    is_low = getattr(policy, "low_precision_dtype", None) is not None
    return isinstance(layer, tf.keras.Model) or (is_low and is_to_be(policy))


def last_layers(layer: Any) -> Sequence[Any]:
    """Returns the layers inside of one that make its outputs, if known before a call.

    Args:
        layer: a layer or model. A subclassed one has none.

    Returns:
        Layers and models. A layer that a model calls several times is not among them, since other
        layers may take what it returns.
    """
    if not isinstance(layer, tf.keras.Model):
        return keras_api.layers_inside(layer) if _computes_itself(layer) else ()
    if isinstance(layer, tf.keras.Sequential):
        return keras_api.output_layers(layer, _PASS_ON) or ()
    if layer not in _found:
        layers = keras_api.output_layers(layer, _PASS_ON)
        if layers is None:
            return ()
        calls = keras_api.calls_of_layers(layer) or ()
        numbers = collections.Counter(id(each) for each, _, _ in calls)
        _found[layer] = [weakref.ref(each) for each in layers if numbers[id(each)] == 1]
    return [each for each in (reference() for reference in _found[layer]) if each is not None]


# The last layers of functional models, which do not change. No layer is kept alive.
_found: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def note_call(outputs: Any, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Notes which layer has made a tensor, inside of a model at the rim.

    The innermost layer comes first.

    Args:
        outputs: what a layer returns.
        layer: the layer.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    if _thread.calls is None:
        return
    flat: list[Any] = [outputs] if isinstance(outputs, tf.Tensor) else tf.nest.flatten(outputs)
    for output in flat:
        if faces.is_low_tensor(output) and not hasattr(output, "_keras_mp_policy"):
            output._keras_mp_policy = layer.dtype_policy
    if faces.is_low_tensor(outputs) and _may_be_called_again(layer):
        _thread.calls.append(_Call(weakref.ref(outputs), layer, args, kwargs))


def with_float32(layer: Any, outputs: Any) -> Any:
    """Returns the distributions that a layer returns, with float32 in them.

    The program goes on to compute with them.

    Args:
        layer: the layer.
        outputs: what it returns.
    """
    if isinstance(outputs, tf.Tensor) or not any(map(_makes_distributions, type(layer).__mro__)):
        return outputs
    return tf.nest.map_structure(lambda each: objects.widened(each, faces.widened), outputs)


def _makes_distributions(cls: type) -> bool:
    """Whether a class is tensorflow-probability's base class of such layers."""
    is_theirs = cls.__module__.partition(".")[0] == "tensorflow_probability"
    return is_theirs and cls.__name__ == "DistributionLambda"


def _may_be_called_again(layer: Any) -> bool:
    """Whether a layer is one of Keras's that computes the same whenever it is called."""
    if not (isinstance(layer, _PROBABILITIES) or layer.trainable_weights):
        return False
    is_kerass = type(layer).__module__.partition(".")[0] in ("keras", "tf_keras")
    if not is_kerass or keras_api.layers_inside(layer):
        return False
    return not layer.non_trainable_weights and getattr(layer, "activity_regularizer", None) is None


def _again(output: Any) -> Any:
    """Returns an output that a layer has made as it makes it for a model, or None."""
    for call in reversed(_thread.calls or ()):
        if call.output() is output:
            policy: Any = call.layer.dtype_policy
            with (
                replaced(_thread, "layers", frozenset([id(call.layer)])),
                replaced(_thread, "calls", None),
                faces.made_by(None),
                reach.entered(policy.low_precision_dtype),
            ):
                made = call.layer(*call.args, **call.kwargs)
                return faces.widened(made)
    return None


def widened(outputs: Any, is_to_be: Callable[[Any], bool]) -> Any:
    """Returns the outputs of a model, with float32 in the place of 16 bits.

    Args:
        outputs: structure of tensors and anything else. Objects that hold tensors, such as
            distributions, are replaced by others that hold float32.
        is_to_be: tells whether an output is to be float32. It takes the policy of the layer that
            made the output, or None if that is not known.
    """
    made: dict[int, Any] = {}

    def again(output: Any) -> Any:
        # Outputs that were made of one another stay so.
        if id(output) not in made:
            made[id(output)] = _again(output)
        return made[id(output)]

    def widen(output: Any) -> Any:
        if isinstance(output, tf.RaggedTensor | tf.SparseTensor):
            is_low = output.dtype in LOW_PRECISION
            return marks.cast(output, tf.float32) if is_low and is_to_be(None) else output
        is_low = faces.is_low_tensor(output)
        if not is_low or not is_to_be(getattr(output, "_keras_mp_policy", None)):
            return output
        with faces.made_by(again):
            result = faces.float32_of(output)
        face = faces.of(output)
        if result is None:
            result = marks.cast(output, tf.float32)
            faces.note(result, output, faces.OUTPUT)
        elif face is None or face.kind == faces.MADE:
            # Later layers took the 16-bit tensor, which is another one.
            faces.note(result, output, faces.AGAIN)
        return marks.copy(output, result)

    before = [outputs] if isinstance(outputs, tf.Tensor) else tf.nest.flatten(outputs)
    after = [objects.widened(each, widen) for each in before]
    if isinstance(outputs, tf.Tensor):
        return after[0]
    if all(old is new for old, new in zip(before, after)):
        return outputs
    return tf.nest.pack_sequence_as(outputs, after)
