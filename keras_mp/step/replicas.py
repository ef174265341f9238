"""Which replica this is, and where replicas may update variables that they share.

RFC 293, "All-reducing in float16". This module needs TensorFlow only.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from keras_mp.support import features, validation
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import LOW_PRECISION_NAMES, parse
from keras_mp.tensorflow_api.features import WITHOUT_MEETING
from keras_mp.tensorflow_api.replicas import reduces_alone

T = TypeVar("T")
State = TypeVar("State")

_REDUCE_DTYPES = (*LOW_PRECISION_NAMES, "float32")


def are_several() -> bool:
    """Whether the current strategy has several replicas."""
    return tf.distribute.get_strategy().num_replicas_in_sync > 1


def number_of_workers(strategy: Any = None) -> int:
    """Returns the number of processes with replicas that sum gradients together.

    Args:
        strategy: a strategy. Defaults to the current one.
    """
    strategy = strategy or tf.distribute.get_strategy()
    count = strategy.num_replicas_in_sync
    # All of them have the same number of devices.
    return 1 if count == 1 else max(1, count // len(strategy.extended.worker_devices))


def to_reduce_dtype(reduce_dtype: Any) -> tf.DType:
    """Converts a `reduce_dtype` argument to a DType.

    Args:
        reduce_dtype: str, or DType: float16, bfloat16 or float32.

    Returns:
        A DType.

    Raises:
        TypeError: it is not a dtype.
        ValueError: it is another dtype.
    """
    # TensorFlow numbers its dtypes.
    dtype = None if isinstance(reduce_dtype, int) else parse(reduce_dtype)
    if dtype is not None and dtype.name in _REDUCE_DTYPES:
        return dtype
    raise (TypeError if dtype is None else ValueError)(
        f"`reduce_dtype` must be one of {_REDUCE_DTYPES}. Received: reduce_dtype={reduce_dtype!r} "
        f"(of type {type(reduce_dtype)})"
    )


def reduce_dtype_of(reduce_dtype: Any, in_float16: bool | None) -> tf.DType:
    """Returns the dtype that two arguments specify together.

    Args:
        reduce_dtype: str, DType, or None, which leaves it to the other argument.
        in_float16: bool, or None, which stands for True: `aggregate_in_float16`.

    Returns:
        A DType.

    Raises:
        TypeError: an argument is something else.
        ValueError: they contradict each other.
    """
    if in_float16 is not None:
        validation.boolean("aggregate_in_float16", in_float16)
    if reduce_dtype is None:
        return tf.float32 if in_float16 is False else tf.float16
    dtype = to_reduce_dtype(reduce_dtype)
    if in_float16 not in (None, dtype == tf.float16):
        raise ValueError(
            "`reduce_dtype` and `aggregate_in_float16` contradict each other. "
            f"Received: reduce_dtype={reduce_dtype!r}, aggregate_in_float16={in_float16!r}"
        )
    return dtype


def need_not_meet() -> bool:
    """Whether this replica can reduce without a merge call.

    It can if it is the only one, or if the strategy needs none.
    """
    if not tf.distribute.has_strategy():
        return True
    return features.is_on(WITHOUT_MEETING) and reduces_alone()


def decide_for_all_replicas(
    decide: Callable[..., T], state: State, on_each: Callable[[State], Any]
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
    def cross_replica(strategy: tf.distribute.Strategy, states: State) -> T:
        on_replica = do_not_convert(functools.partial(on_each))
        call = functools.partial(
            strategy.extended.call_for_each_replica, on_replica, args=(states,)
        )
        return decide(strategy.experimental_local_results(states), call)

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
