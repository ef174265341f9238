"""Operations whose 16-bit kernels are slower than float32's between casts.

TensorFlow has no fast float16 kernels for most convolutions on CPUs. On one with AVX512-FP16 the
gradient of a filter takes hundreds of times as long as in float32, on one without it twelve times.
Activations, pooling, normalizations and products of several matrices are slower by less: up to 8
times. Computed in float32 inside, and rounded once, they are faster and no less exact.

A table (`tables.py`) says which kernels are slow. This module needs TensorFlow only.
"""

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.hooks import reach
from keras_mp.kernels import chains, tables
from keras_mp.kernels.replaced import (
    Kernel,
    Table,
    device_type,
    in_float32,
    shape_of,
    usual_device,
)
from keras_mp.support import host
from keras_mp.support.dtypes import LOW_PRECISION, LOW_PRECISION_NAMES

# The float32 numbers of a vector of AVX512, in which oneDNN normalizes.
_VECTOR = 16
# A kernel counts as slow if it takes more times as long as float32's with casts than this. With 2,
# some layers take twice as long in 16 bits as in float32.
_SLOW = 1.5
# Chains of operations, which take a tenth of a second or two to compile; they gain 1.5 to 4 times.
_SLOW_CHAIN = 1.25


def _convolution(
    *image: int, wants: str, depthwise: bool = False
) -> Callable[[tf.DType, None], dict[str, Any]]:
    """Returns an example: a filter of 3 over ones, as many channels in as out.

    Args:
        *image: ints. Batch, sizes, channels.
        wants: str. "output", or "input" or "filter" for the gradient of one.
        depthwise: bool. Whether each channel has a filter of its own. Defaults to False.
    """

    def example(dtype: tf.DType, _: None) -> dict[str, Any]:
        window = [3] * (len(image) - 2) + [image[-1], 1 if depthwise else image[-1]]
        x, filters = tf.ones(image, dtype), tf.ones(window, dtype)
        tensors = {
            "output": {"input": x, "filter": filters},
            "input": {"input_sizes": image, "filter": filters, "out_backprop": x},
            "filter": {"input": x, "filter_sizes": window, "out_backprop": x},
        }
        return {**tensors[wants], "strides": [1] * len(image), "padding": "SAME"}

    return example


def _elementwise(*names: str) -> Callable[[tf.DType, None], dict[str, Any]]:
    """Returns an example of an elementwise operation, given the names of its inputs."""
    return lambda dtype, _: {name: _noise(dtype, 1024, 512) for name in names}


def _noise(dtype: tf.DType, *shape: int) -> tf.Tensor:
    """Returns random numbers: some kernels are slow where signs change."""
    return tf.cast(tf.random.stateless_normal(shape, seed=(0, 0)), dtype)


def _attention(dtype: tf.DType, _: None) -> dict[str, Any]:
    weights, values = tf.ones([8, 4, 128, 128], dtype), tf.ones([8, 128, 4, 64], dtype)
    return {"inputs": [weights, values], "equation": "acbe,aecd->abcd"}


def _products(dtype: tf.DType, _: None) -> dict[str, Any]:
    """The gradient of a Dense layer of Keras 3 whose input is a sequence."""
    return {"x": tf.ones([16, 64, 256], dtype), "y": tf.ones([256, 256], dtype), "adj_y": True}


def _normalization(dtype: tf.DType, _: None) -> dict[str, Any]:
    """LayerNormalization of Keras 2, where each row is a channel."""
    rows, empty = 2048, tf.zeros([0])
    of_rows = {"scale": tf.ones([rows]), "offset": tf.fill([rows], 2.0)}
    options = {"mean": empty, "variance": empty, "epsilon": 1e-3, "data_format": "NCHW"}
    return {"x": tf.ones([1, rows, 512, 1], dtype), **of_rows, **options}


def _has_part_of_a_vector(
    x: object, *args: Any, data_format: str = "NHWC", **kwargs: Any
) -> bool | None:
    """Whether the channels of images are no whole vectors, or None.

    oneDNN then normalizes bfloat16 number by number. On AVX512-BF16 a batch of 16384 by 100
    channels takes 33 times as long as in float32 with casts. One of 32 images of 28 by 28 takes
    twice as long with 100 channels, and half as long with 112.
    """
    del args, kwargs
    shape = shape_of(x)
    channels = shape[-1] if shape.rank and data_format.endswith("C") else None
    return True if channels and channels % _VECTOR else None


_WINDOWS = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
_IMAGES, _POOLED = (16, 32, 32, 64), (16, 16, 16, 64)


def _largest_of_windows(dtype: tf.DType, _: None) -> dict[str, Any]:
    return {**_WINDOWS, "input": _noise(dtype, *_IMAGES)}


def _mean_of_windows(dtype: tf.DType, _: None) -> dict[str, Any]:
    return {**_WINDOWS, "value": tf.ones(_IMAGES, dtype)}


def _gradient_of_means(dtype: tf.DType, _: None) -> dict[str, Any]:
    return {**_WINDOWS, "orig_input_shape": _IMAGES, "grad": tf.ones(_POOLED, dtype)}


_2D, _3D, _DEPTHWISE = (4, 16, 16, 64), (2, 8, 8, 8, 32), (16, 32, 32, 64)

