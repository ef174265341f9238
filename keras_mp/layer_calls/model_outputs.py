"""Outputs of a model in float32, though its layers compute in 16 bits.

A model that no other layer calls returns float32 to the program; it is *at the rim*. A cast would
only widen numbers that have been rounded already. So the layers that make the outputs of a
functional or Sequential model are called like layers with `output_dtype="float32"`, and later
layers take the same tensor. A model among these layers is at the rim, too. An activation, or a
layer that only moves numbers, is called in this way together with the layer before it.

Before a call, nothing tells which layers make the outputs of a subclassed model. Outputs that come
in 16 bits are computed again in float32 (`op_autocast/exact_outputs.py`), or cast. A gradient with
respect to such an output includes the gradient with respect to the 16-bit tensor
(`kernels/returned_outputs.py`).
"""

import collections
import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.hooks import reach
from keras_mp.hooks.reach import Region
from keras_mp.kernels import again_in_float32, returned_outputs
from keras_mp.kernels.again_in_float32 import how_made
from keras_mp.layer_calls import raw_inputs, unrounded
from keras_mp.op_autocast import context_manager
from keras_mp.op_autocast.exact_outputs import ExactOutputs
from keras_mp.support import objects
from keras_mp.support import softmax_and_cross_entropy as fusion
from keras_mp.support.attributes import replaced
from keras_mp.support.dtypes import LOW_PRECISION

# These layers have no weights. They return probabilities, or the numbers that they get.
_PASS_ON = (
    *("Activation", "Softmax", "Lambda", "Reshape", "Flatten", "Permute", "RepeatVector"),
    *("Concatenate", "Identity", "Rescaling"),
    *(f"{kind}{rank}D" for kind in ("Cropping", "ZeroPadding") for rank in (1, 2, 3)),
)


class _Rim(threading.local):
    """What this thread knows about the model at the rim that it calls.

    Attributes:
        layers: ids of the layers that make its outputs, including such a layer that is being
            called.
        policy: the policy of the outermost model.
    """

    layers: frozenset[int] = frozenset()
    policy: Any = None


_thread = _Rim()


def is_last(layer: Any) -> bool:
    """Whether a layer makes outputs of the model at the rim that this thread calls."""
    return id(layer) in _thread.layers


