"""Sums of 16-bit numbers, added up in float32 where TensorFlow's kernel stops short of the sum.

A kernel that keeps its running sum in bfloat16 stops at 256, since 256 + 1 rounds to 256; in
float16 it stops at 2048. TensorFlow has several: the gradient of a bias, of an embedding, of
whatever was broadcast, and some reductions themselves. `KERNELS` is the table of them.

XLA adds up in float32, but for what is scattered and for the exponentials of a softmax.

This module needs TensorFlow only.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.kernels.replaced import Kernel, Table, in_float32
from keras_mp.support.dtypes import LOW_PRECISION

# So many that 16 bits stop short of their sum, even shared out among dozens of lanes and threads.
_TERMS = 2**17
# Enough for what adds one term after the other.
_FEW_TERMS = 2**13
# Of how many channels a GPU keeps float32 sums while it adds up gradients of biases: half of 48 KB.
# It adds up those of more channels in 16 bits, one after the other. (`bias_op_gpu.cu.cc`)
_FIT_INTO_GPU = 6144


def _reduction(input: Any, axis: Any, *args: Any, **kwargs: Any) -> tuple[bool, ...] | bool:
    """The groups of neighbouring axes that are added up: (True, False) adds rows together."""
    del args, kwargs
    known: Any = getattr(input, "shape", None)
    shape, axes = tf.TensorShape(known), tf.get_static_value(axis)
    if shape.rank is None or axes is None:
        return True, False  # the layout for which most kernels are wrong
    reduced = {int(a) % shape.rank for a in np.ravel(axes)} if shape.rank else set()
    flags = [i in reduced for i, size in enumerate(shape.as_list()) if size != 1]
    return any(flags) and tuple(flag for flag, _ in itertools.groupby(flags))


def _sum_of_rows(expected: float) -> Callable[..., tuple[dict[str, Any], float]]:
    def example(dtype: tf.DType, case: tuple[bool, ...]) -> tuple[dict[str, Any], float]:
        axes = [i for i, reduced in enumerate(case) if reduced]
        sizes = [2] * len(case)  # so that many groups take no more memory than few
        if not case[-1]:
            sizes[-1] = 8
        sizes[axes[0]] = _TERMS // 2 ** (len(axes) - 1)
        return {"input": tf.fill(sizes, tf.constant(1 / 32, dtype)), "axis": axes}, expected

    return example


def _ones(dtype: tf.DType, *shape: int) -> tf.Tensor:
    return tf.ones(shape or [_FEW_TERMS], dtype)


def _all_to_one(*shape: int) -> tf.Tensor:
    """The indices of terms that all belong to the same place."""
    return tf.zeros([_FEW_TERMS, *shape], tf.int32)


def _bias_layout(out_backprop: Any, data_format: Any = None, name: Any = None) -> str:
    """The data format, and whether the sums of all channels fit into a GPU's shared memory."""
    del name
    data_format = tf.compat.as_str(data_format or "NHWC")
    known: Any = getattr(out_backprop, "shape", None)
    shape = tf.TensorShape(known)
    is_wide = data_format == "NHWC" and bool(shape.rank) and (shape[-1] or 0) > _FIT_INTO_GPU
    return "wide NHWC" if is_wide else data_format


def _sum_of_all_but_channels(
    own: Callable[..., Any], out_backprop: Any, data_format: Any = None, name: Any = None
) -> Any:
    """A sum of the same terms, which is corrected where it is wrong and else takes no copy."""
    rank = out_backprop.shape.rank
    if rank is None:
        return in_float32(own, out_backprop, data_format=data_format, name=name)
    channels = 1 if tf.compat.as_str(data_format or "") == "NCHW" else rank - 1
    return tf.reduce_sum(out_backprop, [i for i in range(rank) if i != channels], name=name)


