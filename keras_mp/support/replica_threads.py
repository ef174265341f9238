"""Threads of replicas, which inherit the state of the thread that starts them.

`MirroredStrategy` and `MultiWorkerMirroredStrategy` run each replica in a thread of its own. This
module needs TensorFlow only.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from keras_mp.support import features
from keras_mp.tensorflow_api import replicas
from keras_mp.tensorflow_api.features import REPLICA_THREADS

_State = TypeVar("_State")


def inherit(
    state: Callable[[], _State], entered: Callable[[_State], AbstractContextManager[None]]
) -> None:
    """Lets replicas inherit a state of the thread that starts them, from this call on.

    Args:
        state: function that returns the state of the current thread.
        entered: function of a state that returns a context manager, in which a thread has it.
    """
    if not features.is_on(REPLICA_THREADS):
        return
    own = replicas.start_thread.get()

    @functools.wraps(own)
    def start(self: threading.Thread) -> None:
        run, of_starter = self.run, state()

        def run_in_state() -> None:
            with entered(of_starter):
                run()

        self.run = run_in_state
        own(self)

    replicas.start_thread.set(start)
