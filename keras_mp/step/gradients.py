"""The arithmetic of loss scaling: scales and unscales gradients, and tests them for Inf and NaN.

RFC 293, "LossScaleOptimizer Overview". This module needs TensorFlow only. A gradient is a tensor, a
`tf.IndexedSlices` (which stays sparse) or None (which stays None).
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

from keras_mp.support import host

Gradient = tf.Tensor | tf.IndexedSlices | None

# The dtype of counts, which are exact up to 2**53. For int64, GPUs have no kernels that sum up
# segments, split or reverse: the host would wait for the counts.
COUNTS = tf.float64

# From this many values on, the arithmetic costs more than the call (measured on 2 cores).
_MANY = 2**13


def convert(gradients: Any) -> list[Gradient]:
    """Converts the values of a flat iterable to gradients.

    Args:
        gradients: iterable of tensors, arrays, `tf.IndexedSlices` and None.

    Returns:
        list of gradients.

    Raises:
        TypeError: a value is something else, or `gradients` is not flat.
    """
    is_one = tf.is_tensor(gradients) or isinstance(gradients, (str, dict))
    if is_one or not isinstance(gradients, Iterable):
        raise TypeError(
            "Expected a flat list of gradients, each a tensor, a tf.IndexedSlices or None. "
            f"Received: {gradients!r} (of type {type(gradients)})"
        )
    return [map_values(lambda g: g, gradient) for gradient in list[Any](gradients)]


def scale_loss(loss: tf.Tensor, loss_scale: tf.Tensor) -> tf.Tensor:
    """Multiplies a loss by the loss scale.

    Args:
        loss: float tensor of any shape. A float16 or bfloat16 loss is cast to float32 first:
            `2**16`, an ordinary loss scale, is infinite in float16.
        loss_scale: float32 scalar tensor.

    Returns:
        The scaled loss, in float32, or in float64 if `loss` is.

    Raises:
        TypeError: `loss` is not a floating-point tensor.
    """
    if loss is None or isinstance(loss, (list, tuple, dict)):
        raise TypeError(
            "The loss must be one tensor, or a callable that returns one; add several losses up "
            f"before scaling them. Received: loss={loss!r} (of type {type(loss)})"
        )
    loss = tf.convert_to_tensor(loss)
    if not loss.dtype.is_floating:
        raise TypeError(
            "Only a floating-point loss can be scaled. "
            f"Received: loss={loss!r} (of dtype {loss.dtype.name})"
        )
    if loss.dtype.size < tf.float32.size:
        loss = tf.cast(loss, tf.float32)
    return loss * tf.cast(loss_scale, loss.dtype)


def scale(gradients: Sequence[Gradient], loss_scale: tf.Tensor) -> list[Gradient]:
    """Multiplies gradients by the loss scale, each in its own dtype.

    Args:
        gradients: sequence of gradients.
        loss_scale: float32 scalar tensor.

    Returns:
        list of gradients.
    """
    return _multiply(gradients, lambda dtype: tf.cast(loss_scale, dtype))


def unscale(gradients: Sequence[Gradient], loss_scale: tf.Tensor) -> list[Gradient]:
    """Divides gradients by the loss scale, each in its own dtype.

    Args:
        gradients: sequence of gradients.
        loss_scale: float32 scalar tensor, of a value whose reciprocal float32 holds too.

    Returns:
        list of gradients: bitwise the quotients where the scale is a power of two, within one unit
        in the last place of them otherwise.
    """
    # A product takes half the time of a quotient.
    return _multiply(gradients, lambda dtype: 1 / tf.cast(loss_scale, dtype))


def all_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Whether every value of every gradient is finite.

    Where possible it tests sums, which takes a fraction of the time of testing each value: if a
    value is not finite, neither is the sum. Finite unscaled gradients whose sum overflows float32
    are useless, too.

    Args:
        gradients: sequence of gradients, unscaled. In a sparse one, the sums over equal indices
            have to be finite too, since an optimizer adds these up.

    Returns:
        bool scalar tensor; True if there is nothing to test.
    """
    for_xla = host.is_compiled_by_xla()
    all_axes = functools.cache(lambda rank: tf.constant(list(range(rank)), tf.int32))
    alike: dict[Any, list[tf.Tensor]] = {}
    for gradient in gradients:
        if gradient is None or gradient.dtype.is_integer:
            continue
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        values = _magnitudes_of_sums(gradient) if is_sparse else gradient
        if values.dtype.is_complex:
            values = tf.math.real(values) + tf.math.imag(values)
        together = values.shape.is_fully_defined() and (for_xla or _is_small(values))
        kind = values.dtype, tuple(values.shape.as_list()) if together else id(values)
        alike.setdefault(kind, []).append(values)
    verdicts = []
    totals: dict[tf.DType, list[tf.Tensor]] = {}
    for (dtype, _), values in alike.items():
        if for_xla:
            # One loop for all of them. On CPUs XLA adds up one value after the other. In float32
            # it would also miss values that are infinite in float16, since it leaves out a cast to
            # float16 that is followed by one back.
            are_finite = functools.reduce(tf.logical_and, map(tf.math.is_finite, values))
            verdicts.append(tf.reduce_all(are_finite))
        elif dtype == tf.float16:  # whose sums may pass 65504
            verdicts += [tf.reduce_all(tf.math.is_finite(v)) for v in values]
        else:
            total = _add(values)
            axes = None if total.shape.rank is None else all_axes(total.shape.rank)
            totals.setdefault(dtype, []).append(tf.reduce_sum(total, axes))
    verdicts += [tf.math.is_finite(_add(of_dtype)) for of_dtype in totals.values()]
    if len(verdicts) == 1:
        return verdicts[0]
    return tf.reduce_all(tf.stack(verdicts)) if verdicts else tf.constant(True)


