"""Threads of replicas, which inherit what holds in the thread that starts them.

`MirroredStrategy` and `MultiWorkerMirroredStrategy` run each replica in a thread of its own. This
module needs TensorFlow only.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from tensorflow.python.distribute.mirrored_run import _MirroredReplicaThread as ReplicaThread

_State = TypeVar("_State")


def inherit(
    state: Callable[[], _State], entered: Callable[[_State], AbstractContextManager[None]]
) -> None:
    """Lets replicas run in what is in force in the thread that starts them, from now on.

    Args:
        state: called in the thread that starts a replica; returns what is in force there.
        entered: takes that, and returns the context manager in which the replica runs.
    """
    own = ReplicaThread.start

    @functools.wraps(own)
    def start(self: threading.Thread) -> None:
        run, of_starter = self.run, state()

        def run_in_state() -> None:
            with entered(of_starter):
                run()

        self.run = run_in_state
        own(self)  # pyright: ignore[reportArgumentType]

    ReplicaThread.start = start
