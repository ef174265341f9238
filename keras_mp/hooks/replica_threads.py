"""Replicas' threads inherit the state of the thread that starts them.

`MirroredStrategy` and `MultiWorkerMirroredStrategy` run each replica in a thread of its own. This
module needs TensorFlow only.
"""

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from keras_mp.hooks import installer, reach
from keras_mp.hooks.installer import Replacement, When
from keras_mp.tensorflow_api import replicas
from keras_mp.tensorflow_api.features import REPLICA_THREADS

_State = TypeVar("_State")

# What threads inherit: functions that return a state of the thread that runs, and those that put
# it in force.
_inherited: dict[Callable[[], Any], Callable[[Any], AbstractContextManager[Any]]] = {
    reach.state: lambda state: reach.in_region(*state)
}


def _passing_on(original: Callable[..., None]) -> Callable[..., None]:
    def start(self: threading.Thread) -> None:
        run = self.run
        states = [(entered, state()) for state, entered in _inherited.items()]

        def run_in_states() -> None:
            with contextlib.ExitStack() as stack:
                for entered, of_starter in states:
                    stack.enter_context(entered(of_starter))
                run()

        self.run = run_in_states
        original(self)

    return start


# The row that passes on at least what is in reach.
INHERITING = Replacement(replicas.start_thread, _passing_on, When.ALWAYS, REPLICA_THREADS)


def inherit(
    state: Callable[[], _State], entered: Callable[[_State], AbstractContextManager[Any]]
) -> None:
    """Passes one more state on to the threads of replicas, from now on.

    Args:
        state: function that returns the state of the current thread.
        entered: function that takes a state and returns a context manager that puts it in force.
    """
    _inherited[state] = entered
    installer.install([INHERITING])
