"""Sums of 16-bit numbers, added up in float32 where TensorFlow's kernel stops short of the sum.

A kernel that keeps its running sum in bfloat16 stops at 256, since 256 + 1 rounds to 256; in
float16 it stops at 2048. TensorFlow has several: the gradient of a bias, of an embedding, of
whatever was broadcast, and some reductions themselves. `KERNELS` is the table of them.

This module needs TensorFlow only.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.kernels.replaced import Kernel, Table, in_float32

# So many that 16 bits stop short of their sum, even shared out among dozens of lanes and threads.
_TERMS = 2**17
# Enough for what adds one term after the other.
_FEW_TERMS = 2**13


def _reduction(input: Any, axis: Any, *args: Any, **kwargs: Any) -> tuple[bool, ...] | bool:
    """Which groups of neighbouring axes are added up: (True, False) are rows, added together."""
    del args, kwargs
    shape, axes = tf.TensorShape(getattr(input, "shape", None)), tf.get_static_value(axis)
    if shape.rank is None or axes is None:
        return True, False  # the layout for which most kernels are wrong
    reduced = {int(a) % shape.rank for a in np.ravel(axes)} if shape.rank else set()
    flags = [i in reduced for i, size in enumerate(shape.as_list()) if size != 1]
    return any(flags) and tuple(flag for flag, _ in itertools.groupby(flags))


def _probe_reduction(reduce: Callable[..., tf.Tensor], expected: float) -> Callable[..., Any]:
    def probe(dtype: tf.DType, pattern: tuple[bool, ...]) -> tuple[tf.Tensor, float]:
        axes = [i for i, reduced in enumerate(pattern) if reduced]
        sizes = [2] * len(pattern)  # so that many groups take no more memory than few
        if not pattern[-1]:
            sizes[-1] = 8
        sizes[axes[0]] = _TERMS // 2 ** (len(axes) - 1)
        terms = tf.fill(sizes, tf.constant(1 / 32, dtype))
        return _first(reduce(input=terms, axis=axes)), expected

    return probe


def _first(result: tf.Tensor) -> tf.Tensor:
    return tf.reshape(result, [-1])[0]


def _ones(dtype: tf.DType, *shape: int) -> tf.Tensor:
    return tf.ones(shape or [_FEW_TERMS], dtype)


def _all_to_one(*shape: int) -> tf.Tensor:
    """The place to which all terms belong."""
    return tf.zeros([_FEW_TERMS, *shape], tf.int32)


def _bias_format(out_backprop: Any, data_format: Any = None, name: Any = None) -> str:
    del out_backprop, name
    return tf.compat.as_str(data_format or "NHWC")


def _sum_of_all_but_channels(
    stock: Callable[..., Any], out_backprop: Any, data_format: Any = None, name: Any = None
) -> Any:
    """A sum of the same terms, itself mended where it is wrong; else it needs no float32 copy."""
    rank = out_backprop.shape.rank
    if rank is None:
        return in_float32(stock, out_backprop, data_format=data_format, name=name)
    channels = 1 if _bias_format(out_backprop, data_format) == "NCHW" else rank - 1
    return tf.reduce_sum(out_backprop, [i for i in range(rank) if i != channels], name=name)


def _probe_bias(dtype: tf.DType, data_format: str) -> tuple[tf.Tensor, float]:
    shape = [_TERMS // 64, 4, 8, 8] if data_format == "NCHW" else [_TERMS, 4]
    terms = tf.fill(shape, tf.constant(1 / 32, dtype))
    return _first(tf.raw_ops.BiasAddGrad(out_backprop=terms, data_format=data_format)), _TERMS / 32


def _is_wide(logits: Any, name: Any = None) -> bool:
    """Are there so many classes that the sum of their exponentials may leave float16's range?"""
    del name
    shape = tf.TensorShape(getattr(logits, "shape", None))
    return bool(shape.rank) and (shape[-1] or 0) > float(tf.float16.max)


def _probe_softmax(softmax: Callable[..., tf.Tensor], expected: float) -> Callable[..., Any]:
    def probe(dtype: tf.DType, _: bool) -> tuple[tf.Tensor, float]:
        return _first(softmax(logits=tf.zeros([1, _TERMS], dtype))), expected

    return probe


def _is_large_window(value: Any, ksize: Any, *args: Any, **kwargs: Any) -> bool:
    """Does it add up so much, before it divides, that float16 rounds it or overflows?"""
    del value, args, kwargs
    return int(np.prod(ksize)) >= 64


def _probe_average(dtype: tf.DType, _: bool) -> tuple[tf.Tensor, float]:
    window = [1, 64, 64, 1]
    terms = tf.fill(window, tf.constant(30.0, dtype))
    average = tf.raw_ops.AvgPool(value=terms, ksize=window, strides=window, padding="VALID")
    return _first(average), 30.0