_EXAMPLES: dict[str, Callable[[tf.DType, None], dict[str, Any]]] = {
    "Conv2DBackpropFilter": _convolution(*_2D, wants="filter"),
    "Conv2DBackpropInput": _convolution(*_2D, wants="input"),
    "Conv3D": _convolution(*_3D, wants="output"),
    "Conv3DBackpropFilterV2": _convolution(*_3D, wants="filter"),
    "Conv3DBackpropInputV2": _convolution(*_3D, wants="input"),
    "DepthwiseConv2dNative": _convolution(*_DEPTHWISE, wants="output", depthwise=True),
    "DepthwiseConv2dNativeBackpropFilter": _convolution(
        *_DEPTHWISE, wants="filter", depthwise=True
    ),
    "DepthwiseConv2dNativeBackpropInput": _convolution(*_DEPTHWISE, wants="input", depthwise=True),
    "Tanh": _elementwise("x"),
    "TanhGrad": _elementwise("y", "dy"),
    "Sigmoid": _elementwise("x"),
    "SigmoidGrad": _elementwise("y", "dy"),
    "Erf": _elementwise("x"),
    "Exp": _elementwise("x"),
    "Elu": _elementwise("features"),
    "EluGrad": _elementwise("gradients", "outputs"),
    "Selu": _elementwise("features"),
    "SeluGrad": _elementwise("gradients", "outputs"),
    "LeakyRelu": _elementwise("features"),
    "LeakyReluGrad": _elementwise("gradients", "features"),
    "Softplus": _elementwise("features"),
    "SoftplusGrad": _elementwise("gradients", "features"),
    "Softmax": _elementwise("logits"),
    "MaxPool": _largest_of_windows,
    "AvgPool": _mean_of_windows,
    "AvgPoolGrad": _gradient_of_means,
    "Einsum": _attention,
    "BatchMatMulV2": _products,
}
KERNELS = {
    **{op: Kernel(example) for op, example in _EXAMPLES.items()},
    "FusedBatchNormV3": Kernel(_normalization, case=_has_part_of_a_vector),
    **chains.KERNELS,
}


def compute(op: str, **arguments: Any) -> tf.Tensor:
    """Computes an operation, in float32 inside if its kernel is slow.

    Args:
        op: str. A key of `KERNELS`.
        **arguments: those of the raw operation.
    """
    own = getattr(tf.raw_ops, op)
    dtype = next(each.dtype for each in arguments.values() if tf.is_tensor(each))
    case = _TABLE.kernels[op].case(**arguments)
    return in_float32(own, **arguments) if is_slow(op, dtype, case) else own(**arguments)


def _is_slow(op: str, kernel: Kernel, dtype: tf.DType, case: object, device: str) -> bool:
    """Whether a kernel takes longer than float32's with casts around it."""
    del kernel
    if device != "CPU":
        return False
    if op == "FusedBatchNormV3" and case and dtype == tf.bfloat16:
        return True
    return tables.current().time(op, dtype.name) > (_SLOW_CHAIN if op in chains.KERNELS else _SLOW)


def slow_kernels() -> list[tuple[str, str, float]]:
    """Returns the kernels that are computed in float32 inside on this CPU.

    Returns:
        list of tuples of an operation, a dtype, and how many times as long as float32's its own
        kernel takes.
    """
    return [
        (op, dtype, tables.current().time(op, dtype))
        for dtype in LOW_PRECISION_NAMES
        for op in KERNELS
        if is_slow(op, dtype, device="CPU")
    ]


def fact_for_workers() -> str:
    """Returns, as a text, the kernels that this process computes in float32 for speed."""
    if not is_enabled() or usual_device() != "CPU":
        return "none"
    return ", ".join(f"{op} ({dtype})" for op, dtype, _ in slow_kernels()) or "none"


def own_function(op: str) -> Callable[..., Any]:
    """Returns TensorFlow's own function, without anything in its place.

    Args:
        op: str. A key of `KERNELS`.
    """
    public = KERNELS[op].public
    return getattr(tf.raw_ops, op) if public is None else inspect.unwrap(public)


_TABLE = Table(KERNELS, "and may be slow in 16 bits", asks=_is_slow)
replacements, is_slow = _TABLE.replacements, _TABLE.is_wrong


def enable_float32_where_faster(enabled: bool = True) -> None:
    """Switches float32 inside of operations with slow 16-bit kernels on or off.

    It is on, in the whole process, for what keras_mp computes in 16 bits on a CPU: layers with a
    policy of keras_mp, regions and scopes. Which kernels are slow says a table
    (`keras_mp.hardware.use_table`), and never a clock. A `tf.function` keeps what it was traced
    with. Results are no less exact: the float32 one is rounded once.

    Args:
        enabled: bool. False runs TensorFlow's own kernels, however slow they are.

    Example:

    >>> keras_mp.enable_float32_where_faster(False)
    >>> keras_mp.enable_float32_where_faster()
    """
    _TABLE.enabled = enabled


def is_enabled() -> bool:
    """Whether float32 inside operations with slow 16-bit kernels is switched on."""
    return _TABLE.enabled


def may_replace_layer(dtype: tf.DType) -> bool:
    """Whether a layer of Keras may run code of keras_mp in place of its own.

    Args:
        dtype: DType in which the layer computes.

    Returns:
        bool. It may in reach, in 16 bits on CPUs, where neither XLA compiles nor a session runs it,
        and only if that is switched on.
    """
    if reach.current() is None or not (is_enabled() and dtype in LOW_PRECISION):
        return False
    return not host.is_compiled_by_xla() and not host.in_v1_graph() and device_type() == "CPU"