def count_not_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Counts in each gradient the values that are not finite.

    Args:
        gradients: sequence of gradients.

    Returns:
        `COUNTS` tensor of shape [gradients, 3]: the number of infinite values; that of NaNs; and 1
        if every value is finite but a sum that `all_finite` tests is not, else 0.
    """
    alike: dict[tf.DType, list[int]] = {}
    rows, order = [], []
    for i, gradient in enumerate(gradients):
        if gradient is not None and gradient.dtype.is_floating and _is_small(gradient):
            alike.setdefault(gradient.dtype, []).append(i)
    groups = [group for group in alike.values() if len(group) > 1]
    for i in sorted(set(range(len(gradients))).difference(*groups)):
        gradient = gradients[i]
        if gradient is None or gradient.dtype.is_integer:
            rows.append(tf.zeros([1, 3], COUNTS))
        elif isinstance(gradient, tf.IndexedSlices):
            rows.append(_count_one(gradient))
        else:
            rows.append(_counter(gradient.dtype)(gradient))
        order.append(i)
    for group in groups:
        rows.append(_count_group([gradients[i] for i in group]))
        order += group
    counts = tf.concat(rows, 0) if len(rows) > 1 else rows[0]
    return counts if order == sorted(order) else tf.gather(counts, np.argsort(order))


def _count_group(group: list[Any]) -> tf.Tensor:
    """Returns the rows of `count_not_finite` of small tensors of one dtype, together."""
    values = _concat(group)
    sizes = [tensor.shape.num_elements() for tensor in group]
    whose = tf.constant(np.repeat(np.arange(len(group)), sizes))
    count = tf.constant(len(group))

    def add(of_each: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(of_each, whose, count)

    infs, nans = (add(tf.cast(kind, COUNTS)) for kind in _infs_and_nans(values))
    sums = tf.zeros([len(group)])
    if values.dtype != tf.float16 and not host.is_compiled_by_xla():
        sums = add(values)
    is_only_sum = tf.equal(infs + nans, 0) & tf.logical_not(tf.math.is_finite(sums))
    return tf.stack([infs, nans, tf.cast(is_only_sum, COUNTS)], 1)


@functools.cache
def _counter(dtype: tf.DType) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns `_count_one` for tensors of a dtype, which is one operation for each of them."""
    return host.shared_operation(_count_one, [tf.TensorSpec(None, dtype)])  # pyright: ignore[reportArgumentType]


