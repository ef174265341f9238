"""Times functions in turns, so that other load slows all of them alike."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

# On a busy machine, the median turn takes at least this many times as long as the fastest.
_CALM = 1.25


class Turn(NamedTuple):
    """The time of a call.

    Attributes:
        wall: seconds on the clock.
        cpu: seconds that all threads of this process computed.
    """

    wall: float
    cpu: float


def take(steps: Mapping[str, Callable[[], object]], count: int) -> dict[str, list[Turn]]:
    """Calls functions in turns.

    Args:
        steps: mapping from names to functions, which return when they have computed.
        count: int. The number of calls of each.

    Returns:
        dict from names to lists of `Turn`s.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(count):
        for name in order:
            start = time.perf_counter(), time.process_time()
            steps[name]()
            end = time.perf_counter(), time.process_time()
            turns[name].append(Turn(end[0] - start[0], end[1] - start[1]))
        order.append(order.pop(0))  # After a slow function, the caches hold other data.
    return turns


def fastest(turns: dict[str, list[Turn]]) -> dict[str, float]:
    """Returns the seconds of the fastest turn of each name.

    Other load only makes turns slower.
    """
    return {name: min(turn.wall for turn in of_name) for name, of_name in turns.items()}


def medians(turns: dict[str, list[Turn]]) -> dict[str, float]:
    """Returns the seconds of the median turn of each name."""
    return {
        name: float(np.median([turn.wall for turn in of_name])) for name, of_name in turns.items()
    }


def undisturbed(turns: dict[str, list[Turn]]) -> dict[str, float]:
    """Returns the seconds of each function on a CPU that has nothing else to do.

    Threads that wait for a core do not compute. So while other processes use the cores, the CPU
    time of this process shows how the functions compare.

    Args:
        turns: the result of `take`.
    """
    seconds, usual = fastest(turns), medians(turns)
    computed = {name: float(np.median([turn.cpu for turn in turns[name]])) for name in turns}
    is_calm = all(usual[name] < _CALM * seconds[name] for name in turns)
    # Some systems measure CPU time in units that are longer than a turn.
    if is_calm or min(computed.values()) == 0:
        return seconds
    threads = max(turn.cpu / turn.wall for of_name in turns.values() for turn in of_name)
    return {name: computed[name] / threads for name in turns}
