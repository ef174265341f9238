"""Layers that read numbers as they come from the world, without rounding first.

Keras casts the arguments of a layer to its compute dtype. For activations, that is what mixed
precision means. But 16 bits do not hold a year, a row number or a 16-bit pixel, so the differences
that a layer is there to normalize, look up or compare would be lost before it starts. For that
reason, a layer of the table below is a float32 layer to Keras, and its result is rounded once, to
the compute dtype of its policy.

Models cast their inputs, too, before any layer sees them. So casts of inputs, and the rounded
results of these layers, keep a note of the tensor that was rounded. A layer of the table takes the
noted tensor.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp import hooks, keras_api, variables
from keras_mp.hooks import Method, Replacement, once
from keras_mp.kernels import compositions
from keras_mp.layer_calls import master_writes, unrounded
from keras_mp.op_autocast import promotion
from keras_mp.policy import Policy
from keras_mp.support import features, marks
from keras_mp.support.attributes import replaced
from keras_mp.support.dtypes import FLOATING, LOW_PRECISION, LOW_PRECISION_NAMES


class _Kind(NamedTuple):
    """How layers of a class read their inputs.

    Attributes:
        reads: takes a layer and the tensors among its arguments, and tells whether this call is
            made in float32. None means every call, and all that the layer does outside of calls,
            such as `adapt` and `build`.
        is_data: whether its results are still data, which a next layer of the table takes
            unrounded.
        keeps_statistics: whether its variables are float32, whatever the policy is.
        rounds: whether its results are rounded.
    """

    reads: Callable[[Any, list[Any]], bool] | None
    is_data: bool = False
    keeps_statistics: bool = False
    rounds: bool = True


def _has_wide_inputs(layer: Any, tensors: list[Any]) -> bool:
    """Whether 16 bits would round an input of a layer."""
    del layer
    return any(map(_is_wide, tensors))


def _is_masked(value: Any) -> bool:
    """Whether an argument of a layer is a mask, or has one."""
    return getattr(value, "_keras_mask", None) is not None or getattr(value, "dtype", 0) == tf.bool


def _is_wide(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, float)
    return tf.as_dtype(dtype) in (tf.float32, tf.float64)


# Layers for raw data always compute in float32. `adapt` and `build` compute what later calls use.
_PREPROCESSING = _Kind(None, is_data=True, keeps_statistics=True)
# A 16-bit input is an activation, for which nothing changes. Any other input is raw data.
_IF_WIDE = _Kind(_has_wide_inputs)
_MOVING = _Kind(_has_wide_inputs, keeps_statistics=True)
# These layers move values and change none, so they may come before one of the others.
_MOVES = _Kind(_has_wide_inputs, is_data=True)
# The sum of squares of a row leaves the range of float16 long before the row does.
_SQUARES = _Kind(lambda layer, tensors: True)
# These layers add up numbers before they divide by how many there are. That is the number of
# inputs, or of those that a mask keeps, and soon too large for 16 bits itself.
_MEANS = _Kind(lambda layer, tensors: True)
_MASKED_MEANS = _Kind(lambda layer, tensors: any(map(_is_masked, tensors)))
# With several axes, these layers subtract the logarithm of a sum of exponentials.
_SEVERAL_AXES = _Kind(lambda layer, tensors: len(np.ravel(layer.axis)) > 1)
# These layers compare with a number that 16 bits may round to the other side of an input.
_COMPARES = _Kind(lambda layer, tensors: True)
_MAY_COMPARE = _Kind(lambda layer, tensors: bool(layer.threshold))
# Ids are not computed with, but used to gather. Keras casts no ids, but models cast their inputs.
_IDS = _Kind(lambda layer, tensors: False)
# These layers assign to float32 weights what they compute from float32 weights.
_WRITES = _Kind(lambda layer, tensors: True)
_MAY_WRITE = _Kind(lambda layer, tensors: master_writes.assigns_weights(layer))
# These layers return a distribution, with which the program goes on to compute.
_DISTRIBUTION = _Kind(lambda layer, tensors: True, rounds=False)

_TABLE: dict[str, _Kind] = {
    **dict.fromkeys(
        (
            *("Normalization", "Rescaling", "Discretization", "CategoryEncoding", "Hashing"),
            *("HashedCrossing", "IntegerLookup", "StringLookup", "TextVectorization", "Pipeline"),
            *("MelSpectrogram", "STFTSpectrogram"),
            *("AugMix", "AutoContrast", "CenterCrop", "CutMix", "Equalization", "MixUp"),
            *("MaxNumBoundingBoxes", "RandAugment", "RandomBrightness", "RandomColorDegeneration"),
            *("RandomColorJitter", "RandomContrast", "RandomCrop", "RandomElasticTransform"),
            *("RandomErasing", "RandomFlip", "RandomGaussianBlur", "RandomGrayscale", "RandomHue"),
            *("RandomHeight", "RandomInvert", "RandomPerspective", "RandomPosterization"),
            *("RandomRotation", "RandomSaturation", "RandomSharpness", "RandomShear"),
            *("RandomTranslation", "RandomWidth", "RandomZoom", "Resizing", "Solarization"),
            "ContrastLimitedAdaptiveHistogramEqualization",
        ),
        _PREPROCESSING,
    ),
    **dict.fromkeys(
        (*("LayerNormalization", "RMSNormalization", "TimeDistributed"),),
        _IF_WIDE,
    ),
    **dict.fromkeys(
        (
            *("Masking", "Reshape", "Flatten", "Permute", "RepeatVector", "Concatenate"),
            *("Cropping1D", "Cropping2D", "Cropping3D", "Identity"),
            *("ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D"),
        ),
        _MOVES,
    ),
    "BatchNormalization": _MOVING,
    "GroupNormalization": _SQUARES,
    "UnitNormalization": _SQUARES,
    "SpectralNormalization": _WRITES,
    "Average": _MEANS,
    **{f"AdaptiveAveragePooling{rank}D": _MEANS for rank in (1, 2, 3)},
    "GlobalAveragePooling1D": _MASKED_MEANS,
    "Softmax": _SEVERAL_AXES,
    "ThresholdedReLU": _COMPARES,
    "ReLU": _MAY_COMPARE,
    "Dot": _Kind(lambda layer, tensors: layer.normalize),
    "Embedding": _IDS,
}


# They square weights and add them up.
_CONSTRAINTS = ("MaxNorm", "MinMaxNorm", "UnitNorm")
_REGULARIZERS = ("L1", "L2", "L1L2", "OrthogonalRegularizer")


class _Reading(threading.local):
    """The layers that read raw inputs in this thread: the outermost and the innermost.

    Attributes:
        outermost: layer.
        innermost: layer.
        rounds: whether the outermost one rounds its result.
    """

    outermost: Any = None
    innermost: Any = None
    rounds = True


_thread = _Reading()


@functools.cache
def _kinds() -> dict[type, _Kind]:
    named = {getattr(tf.keras.layers, name, None): kind for name, kind in _TABLE.items()}
    named[keras_api.PreprocessingLayer] = _PREPROCESSING
    if issubclass(tf.keras.metrics.Metric, tf.keras.layers.Layer):
        # A metric is a layer of the global policy, and counts in its variables.
        named[tf.keras.metrics.Metric] = _PREPROCESSING
    return {cls: kind for cls, kind in named.items() if cls is not None}


def reads_raw(cls: type) -> _Kind | None:
    """Returns how layers of a class read their inputs.

    None means: as Keras gives them.
    """
    if cls not in _found:
        _found[cls] = _find(cls) if features.is_on(keras_api.RAW_INPUTS) else None
    return _found[cls]


# The results of `_find`. No class is kept alive.
_found: weakref.WeakKeyDictionary[type, _Kind | None] = weakref.WeakKeyDictionary()


def _find(cls: type) -> _Kind | None:
    declared = getattr(cls, "reads_raw", None)
    if declared is not None:
        return _PREPROCESSING if declared else None
    kind = next((_kinds()[base] for base in cls.__mro__ if base in _kinds()), None)
    if kind is None and any(map(_makes_distributions, cls.__mro__)):
        let_read_raw(cls)
        return _DISTRIBUTION
    if kind is None and master_writes.owners(cls):
        let_read_raw(cls)
        return _MAY_WRITE
    return kind


def _makes_distributions(cls: type) -> bool:
    """Whether a class is tensorflow-probability's base class of such layers."""
    is_theirs = cls.__module__.partition(".")[0] == "tensorflow_probability"
    return is_theirs and cls.__name__ == "DistributionLambda"