def _count_one(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Returns the row of `count_not_finite` of one gradient, of shape [1, 3]."""
    if not isinstance(gradient, tf.IndexedSlices):
        # In one dimension, since TensorFlow computes the axes of a tensor of unknown rank.
        gradient = tf.reshape(gradient, [-1])
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    counts = [tf.reduce_sum(tf.cast(kind, COUNTS)) for kind in _infs_and_nans(values)]
    is_only_sum = tf.logical_not(all_finite([gradient])) & tf.equal(tf.add_n(counts), 0)
    return tf.stack([[*counts, tf.cast(is_only_sum, COUNTS)]])


def cast(
    gradients: Sequence[Gradient], dtypes: Collection[tf.DType], dtype: tf.DType
) -> list[Gradient]:
    """Casts the gradients in some dtypes to another one.

    Args:
        gradients: sequence of gradients.
        dtypes: collection of DType.
        dtype: DType.

    Returns:
        list of gradients; those in other dtypes as they are.
    """
    return [_cast(g, dtype) if g is not None and g.dtype in dtypes else g for g in gradients]


def cast_as(gradients: Sequence[Gradient], models: Sequence[Gradient]) -> list[Gradient]:
    """Casts gradients to the dtypes of others.

    Args:
        gradients: sequence of gradients.
        models: sequence of gradients of the same length.

    Returns:
        list of gradients.
    """
    pairs = zip(gradients, models, strict=True)
    return [g if g is None or m is None else _cast(g, m.dtype) for g, m in pairs]


def pack(
    gradients: Sequence[Gradient],
) -> tuple[list[Gradient], Callable[[list[Gradient]], list[Gradient]]]:
    """Joins small gradients of one dtype end to end, so that one operation handles them all.

    Args:
        gradients: sequence of gradients.

    Returns:
        tuple of a list of gradients, in which large ones, sparse ones and None are as they were,
        and of a function that turns such a list back into one gradient for each of `gradients`.
    """
    alike: dict[tf.DType, dict[int, tf.Tensor]] = {}
    for i, gradient in enumerate(gradients):
        if _is_small(gradient):
            alike.setdefault(gradient.dtype, {})[i] = gradient
    joined = [group for group in alike.values() if len(group) > 1]
    alone = sorted(set(range(len(gradients))).difference(*joined))
    packed = [_concat(list(group.values())) for group in joined]

    def unpack(packed: list[Any]) -> list[Gradient]:
        # A constant for each shape, not for each gradient: graphs are smaller.
        constant = functools.cache(lambda shape: tf.constant(shape, tf.int32))
        unpacked = dict(zip(alone, packed[len(joined) :], strict=True))
        for group, values in zip(joined, packed):
            shapes: list[Any] = [tuple(gradient.shape) for gradient in group.values()]
            parts = tf.split(values, [math.prod(shape) for shape in shapes])
            for i, part, shape in zip(group, parts, shapes, strict=True):
                unpacked[i] = tf.reshape(part, constant(shape))
        return [unpacked[i] for i in range(len(gradients))]

    return [*packed, *(gradients[i] for i in alone)], unpack


def checked_pairs(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Checks the pairs that are to be applied, before anything is changed.

    Args:
        pairs: iterable of (gradient, variable) pairs.

    Returns:
        list of pairs of gradients, as `convert` returns them, and variables.

    Raises:
        TypeError: these are not pairs, or a second element is not a variable.
        ValueError: no variable has a gradient, or the call is in a cross-replica context.
    """
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Gradients are applied in a replica context: call this inside the function that is "
            "passed to `strategy.run`."
        )
    pairs = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or pair[1] is None or isinstance(pair[1], _NO_VARIABLES):
            raise TypeError(
                "Expected (gradient, variable) pairs, such as zip(gradients, variables). "
                f"Received: {pair!r}"
            )
    gradients, variables = convert(g for g, _ in pairs), [v for _, v in pairs]
    if pairs and all(g is None for g in gradients):
        raise ValueError(
            "No gradients provided for any variable: "
            f"{[v.name for v in variables]}. Is the loss computed from them, under the tape? "
            f"Received: {gradients!r}"
        )
    return list(zip(gradients, variables, strict=True))