@contextlib.contextmanager
def as_last(layer: Any) -> Iterator[None]:
    """Context manager in which a layer is called as one that makes a model's outputs.

    Args:
        layer: a layer.
    """
    policy = getattr(layer, "dtype_policy", None)
    with (
        again_in_float32.kept(),
        replaced(_thread, "layers", frozenset([id(layer)])),
        replaced(_thread, "policy", policy),
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
    is_whole = _computes_itself(layer)
    region = Region(dtype, gradients_only=True) if is_whole and dtype is not None else None
    with (
        reach.entered(dtype),
        again_in_float32.kept() if is_outermost else contextlib.nullcontext(),
        contextlib.nullcontext() if region is None else context_manager.entered(region),
        replaced(_thread, "layers", ids),
        replaced(_thread, "policy", policy),
    ):
        outputs = raw_inputs.call(keras_call, layer, dtype, args, kwargs, is_whole)
        return widened(outputs, is_to_be)


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

    For a model from a file, it is the policy of all its 16-bit layers.
    """
    policy: Any = getattr(model, "dtype_policy", None)
    if getattr(policy, "low_precision_dtype", None) is not None:
        return policy
    policies = {
        layer.dtype_policy
        for layer in keras_api.layers_inside(model)
        if hasattr(layer.dtype_policy, "model_outputs")  # as policies of keras_mp have
    }
    return policies.pop() if len(policies) == 1 else policy


def _has_a_part(layer: Any, is_to_be: Callable[[Any], bool]) -> bool:
    """Whether a layer, or one inside of it, may be called for a float32 output."""
    if not isinstance(layer, tf.keras.layers.Layer) or keras_api.is_operation(layer):
        return False  # It computes in the dtype that it gets.
    policy: Any = layer.dtype_policy
    is_low = getattr(policy, "low_precision_dtype", None) is not None
    return isinstance(layer, tf.keras.Model) or (is_low and is_to_be(policy))


def last_layers(layer: Any) -> Sequence[Any]:
    """Returns the layers inside of one that make its outputs, if known before a call.

    Args:
        layer: a layer or model. A subclassed one has none.

    Returns:
        Layers and models, and operations that are neither. A layer that a model calls several times
        is not among them, since other layers may take what it returns.
    """
    if not isinstance(layer, tf.keras.Model):
        return keras_api.layers_inside(layer) if _computes_itself(layer) else ()
    if isinstance(layer, tf.keras.Sequential):
        layers: list[Any] = list(reversed(layer.layers))
        passing = itertools.takewhile(lambda each: isinstance(each, _passing_on()), layers)
        return layers[: len(list(passing)) + 1]
    if layer not in _found:
        calls = keras_api.calls_of_layers(layer)
        if calls is None:
            return ()
        _found[layer] = list(map(weakref.ref, _last_of(calls, tf.nest.flatten(layer.outputs))))
    return [each for each in (reference() for reference in _found[layer]) if each is not None]


# The last layers of functional models, which do not change. No layer is kept alive.
_found: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _last_of(calls: Sequence[tuple[Any, list[Any], list[Any]]], outputs: list[Any]) -> list[Any]:
    numbers = collections.Counter(id(layer) for layer, _, _ in calls)
    calls_by_output = {id(each): call for call in calls for each in call[2]}
    layers, waiting, visited = [], outputs, set()
    while waiting:
        output, *waiting = waiting
        call = calls_by_output.get(id(output))
        if call is None or id(output) in visited or numbers[id(call[0])] > 1:
            continue
        visited.add(id(output))
        layer, inputs, _ = call
        layers.append(layer)
        is_layer = isinstance(layer, tf.keras.layers.Layer) and not keras_api.is_operation(layer)
        if not is_layer or isinstance(layer, _passing_on()):
            waiting += inputs
    return layers


@functools.cache
def _passing_on() -> tuple[type, ...]:
    classes = (getattr(tf.keras.layers, name, None) for name in _PASS_ON)
    return tuple(cls for cls in classes if cls is not None)


def note_policy(outputs: Any, policy: Any) -> None:
    """Notes the policy of the layer that made a tensor.

    The innermost layer comes first.

    Args:
        outputs: what a layer returns.
        policy: its dtype policy.
    """
    if again_in_float32.notes.ended is None:
        return  # No model at the rim is called.
    of_layer: list[Any] = [outputs] if isinstance(outputs, tf.Tensor) else tf.nest.flatten(outputs)
    for output in of_layer:
        if _is_low(output) and not hasattr(output, "_keras_mp_policy"):
            output._keras_mp_policy = policy


def widened(outputs: Any, is_to_be: Callable[[Any], bool]) -> Any:
    """Returns the outputs of a model, with float32 in the place of 16 bits.

    Args:
        outputs: structure of tensors and anything else. Objects that hold tensors, such as
            distributions, are replaced by others that hold float32.
        is_to_be: tells whether an output is to be float32. It takes the policy of the layer that
            made the output, or None if that is not known.
    """
    exact = ExactOutputs()

    def widen(output: Any) -> Any:
        is_ragged = isinstance(output, tf.RaggedTensor | tf.SparseTensor)
        if not _is_low(output) and not (is_ragged and output.dtype in LOW_PRECISION):
            return output
        if not is_to_be(getattr(output, "_keras_mp_policy", None)):
            return output
        # It may have been rounded by a layer for raw data.
        result: Any = unrounded.before_rounding(output)
        if not _is_float32(result):
            with keras_api.autocast_scope(None), _in_the_scope_of(output):
                result = exact.of(output)
            is_cast = result is None
            if result is None:
                result = fusion.cast(output, "float32")
            made = how_made(output)
            # If the result was rounded to make the output, it gets the gradients of both anyway.
            if made is None or all(each is not result for each in made.inputs):
                returned_outputs.note(result, output, is_cast)
        if hasattr(output, "_keras_mask"):
            result._keras_mask = output._keras_mask
        return result

    before = [outputs] if isinstance(outputs, tf.Tensor) else tf.nest.flatten(outputs)
    after = [objects.widened(each, widen) for each in before]
    if isinstance(outputs, tf.Tensor):
        return after[0]
    if all(old is new for old, new in zip(before, after)):
        return outputs
    return tf.nest.pack_sequence_as(outputs, after)


def _in_the_scope_of(output: Any) -> contextlib.AbstractContextManager[Any]:
    """Names operations of a graph as those of the layer that has made a tensor."""
    is_in_graph = isinstance(output, tf.Tensor) and not tf.executing_eagerly()
    scope = output.op.name.rpartition("/")[0] if is_in_graph else ""
    return tf.name_scope(f"{scope}/") if scope else contextlib.nullcontext()


def _is_float32(value: object) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype == tf.float32


def _is_low(value: object) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype in LOW_PRECISION