# What most add up is a vector of ones or of 1/32, so that right sums are powers of two.
KERNELS: dict[str, Kernel] = {
    "BiasAddGrad": Kernel(
        "gen_nn_ops", ("bias_add_grad",), _probe_bias, _bias_format, _sum_of_all_but_channels
    ),
    "Sum": Kernel(
        "gen_math_ops", ("_sum",), _probe_reduction(tf.raw_ops.Sum, _TERMS / 32), _reduction
    ),
    "Mean": Kernel(
        "gen_math_ops", ("mean",), _probe_reduction(tf.raw_ops.Mean, 1 / 32), _reduction
    ),
    "EuclideanNorm": Kernel(
        "gen_math_ops",
        ("euclidean_norm",),
        _probe_reduction(tf.raw_ops.EuclideanNorm, _TERMS**0.5 / 32),
        _reduction,
    ),
    "AvgPool": Kernel("gen_nn_ops", ("avg_pool",), _probe_average, _is_large_window),
    "Softmax": Kernel(
        "gen_nn_ops", ("softmax",), _probe_softmax(tf.raw_ops.Softmax, 1 / _TERMS), _is_wide
    ),
    "LogSoftmax": Kernel(
        "gen_nn_ops",
        ("log_softmax",),
        _probe_softmax(tf.raw_ops.LogSoftmax, -math.log(_TERMS)),
        _is_wide,
    ),
    "Cumsum": Kernel(
        "gen_math_ops",
        ("cumsum",),
        lambda dtype, _: (tf.raw_ops.Cumsum(x=_ones(dtype), axis=0)[-1], _FEW_TERMS),
    ),
    "SegmentSum": Kernel(
        "gen_math_ops",
        ("segment_sum",),
        lambda dtype, _: (
            tf.raw_ops.SegmentSum(data=_ones(dtype), segment_ids=_all_to_one())[0],
            _FEW_TERMS,
        ),
    ),
    "SegmentMean": Kernel(
        "gen_math_ops",
        ("segment_mean",),
        lambda dtype, _: (
            tf.raw_ops.SegmentMean(data=_ones(dtype), segment_ids=_all_to_one())[0],
            1,
        ),
    ),
    "UnsortedSegmentSum": Kernel(
        "gen_math_ops",
        ("unsorted_segment_sum",),
        lambda dtype, _: (
            tf.raw_ops.UnsortedSegmentSum(
                data=_ones(dtype), segment_ids=_all_to_one(), num_segments=1
            )[0],
            _FEW_TERMS,
        ),
    ),
    "ScatterNd": Kernel(
        "gen_array_ops",
        ("scatter_nd",),
        lambda dtype, _: (
            tf.raw_ops.ScatterNd(indices=_all_to_one(1), updates=_ones(dtype), shape=[1])[0],
            _FEW_TERMS,
        ),
    ),
    "TensorScatterAdd": Kernel(
        "gen_array_ops",
        ("tensor_scatter_add", "tensor_scatter_nd_add"),
        lambda dtype, _: (
            tf.raw_ops.TensorScatterAdd(
                tensor=tf.zeros([1], dtype), indices=_all_to_one(1), updates=_ones(dtype)
            )[0],
            _FEW_TERMS,
        ),
    ),
    "TensorScatterSub": Kernel(
        "gen_array_ops",
        ("tensor_scatter_sub", "tensor_scatter_nd_sub"),
        lambda dtype, _: (
            tf.raw_ops.TensorScatterSub(
                tensor=tf.zeros([1], dtype), indices=_all_to_one(1), updates=_ones(dtype)
            )[0],
            -_FEW_TERMS,
        ),
    ),
    "SparseTensorDenseMatMul": Kernel(
        "gen_sparse_ops",
        ("sparse_tensor_dense_mat_mul",),
        lambda dtype, _: (
            _first(
                tf.raw_ops.SparseTensorDenseMatMul(
                    a_indices=[[0, i] for i in range(_FEW_TERMS)],
                    a_values=_ones(dtype),
                    a_shape=[1, _FEW_TERMS],
                    b=_ones(dtype, _FEW_TERMS, 1),
                )
            ),
            _FEW_TERMS,
        ),
    ),
    "DepthwiseConv2dNativeBackpropFilter": Kernel(
        "gen_nn_ops",
        ("depthwise_conv2d_native_backprop_filter",),
        lambda dtype, _: (
            _first(
                tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
                    input=_ones(dtype, _FEW_TERMS, 3, 3, 1),
                    filter_sizes=[3, 3, 1, 1],
                    out_backprop=_ones(dtype, _FEW_TERMS, 1, 1, 1),
                    strides=[1, 1, 1, 1],
                    padding="VALID",
                )
            ),
            _FEW_TERMS,
        ),
    ),
    "ResizeNearestNeighborGrad": Kernel(
        "gen_image_ops",
        ("resize_nearest_neighbor_grad",),
        lambda dtype, _: (
            _first(
                tf.raw_ops.ResizeNearestNeighborGrad(
                    grads=_ones(dtype, 1, _FEW_TERMS // 64, 64, 1), size=[1, 1]
                )
            ),
            _FEW_TERMS,
        ),
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
    """Are 16-bit numbers to be added up in float32 where TensorFlow's sum is wrong?"""
    return _TABLE.enabled
