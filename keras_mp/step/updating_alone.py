"""A replica updates its own variables alone, without the others.

This module needs TensorFlow only.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from keras_mp.step.replicas import local_id
from keras_mp.support.attributes import replaced

T = TypeVar("T")
Kwargs = dict[str, Any] | None


class _UpdatingAlone(threading.local):
    """The number of the replica that updates alone in this thread; None elsewhere."""

    replica: int | None = None


_updating_alone, _lock = _UpdatingAlone(), threading.Lock()


@contextlib.contextmanager
def updating_alone() -> Iterator[None]:
    """Context manager in which this replica updates its own variables alone.

    It waits for no other replicas. It is for a function that belongs to one replica, in which
    TensorFlow does not let replicas communicate. Each replica makes the same update. Other threads
    are not affected.
    """
    context, strategy = tf.distribute.get_replica_context(), tf.distribute.get_strategy()
    if context is None or not tf.distribute.has_strategy():
        yield
        return

    def merge_call(
        function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> Any:
        return function(strategy, *args, **(kwargs or {}))

    _let_threads_update_alone(strategy)
    with (
        replaced(context, "merge_call", merge_call),
        replaced(_updating_alone, "replica", local_id()),
    ):
        yield


def _let_threads_update_alone(strategy: tf.distribute.Strategy) -> None:
    """Lets threads in `updating_alone` update the variables of a strategy.

    Other threads do as before.
    """
    extended = strategy.extended
    with _lock:
        if "update" in vars(extended):
            return
        # Functions of the class, since a bound method in the object's attribute would keep the
        # object alive.
        original_update, original_broadcast = type(extended).update, type(extended).broadcast_to

        def update(
            var: tf.Variable,
            fn: Callable[..., T],
            args: Sequence[Any] = (),
            kwargs: Kwargs = None,
            group: bool = True,
        ) -> T:
            if _updating_alone.replica is None:
                return original_update(reference(), var, fn, args, kwargs, group)
            of_replicas = tf.distribute.get_strategy().experimental_local_results(var)
            own = of_replicas[_updating_alone.replica] if len(of_replicas) > 1 else of_replicas[0]
            return fn(own, *args, **(kwargs or {}))

        def broadcast_to(tensor: tf.Tensor, destinations: Any) -> Any:
            if _updating_alone.replica is None:
                return original_broadcast(reference(), tensor, destinations)
            return tensor

        reference: Callable[[], Any] = weakref.ref(extended)
        vars(extended).update(update=update, broadcast_to=broadcast_to)