def install() -> None:
    """Lets the layers of the table ask here for their policy.

    It also notes the casts of inputs.
    """
    for cls, kind in _kinds().items():
        if kind is not _IDS:
            let_read_raw(cls)
    keras_api.note_input_casts(Policy, unrounded.note, unrounded.before_rounding)
    keras_api.widen_functions(compositions.in_float32)
    # Layers also call them on their outputs. A penalty is part of the loss, so it stays in float32.
    for module, names, rounds in (
        (tf.keras.constraints, _CONSTRAINTS, True),
        (tf.keras.regularizers, _REGULARIZERS, False),
    ):
        for cls in filter(None, (getattr(module, name, None) for name in names)):
            wide = functools.partial(compositions.in_float32, rounds=rounds)
            hooks.install([Replacement(Method(cls, "__call__"), wide)])


def let_read_raw(cls: type) -> None:
    """Lets layers of a class have a float32 policy where they read raw inputs.

    Subclasses are included.

    Args:
        cls: subclass of `tf.keras.layers.Layer`.
    """
    with once.lock:
        marker = inspect.getattr_static(cls, "_dtype_policy", None)
        if isinstance(marker, _PolicyWhileReading) or not features.is_on(keras_api.RAW_INPUTS):
            return
        keras_api.let_policy_change(cls)
        keras_api.report_rounded(cls, _rounds_to, _map_rounded)
        cls._dtype_policy = _PolicyWhileReading()  # pyright: ignore[reportAttributeAccessIssue]


