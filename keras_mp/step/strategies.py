"""What replicas do together: they sum gradients, agree and gather counts.

RFC 293, "All-reducing in float16". Programs without a strategy import none of this, which needs
TensorFlow only.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import gradients, replicas
from keras_mp.step.gradients import Gradient, map_values
from keras_mp.support import kept_casts, observers
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import is_low

# A pack of this many bytes is sent as soon as its gradients are there, while other gradients are
# still being computed. By default TensorFlow makes one pack of all, which waits for the last
# gradient.
_BYTES_PER_PACK = 2**22


def _named(*names: str) -> tuple[type, ...]:
    places: Any = (tf.distribute, tf.compat.v1.distribute)
    modules = [module for place in places for module in (place, place.experimental)]
    return tuple(getattr(each, name) for each in modules for name in names if hasattr(each, name))


# Nothing was tested on TPUs.
_ON_TPUS = _named("TPUStrategy")
# The replicas of these strategies sum gradients and update together.
_SUPPORTED = _ON_TPUS + _named(
    *("OneDeviceStrategy", "MirroredStrategy", "MultiWorkerMirroredStrategy"),
    "CentralStorageStrategy",
)


def check(may_skip: bool) -> None:
    """Refuses strategies whose replicas cannot share a verdict.

    Args:
        may_skip: bool. Whether a step may be skipped. If not, a ParameterServerStrategy works.

    Raises:
        ValueError: the current strategy is such a strategy.
    """
    strategy = tf.distribute.get_strategy()
    has_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    is_safe = isinstance(strategy, _SUPPORTED) or (has_servers and not may_skip)
    if is_safe or not tf.distribute.has_strategy():
        return
    raise ValueError(
        "Loss scaling that skips steps does not work under this strategy: its replicas cannot "
        "decide together, and would change one scale at the same time. Use a fixed scale without "
        "`skip_nonfinite` under ParameterServerStrategy, such as LossScaleOptimizer(optimizer, "
        "1024); else MirroredStrategy, OneDeviceStrategy, MultiWorkerMirroredStrategy or "
        "TPUStrategy; or train without loss scaling: "
        f'keras_mp.set_global_policy("mixed_bfloat16"). Received: {strategy}'
    )


def check_step(
    scaler: Any, optimizer: Any, grads: Sequence[Gradient], facts: Mapping[str, Any]
) -> None:
    """Checks the strategy, and lets workers check that they make the same step.

    Args:
        scaler: the `Scaler` of the step, or None. It may have been made outside of the strategy's
            scope.
        optimizer: the optimizer.
        grads: sequence of the gradients of this replica.
        facts: dict of what has to be the same on all workers, by name.
    """
    if scaler is not None:
        check(scaler.can_skip)
    if replicas.number_of_workers() > 1:
        facts = {"loss_scale": scaler and scaler.loss_scale, **facts}
        observers.tell(observers.Observer.workers_meet, scaler or optimizer, grads, facts)


def sum_scaled(
    grads: Sequence[Gradient], scaled_by: Any, divisor: Any, reduce_dtype: tf.DType, may_skip: bool
) -> tuple[list[Any], Callable[[list[Any]], list[Gradient]], list[Any]]:
    """Sums gradients over all replicas while they are scaled, and unscales the sums.

    In float16 small values would vanish otherwise; and a sum that overflows is harmless only if the
    step can be skipped.

    Args:
        grads: sequence of gradients.
        scaled_by: float32 scalar tensor, the factor of the loss; None if no loss is scaled.
        divisor: the same if the gradients are still scaled by it, else None.
        reduce_dtype: DType in which float32 gradients are summed.
        may_skip: bool. Whether the step may be skipped.

    Returns:
        tuple of the sums, packed; of the function that unpacks them; and of what was sent, packed.
    """
    packed, unpack = pack(grads)
    if reduce_dtype == tf.float16 and (not may_skip or scaled_by is None):
        reduce_dtype = tf.float32
    elif reduce_dtype == tf.float16 and divisor is None:
        packed, divisor = gradients.scale(packed, scaled_by), scaled_by
    dtypes = [each.dtype for each in packed]
    wide = [tf.float32 if d == tf.float16 and not may_skip else d for d in dtypes]
    to_send = [reduce_dtype if d == tf.float32 else d for d in wide]
    sent = list(map(cast, map(cast, packed, wide), to_send))
    sums = map(cast, all_reduce(sent), wide)
    # They are unscaled while they are packed: one operation for many small gradients.
    return list(map(cast, gradients.unscale(list(sums), divisor), dtypes)), unpack, sent


def agree(finite: tf.Tensor) -> tf.Tensor:
    """Returns whether a verdict is True on all replicas."""
    return tf.math.is_finite(*all_reduce([gradients.of_verdict(finite)]))


def gather_rows(rows: Sequence[tf.Tensor]) -> tf.Tensor:
    """Stacks the rows of all replicas, in any context.

    Args:
        rows: sequence of the rows of the replicas of this process, or of this replica only.
    """
    strategy = tf.distribute.get_strategy()
    gathered = do_not_convert(lambda: gather(rows[replicas.local_id() % len(rows)]))
    if tf.distribute.in_cross_replica_context():
        gathered = functools.partial(strategy.extended.call_for_each_replica, gathered)
    stacked, *_ = strategy.experimental_local_results(gathered())
    return stacked


def cast(gradient: Any, dtype: tf.DType) -> Any:
    """Casts a gradient to a dtype."""

    def to_dtype(values: tf.Tensor) -> tf.Tensor:
        # The dtype only serves a sum in 16 bits: the result is cast back, and what overflows must
        # do so although XLA leaves pairs of casts out.
        is_rounded = values.dtype == tf.float32 and is_low(dtype)
        return kept_casts.to_16_bits(values, dtype) if is_rounded else tf.cast(values, dtype)

    return map_values(to_dtype, gradient)


def pack(grads: Sequence[Gradient]) -> tuple[list[Any], Callable[[list[Any]], list[Gradient]]]:
    """Joins small gradients of one dtype, so that one operation handles them all.

    Args:
        grads: sequence of gradients.

    Returns:
        tuple of a list of gradients without None, in which large and sparse ones are as they were,
        and of a function that turns such a list back into one gradient for each of `grads`.
    """
    groups = gradients.joined({i: each for i, each in enumerate(grads) if each is not None})
    # Joined ones are complete when the backward pass ends. Replicas send the first ones last.
    groups.sort(key=len, reverse=True)

    def unpack(packed: list[Any]) -> list[Gradient]:
        # One constant for each shape instead of each gradient makes graphs smaller.
        constant = functools.cache(lambda shape: tf.constant(shape, tf.int32))
        unpacked: dict[int, Any] = {}
        for group, values in zip(groups, packed, strict=True):
            parts = [values]
            if len(group) > 1:
                shapes: list[Any] = [tuple(gradient.shape) for gradient in group.values()]
                parts = tf.split(values, [math.prod(shape) for shape in shapes])
                parts = map(tf.reshape, parts, map(constant, shapes))
            unpacked.update(zip(group, parts))
        return [unpacked.get(i) for i in range(len(grads))]

    return [gradients.concat(list(group.values())) for group in groups], unpack


def all_reduce(values: Sequence[Any]) -> list[Any]:
    """Sums gradients over all replicas. Called in a replica context.

    Args:
        values: sequence of tensors and `tf.IndexedSlices`. In float16 they should be scaled, or
            small ones underflow; a sum that overflows comes back infinite.

    Returns:
        list of summed gradients, each in the dtype it came in.

    Source: RFC 293, "All-reducing in float16".
    """
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=_BYTES_PER_PACK)
    # Sparse gradients are gathered, which TensorFlow cannot do in bfloat16 but on TPUs.
    can_gather = isinstance(tf.distribute.get_strategy(), _ON_TPUS)
    alike: dict[tf.DType, list[int]] = {}
    for i, gradient in enumerate(values):
        is_sparse = isinstance(gradient, tf.IndexedSlices) and not can_gather
        is_sent_as_float16 = is_sparse and gradient.dtype == tf.bfloat16
        alike.setdefault(tf.float16 if is_sent_as_float16 else gradient.dtype, []).append(i)
    # TensorFlow packs the tensors of one call, the last ones first, and cannot pack different
    # dtypes.
    received: dict[int, Any] = {}
    for dtype, group in alike.items():
        sums = _summed([_bits_as(dtype, values[i]) for i in group], options)
        received |= {i: _bits_as(values[i].dtype, each) for i, each in zip(group, sums)}
    return [received[i] for i in range(len(values))]


def _summed(
    values: list[Any], options: tf.distribute.experimental.CommunicationOptions | None = None
) -> list[Any]:
    context, add = tf.distribute.get_replica_context(), tf.distribute.ReduceOp.SUM
    if replicas.need_not_meet():
        return context.all_reduce(add, values, options)

    # `all_reduce` would register a gradient, and so keep the graph until the process ends. In
    # graphs of TensorFlow 1 it looks variables up by name, and does not find those of replicas.
    @do_not_convert
    def reduce(strategy: tf.distribute.Strategy, *each_of: Any) -> Any:
        return strategy.extended.batch_reduce_to(add, [(each, each) for each in each_of], options)

    return context.merge_call(reduce, args=tuple(values))


def gather(values: tf.Tensor) -> tf.Tensor:
    """Stacks the values of all replicas. Called in a replica context.

    Args:
        values: tensor of numbers, of one shape on all replicas.

    Returns:
        tensor, the same on every replica. Its first axis has the replicas.
    """
    # Replicas can only sum.
    context = tf.distribute.get_replica_context()
    count = context.num_replicas_in_sync
    is_own = tf.one_hot(context.replica_id_in_sync_group, count, dtype=values.dtype)
    [rows] = _summed([tf.reshape(is_own, [count, *(1 for _ in values.shape)]) * values])
    return rows


def _bits_as(dtype: tf.DType, gradient: Any) -> Any:
    is_same = gradient.dtype == dtype
    return gradient if is_same else map_values(lambda g: tf.bitcast(g, dtype), gradient)