def _bias(dtype: tf.DType, layout: str) -> tuple[dict[str, Any], float]:
    data_format = layout.split()[-1]
    if layout.startswith("wide"):
        terms = tf.ones([_FEW_TERMS // 2, _FIT_INTO_GPU + 1], dtype)
        return {"out_backprop": terms, "data_format": data_format}, _FEW_TERMS / 2
    shape = [_TERMS // 64, 4, 8, 8] if data_format == "NCHW" else [_TERMS, 4]
    terms = tf.fill(shape, tf.constant(1 / 32, dtype))
    return {"out_backprop": terms, "data_format": data_format}, _TERMS / 32


def _has_many_classes(logits: Any, name: Any = None) -> bool:
    """Whether the sum of the exponentials of so many classes may leave the range of float16."""
    del name
    known: Any = getattr(logits, "shape", None)
    shape = tf.TensorShape(known)
    return bool(shape.rank) and (shape[-1] or 0) > float(tf.float16.max)


def _many_classes(expected: float) -> Callable[..., tuple[dict[str, Any], float]]:
    return lambda dtype, _: ({"logits": tf.zeros([1, _TERMS], dtype)}, expected)


def _is_large_window(value: Any, ksize: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a window adds up so much before it divides that float16 rounds it or overflows."""
    del value, args, kwargs
    return int(np.prod(ksize)) >= 64


def _large_window(dtype: tf.DType, _: bool) -> tuple[dict[str, Any], float]:
    window = [1, 64, 64, 1]
    terms = tf.fill(window, tf.constant(30.0, dtype))
    return {"value": terms, "ksize": window, "strides": window, "padding": "VALID"}, 30.0


def _segments(expected: float) -> Callable[..., tuple[dict[str, Any], float]]:
    return lambda dtype, _: ({"data": _ones(dtype), "segment_ids": _all_to_one()}, expected)


def _unsorted_segments(dtype: tf.DType, _: None) -> tuple[dict[str, Any], float]:
    arguments, expected = _segments(_FEW_TERMS)(dtype, None)
    return {**arguments, "num_segments": 1}, expected


def _scattered(dtype: tf.DType, _: None) -> tuple[dict[str, Any], float]:
    return {"indices": _all_to_one(1), "updates": _ones(dtype), "shape": [1]}, _FEW_TERMS


def _scattered_into(expected: float) -> Callable[..., tuple[dict[str, Any], float]]:
    def example(dtype: tf.DType, _: None) -> tuple[dict[str, Any], float]:
        tensor = tf.zeros([1], dtype)
        return {"tensor": tensor, "indices": _all_to_one(1), "updates": _ones(dtype)}, expected

    return example


def _sparse_row(dtype: tf.DType, _: None) -> tuple[dict[str, Any], float]:
    return {
        "a_indices": [[0, i] for i in range(_FEW_TERMS)],
        "a_values": _ones(dtype),
        "a_shape": [1, _FEW_TERMS],
        "b": _ones(dtype, _FEW_TERMS, 1),
    }, _FEW_TERMS


def _depthwise_filter(dtype: tf.DType, _: None) -> tuple[dict[str, Any], float]:
    return {
        "input": _ones(dtype, _FEW_TERMS, 3, 3, 1),
        "filter_sizes": [3, 3, 1, 1],
        "out_backprop": _ones(dtype, _FEW_TERMS, 1, 1, 1),
        "strides": [1, 1, 1, 1],
        "padding": "VALID",
    }, _FEW_TERMS


def _one_pixel(dtype: tf.DType, _: None) -> tuple[dict[str, Any], float]:
    return {"grads": _ones(dtype, 1, _FEW_TERMS // 64, 64, 1), "size": [1, 1]}, _FEW_TERMS


_FLOAT16 = (tf.float16,)
_REDUCTIONS = ((True,), (True, False))

# Most add up a vector of ones or of 1/32, so that right sums are powers of two.
KERNELS: dict[str, Kernel] = {
    "BiasAddGrad": Kernel(
        "gen_nn_ops",
        ("bias_add_grad",),
        _bias,
        _bias_layout,
        ("NHWC", "NCHW", "wide NHWC"),
        _sum_of_all_but_channels,
    ),
    "Sum": Kernel("gen_math_ops", ("_sum",), _sum_of_rows(_TERMS / 32), _reduction, _REDUCTIONS),
    "Mean": Kernel("gen_math_ops", ("mean",), _sum_of_rows(1 / 32), _reduction, _REDUCTIONS),
    "EuclideanNorm": Kernel(
        "gen_math_ops", ("euclidean_norm",), _sum_of_rows(_TERMS**0.5 / 32), _reduction, _REDUCTIONS
    ),
    "AvgPool": Kernel("gen_nn_ops", ("avg_pool",), _large_window, _is_large_window, (True,)),
    "Softmax": Kernel(
        "gen_nn_ops",
        ("softmax",),
        _many_classes(1 / _TERMS),
        _has_many_classes,
        (True,),
        wrong_in_xla=_FLOAT16,
    ),
    "LogSoftmax": Kernel(
        "gen_nn_ops",
        ("log_softmax",),
        _many_classes(-math.log(_TERMS)),
        _has_many_classes,
        (True,),
        wrong_in_xla=_FLOAT16,
    ),
    "Cumsum": Kernel(
        "gen_math_ops",
        ("cumsum",),
        lambda dtype, _: ({"x": _ones(dtype), "axis": 0}, _FEW_TERMS),
    ),
    "SegmentSum": Kernel("gen_math_ops", ("segment_sum",), _segments(_FEW_TERMS)),
    "SegmentMean": Kernel("gen_math_ops", ("segment_mean",), _segments(1)),
    "UnsortedSegmentSum": Kernel(
        "gen_math_ops",
        ("unsorted_segment_sum",),
        _unsorted_segments,
        wrong_in_xla=LOW_PRECISION,
    ),
    "ScatterNd": Kernel("gen_array_ops", ("scatter_nd",), _scattered, wrong_in_xla=LOW_PRECISION),
    "TensorScatterAdd": Kernel(
        "gen_array_ops",
        ("tensor_scatter_add", "tensor_scatter_nd_add"),
        _scattered_into(_FEW_TERMS),
        wrong_in_xla=LOW_PRECISION,
    ),
    "TensorScatterSub": Kernel(
        "gen_array_ops",
        ("tensor_scatter_sub", "tensor_scatter_nd_sub"),
        _scattered_into(-_FEW_TERMS),
        wrong_in_xla=LOW_PRECISION,
    ),
    "SparseTensorDenseMatMul": Kernel(
        "gen_sparse_ops", ("sparse_tensor_dense_mat_mul",), _sparse_row
    ),
    "DepthwiseConv2dNativeBackpropFilter": Kernel(
        "gen_nn_ops", ("depthwise_conv2d_native_backprop_filter",), _depthwise_filter
    ),
    "ResizeNearestNeighborGrad": Kernel(
        "gen_image_ops", ("resize_nearest_neighbor_grad",), _one_pixel
    ),
}

_TABLE = Table(KERNELS, "and may stop short of sums in 16 bits")
install, is_wrong = _TABLE.install, _TABLE.is_wrong


def enable_float32_sums(enabled: bool = True) -> None:
    """Switches the float32 sums of 16-bit numbers on or off.

    It is on, in the whole process, once a policy that computes in 16 bits has been made or an
    `autocast_scope` of 16 bits entered. A `tf.function` keeps what it was traced with.

    Args:
        enabled: bool. False gives TensorFlow's own sums.

    Example:

    >>> x = tf.zeros([10_000, 1], tf.bfloat16)
    >>> with keras_mp.autocast_scope("bfloat16"), tf.GradientTape() as tape:
    ...     bias = tf.zeros([1], tf.bfloat16)
    ...     tape.watch(bias)
    ...     y = tf.nn.bias_add(x, bias)
    >>> tape.gradient(y, bias).numpy().item()  # 10,000 in bfloat16
    9984.0

    TensorFlow's own answer on CPUs is 256.
    """
    _TABLE.enabled = enabled


def are_enabled() -> bool:
    """Whether 16-bit numbers are added up in float32 where TensorFlow's sum is wrong."""
    return _TABLE.enabled