_NO_VARIABLES = (tf.Tensor, tf.IndexedSlices, float, int, str)


def _is_small(gradient: Gradient) -> TypeGuard[tf.Tensor]:
    """Whether it is a tensor for which an operation of its own costs more than its arithmetic."""
    if not isinstance(gradient, tf.Tensor):
        return False
    size = gradient.shape.num_elements()
    return size is not None and size < _MANY


def _concat(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Joins the values of tensors end to end."""
    flat = tf.constant([-1])
    return tf.concat([tf.reshape(tensor, flat) for tensor in tensors], 0)


def _add(tensors: list[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(tensors) if len(tensors) > 1 else tensors[0]


def _infs_and_nans(values: tf.Tensor) -> list[tf.Tensor]:
    """Returns two bool tensors: where values are infinite, and where they are NaN."""
    if values.dtype.is_complex:
        parts = [_infs_and_nans(part) for part in (tf.math.real(values), tf.math.imag(values))]
        infs, nans = (tf.logical_or(*kinds) for kinds in zip(*parts))
        return [tf.logical_and(infs, tf.logical_not(nans)), nans]
    return [tf.math.is_inf(values), tf.math.is_nan(values)]


def _magnitudes_of_sums(gradient: tf.IndexedSlices) -> tf.Tensor:
    """Returns bounds of the sums over equal indices; infinite where such a sum could overflow."""
    magnitudes = tf.abs(gradient.values)
    if gradient.dtype != tf.float16:
        # All rows together: nothing sound comes near the largest float32.
        return tf.reduce_sum(magnitudes, axis=0)
    # float16 ends at 65504, which many rows together may well pass while none of them does.
    order = tf.argsort(gradient.indices)
    indices = tf.gather(gradient.indices, order)
    is_new = tf.concat(
        [tf.zeros_like(indices[:1]), tf.cast(indices[1:] != indices[:-1], indices.dtype)], 0
    )
    sums = tf.math.unsorted_segment_sum(
        tf.cast(tf.gather(magnitudes, order), tf.float32), tf.cumsum(is_new), tf.size(indices)
    )
    return tf.cast(sums, tf.float16)


def map_values(fn: Callable[[tf.Tensor], tf.Tensor], gradient: Gradient) -> Gradient:
    """Applies a function to the values of a gradient.

    Args:
        fn: takes and returns a tensor.
        gradient: tensor, value that converts to one, `tf.IndexedSlices` or None.

    Returns:
        A gradient of the same kind.

    Raises:
        TypeError: `gradient` is a nested structure.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(fn(gradient.values), gradient.indices, gradient.dense_shape)
    if isinstance(gradient, (list, tuple, dict, str)):
        raise TypeError(
            "A gradient must be a tensor, a tf.IndexedSlices or None. "
            f"Received: {gradient!r} (of type {type(gradient)})"
        )
    return fn(tf.convert_to_tensor(gradient))


def _multiply(
    gradients: Sequence[Gradient], factor_in: Callable[[tf.DType], tf.Tensor]
) -> list[Gradient]:
    factor = functools.cache(factor_in)

    def multiply(gradient: tf.Tensor) -> tf.Tensor:
        dtype = gradient.dtype
        # A loss scale above 65504 has no finite float16 value, so gradients of low precision are
        # multiplied in float32.
        if dtype.size < tf.float32.size:
            return tf.cast(tf.cast(gradient, tf.float32) * factor(tf.float32), dtype)
        # In eager the raw operation takes less than half of the operator's time.
        return tf.raw_ops.Mul(x=gradient, y=factor(dtype))

    return [map_values(multiply, gradient) for gradient in gradients]


def _cast(gradient: Gradient, dtype: tf.DType) -> Gradient:
    return map_values(lambda g: tf.cast(g, dtype), gradient)
