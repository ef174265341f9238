"""Replicas sum gradients, share the verdict and update shared variables.

RFC 293, "All-reducing in float16". This module needs TensorFlow only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from keras_mp.step.gradients import map_values
from keras_mp.support import features, validation
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import LOW_PRECISION_NAMES, parse
from keras_mp.tensorflow_api import replicas
from keras_mp.tensorflow_api.features import WITHOUT_MEETING

T = TypeVar("T")
State = TypeVar("State")

# A pack of this many bytes is sent as soon as its gradients are there, while other gradients are
# still being computed. By default TensorFlow makes one pack of all, which waits for the last
# gradient.
_BYTES_PER_PACK = 2**22
_REDUCE_DTYPES = (*LOW_PRECISION_NAMES, "float32")

_PLACES: Any = (tf.distribute, tf.compat.v1.distribute)


def _strategies(*names: str) -> tuple[type, ...]:
    modules = [module for place in _PLACES for module in (place, place.experimental)]
    return tuple(getattr(each, name) for each in modules for name in names if hasattr(each, name))


# Nothing was tested on TPUs.
_TPU_STRATEGIES = _strategies("TPUStrategy")
_OF_WORKERS = _strategies("MultiWorkerMirroredStrategy")
# The replicas of these strategies sum gradients and update together.
_SUPPORTED_STRATEGIES = (
    *(*_TPU_STRATEGIES, *_OF_WORKERS),
    *_strategies("OneDeviceStrategy", "MirroredStrategy", "CentralStorageStrategy"),
)


def check_strategy(may_skip: bool = True) -> None:
    """Refuses strategies whose replicas cannot share a verdict.

    Args:
        may_skip: bool. Whether a step may be skipped. If not, a ParameterServerStrategy works.

    Raises:
        ValueError: the current strategy is such a strategy.
    """
    strategy = tf.distribute.get_strategy()
    has_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    is_supported = isinstance(strategy, _SUPPORTED_STRATEGIES) or (has_servers and not may_skip)
    if is_supported or not tf.distribute.has_strategy():
        return
    raise ValueError(
        "Loss scaling that skips steps does not work under this strategy: its replicas cannot "
        "decide together, and would change one scale at the same time. Use a fixed scale without "
        "`skip_nonfinite` under ParameterServerStrategy, such as LossScaleOptimizer(optimizer, "
        "1024); else MirroredStrategy, OneDeviceStrategy, MultiWorkerMirroredStrategy or "
        "TPUStrategy; or train without loss scaling: "
        f'keras_mp.set_global_policy("mixed_bfloat16"). Received: {strategy}'
    )


def are_several() -> bool:
    """Whether the current strategy has several replicas."""
    return tf.distribute.get_strategy().num_replicas_in_sync > 1


def number_of_workers(strategy: Any = None) -> int:
    """Returns the number of processes with replicas that sum gradients together.

    Args:
        strategy: a strategy. Defaults to the current one.
    """
    strategy = strategy or tf.distribute.get_strategy()
    if not isinstance(strategy, _OF_WORKERS):
        return 1
    # All of them have the same number of devices.
    return strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)


def to_reduce_dtype(
    reduce_dtype: Any, choices: tuple[str, ...] = _REDUCE_DTYPES, hint: str = ""
) -> tf.DType:
    """Converts a `reduce_dtype` argument to a DType.

    Args:
        reduce_dtype: str, or DType.
        choices: tuple of str, the allowed dtypes. Defaults to float16, bfloat16 and float32.
        hint: str, advice for the error. Defaults to none.

    Returns:
        A DType.

    Raises:
        TypeError: it is not a dtype.
        ValueError: it is another dtype.
    """
    # TensorFlow numbers its dtypes.
    dtype = None if isinstance(reduce_dtype, int) else parse(reduce_dtype)
    if dtype is not None and dtype.name in choices:
        return dtype
    raise (TypeError if dtype is None else ValueError)(
        f"`reduce_dtype` must be one of {choices}.{hint} Received: reduce_dtype={reduce_dtype!r} "
        f"(of type {type(reduce_dtype)})"
    )


def reduce_dtype_of(reduce_dtype: Any, aggregate_in_float16: Any) -> tf.DType:
    """Returns the dtype that two arguments specify together.

    Args:
        reduce_dtype: str, DType, or None, which leaves it to the other argument.
        aggregate_in_float16: bool, or None, which stands for True.

    Returns:
        A DType.

    Raises:
        TypeError: an argument is something else.
        ValueError: they contradict each other.
    """
    in_float16, hint = aggregate_in_float16, ""
    if in_float16 is not None:
        validation.boolean("aggregate_in_float16", in_float16)
        hint = f" Others and `aggregate_in_float16={in_float16}` contradict each other."
    choices = tuple(name for name in _REDUCE_DTYPES if in_float16 in (None, name == "float16"))
    default = "float32" if in_float16 is False else "float16"
    return to_reduce_dtype(default if reduce_dtype is None else reduce_dtype, choices, hint)


def all_reduce(gradients: Sequence[Any]) -> list[Any]:
    """Sums gradients over all replicas. Called in a replica context.

    Args:
        gradients: sequence of tensors and `tf.IndexedSlices`. In float16 they should be scaled, or
            small ones underflow; a sum that overflows comes back infinite.

    Returns:
        list of summed gradients, each in the dtype it came in.

    Source: RFC 293, "All-reducing in float16".
    """
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=_BYTES_PER_PACK)
    # Sparse gradients are gathered, which TensorFlow cannot do in bfloat16 but on TPUs.
    can_gather = isinstance(tf.distribute.get_strategy(), _TPU_STRATEGIES)
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
    if need_not_meet():
        return context.all_reduce(add, gradients, options)

    # `all_reduce` would register a gradient, and so keep the graph until the process ends. In
    # graphs of TensorFlow 1 it looks variables up by name, and does not find those of replicas.
    @do_not_convert
    def reduce(strategy: tf.distribute.Strategy, *values: Any) -> Any:
        return strategy.extended.batch_reduce_to(add, [(each, each) for each in values], options)

    return context.merge_call(reduce, args=tuple(gradients))


def need_not_meet() -> bool:
    """Whether this replica can reduce without a merge call.

    It can if it is the only one, or if the strategy needs none.
    """
    if not tf.distribute.has_strategy():
        return True
    return features.is_on(WITHOUT_MEETING) and replicas.reduces_alone()


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


def decide_for_all_replicas(
    decide: Callable[[Sequence[State], Callable[[], Any]], T],
    state: State,
    on_each: Callable[[State], Any],
) -> T:
    """Calls a function where a `tf.cond` may update variables that replicas share.

    Under strategies that use `merge_call`, such as MirroredStrategy on CPUs, that is the
    cross-replica context: a `tf.cond` in a replica context must not update a mirrored variable.

    Args:
        decide: called once with a list of the states of all replicas of this process, or of this
            replica only; and with a function without arguments that calls `on_each` on each
            replica. What it has of one replica has to be the same on all.
        state: object, the state of this replica.
        on_each: takes the state of the replica that it runs on.

    Returns:
        The result of `decide`.
    """
    if need_not_meet():
        return decide([state], lambda: on_each(state))

    @do_not_convert
    def cross_replica(strategy: tf.distribute.Strategy, all: State) -> T:
        on_replica = do_not_convert(functools.partial(on_each))
        call = functools.partial(strategy.extended.call_for_each_replica, on_replica, args=(all,))
        return decide(strategy.experimental_local_results(all), call)

    return tf.distribute.get_replica_context().merge_call(cross_replica, args=(state,))


def once_for_all_replicas(function: Callable[[], T]) -> T:
    """Calls a function once, where it may update variables that replicas share.

    Args:
        function: function without arguments. What it has of one replica has to be the same on all.

    Returns:
        The result of the function.
    """
    if tf.distribute.in_cross_replica_context():
        return function()
    return decide_for_all_replicas(lambda *_: function(), None, lambda _: None)


def number() -> int | None:
    """Returns the number of the replica that runs this code; None without several."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    number = tf.get_static_value(tf.convert_to_tensor(context.replica_id_in_sync_group))
    return None if number is None else int(number)


def local_id() -> int:
    """Returns the number of this replica in this process; 0 without several."""
    own = number()
    return 0 if own is None else own % len(tf.distribute.get_strategy().extended.worker_devices)


def _bits_as(dtype: tf.DType, gradient: Any) -> Any:
    is_same = gradient.dtype == dtype
    return gradient if is_same else map_values(lambda g: tf.bitcast(g, dtype), gradient)