class _PolicyWhileReading:
    """The policy of a layer, which is one of float32 while it reads raw inputs."""

    def __get__(self, layer: Any, owner: type) -> Any:
        if layer is None:
            return self
        try:
            policy = vars(layer)["_dtype_policy"]
        except KeyError:
            raise AttributeError("_dtype_policy") from None
        if not hasattr(policy, "in_float32"):
            return policy
        kind, reads = reads_raw(type(layer)), _thread.innermost is layer
        if kind is None:  # It is the constraint of a weight, or a last layer.
            reads &= not keras_api.makes_weights(layer)
            return policy.in_float32() if reads else policy
        reads |= kind.reads is None
        if not reads and not kind.keeps_statistics:
            return policy
        return policy.in_float32(reads, kind.keeps_statistics)

    def __set__(self, layer: Any, policy: Any) -> None:
        vars(layer)["_dtype_policy"] = policy


def call(
    keras_call: Callable[..., Any],
    layer: Any,
    dtype: tf.DType | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_of_float32: bool = False,
) -> Any:
    """Calls a layer; one of the table gets its inputs as before they were rounded.

    Args:
        keras_call: `Layer.__call__` of Keras.
        layer: the layer.
        dtype: the 16-bit DType of its policy; None if it has none.
        args: its arguments.
        kwargs: its keyword arguments.
        is_of_float32: bool. Whether the layer is always called in float32, and rounds nothing.

    Returns:
        What the layer returns. If it was called in float32, floating-point tensors are rounded to
        `dtype`, unless it is inside of another layer that was called in float32.
    """
    if dtype is not None and _is_for_a_constraint(args):
        let_read_raw(type(layer))
        with replaced(_thread, "innermost", layer):
            return keras_call(layer, *args, **kwargs)
    kind = reads_raw(type(layer))
    if kind is None and not is_of_float32:
        return keras_call(layer, *args, **kwargs)
    if dtype is None and kind is not _IDS and layer.compute_dtype in LOW_PRECISION_NAMES:
        # A policy of Keras's own would round again, and lose the mask in Keras 3.12.
        return keras_call(layer, *args, **kwargs)
    tensors = tf.nest.flatten((args, kwargs))
    before = tensors if kind is None else [unrounded.before_rounding(each) for each in tensors]
    if is_of_float32:
        let_read_raw(type(layer))
        # Keras does not cast arguments that all layers take.
        before = [_widened(each) for each in before]
    if any(new is not old for new, old in zip(before, tensors)):
        args, kwargs = tf.nest.pack_sequence_as((args, kwargs), before)
        tensors = before
    reads = kind is None or kind.reads is None or kind.reads(layer, tensors)
    if dtype is None or not (reads or is_of_float32):
        return keras_call(layer, *args, **kwargs)
    is_outermost = _thread.outermost is None
    rounds = kind is not None and kind.rounds and not is_of_float32
    with (
        replaced(_thread, "outermost", layer if is_outermost else _thread.outermost),
        replaced(_thread, "rounds", rounds if is_outermost else _thread.rounds),
        replaced(_thread, "innermost", layer),
        promotion.rounding_assignments(),
    ):
        result = keras_call(layer, *args, **kwargs)
        return rounded(layer, result)


