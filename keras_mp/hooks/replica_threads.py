"""Replicas' threads inherit the state of the thread that starts them.

`MirroredStrategy` and `MultiWorkerMirroredStrategy` run each replica in a thread of its own. This
module needs TensorFlow only.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from keras_mp.hooks import reach
from keras_mp.hooks.installer import Replacement, When
from keras_mp.tensorflow_api import replicas
from keras_mp.tensorflow_api.features import REPLICA_THREADS

_State = TypeVar("_State")


def inheriting(
    state: Callable[[], _State], entered: Callable[[_State], AbstractContextManager[Any]]
) -> Replacement:
    """Returns the row that passes a state on to the threads of replicas.

    Args:
        state: function that returns the state of the current thread.
        entered: function that takes a state and returns a context manager that puts it in force.
    """

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def start(self: threading.Thread) -> None:
            run, of_starter = self.run, state()

            def run_in_state() -> None:
                with entered(of_starter):
                    run()

            self.run = run_in_state
            original(self)

        return start

    return Replacement(replicas.start_thread, make, When.ALWAYS, REPLICA_THREADS)


REACH = inheriting(reach.state, lambda state: reach.in_region(*state))
