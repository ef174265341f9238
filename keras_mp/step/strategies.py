"""Which strategies loss scaling works under, and how their replicas add up.

RFC 293, "All-reducing in float16". Programs without a strategy import none of this, which needs
TensorFlow only.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import replicas
from keras_mp.step.gradients import map_values
from keras_mp.support.autograph import do_not_convert

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
    """Refuses strategies whose replicas cannot share a verdict."""
    strategy = tf.distribute.get_strategy()
    has_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    if isinstance(strategy, _SUPPORTED) or (has_servers and not may_skip):
        return
    raise ValueError(
        "Loss scaling that skips steps does not work under this strategy: its replicas cannot "
        "decide together, and would change one scale at the same time. Use a fixed scale without "
        "`skip_nonfinite` under ParameterServerStrategy, such as LossScaleOptimizer(optimizer, "
        "1024); else MirroredStrategy, OneDeviceStrategy, MultiWorkerMirroredStrategy or "
        "TPUStrategy; or train without loss scaling: "
        f'keras_mp.set_global_policy("mixed_bfloat16"). Received: {strategy}'
    )


def all_reduce(gradients: Sequence[Any]) -> list[Any]:
    """Sums gradients over all replicas, each in the dtype it came in."""
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=_BYTES_PER_PACK)
    # Sparse gradients are gathered, which TensorFlow cannot do in bfloat16 but on TPUs.
    can_gather = isinstance(tf.distribute.get_strategy(), _ON_TPUS)
    alike: dict[tf.DType, list[int]] = {}
    for i, gradient in enumerate(gradients):
        is_sparse = isinstance(gradient, tf.IndexedSlices) and not can_gather
        is_sent_as_float16 = is_sparse and gradient.dtype == tf.bfloat16
        alike.setdefault(tf.float16 if is_sent_as_float16 else gradient.dtype, []).append(i)
    # TensorFlow packs the tensors of one call, the last ones first, and cannot pack different
    # dtypes.
    received: dict[int, Any] = {}
    for dtype, group in alike.items():
        sums = _summed([_bits_as(dtype, gradients[i]) for i in group], options)
        received |= {i: _bits_as(gradients[i].dtype, each) for i, each in zip(group, sums)}
    return [received[i] for i in range(len(gradients))]


def _summed(
    gradients: list[Any],
    options: tf.distribute.experimental.CommunicationOptions | None = None,
) -> list[Any]:
    context, add = tf.distribute.get_replica_context(), tf.distribute.ReduceOp.SUM
    if replicas.need_not_meet():
        return context.all_reduce(add, gradients, options)

    # `all_reduce` would register a gradient, and so keep the graph until the process ends. In
    # graphs of TensorFlow 1 it looks variables up by name, and does not find those of replicas.
    @do_not_convert
    def reduce(strategy: tf.distribute.Strategy, *values: Any) -> Any:
        return strategy.extended.batch_reduce_to(add, [(each, each) for each in values], options)

    return context.merge_call(reduce, args=tuple(gradients))


def gather(values: tf.Tensor) -> tf.Tensor:
    """Stacks the values of all replicas."""
    # Replicas can only sum.
    context = tf.distribute.get_replica_context()
    count = context.num_replicas_in_sync
    is_own = tf.one_hot(context.replica_id_in_sync_group, count, dtype=values.dtype)
    [rows] = _summed([tf.reshape(is_own, [count, *(1 for _ in values.shape)]) * values])
    return rows


def _bits_as(dtype: tf.DType, gradient: Any) -> Any:
    is_same = gradient.dtype == dtype
    return gradient if is_same else map_values(lambda g: tf.bitcast(g, dtype), gradient)