def rounded(layer: Any, outputs: Any) -> Any:
    """Rounds what a layer has computed in float32, while it is called.

    If observers look at the result of `call`, it is rounded before they look. Rounding again
    changes nothing.

    Args:
        layer: the object that is called: a layer, or anything else.
        outputs: structure of what its `call` returns.

    Returns:
        What the layer will return. Floating-point tensors are in 16 bits, unless the layer is
        inside of another one that was called in float32.
    """
    if _thread.outermost is not layer or not _thread.rounds:
        return outputs
    dtype = vars(layer)["_dtype_policy"].low_precision_dtype
    kind = reads_raw(type(layer))
    is_data = kind is not None and kind.is_data
    return _map_rounded(functools.partial(_rounded, dtype, is_data), layer, outputs)


def _map_rounded(function: Callable[[Any], Any], layer: Any, outputs: Any) -> Any:
    """Maps the outputs that a layer rounds.

    Among images with labels, boxes and masks, only the images are rounded.
    """
    if isinstance(outputs, dict) and "images" in outputs:
        kind = reads_raw(type(layer))
        if kind is not None and kind.reads is None:
            return {**outputs, "images": tf.nest.map_structure(function, outputs["images"])}
    return tf.nest.map_structure(function, outputs)


def _is_for_a_constraint(args: tuple[Any, ...]) -> bool:
    """Whether an optimizer lets a layer change a weight.

    The weight's constraint is the layer, or calls it.
    """
    if len(args) != 1 or not keras_api.is_weight(args[0]):
        return False
    return args[0].constraint is not None and variables.autocast_dtype() is None


def _rounds_to(layer: Any) -> tf.DType | None:
    """Returns the 16-bit dtype to which a layer's float32 result is rounded, or None."""
    policy, kind = vars(layer).get("_dtype_policy"), reads_raw(type(layer))
    if kind is None or not kind.rounds or not hasattr(policy, "in_float32"):
        return None
    reads = kind.reads is None or _thread.innermost is layer
    return policy.low_precision_dtype if reads and _thread.outermost in (None, layer) else None


def _widened(value: Any) -> Any:
    is_wide = not tf.is_tensor(value) or value.dtype not in LOW_PRECISION
    return value if is_wide else marks.cast(value, tf.float32)


def _rounded(dtype: tf.DType, is_data: bool, value: Any) -> Any:
    if not tf.is_tensor(value) or value.dtype not in FLOATING or value.dtype in LOW_PRECISION:
        return value
    result = marks.cast(value, dtype)
    if is_data:
        unrounded.note(value, result)
    return result
