"""Times functions that take turns, so that other load slows all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

# On a busy machine the median of the turns takes longer than the fastest by more than that.
_CALM = 1.25


class Turn(NamedTuple):
    """How long a call took.

    Attributes:
        wall: seconds on the clock.
        cpu: seconds that all threads of this process computed.
    """

    wall: float
    cpu: float


def take(steps: Mapping[str, Callable[[], object]], count: int) -> dict[str, list[Turn]]:
    """Calls functions in turns.

    Args:
        steps: mapping of names and functions, which return when they have computed.
        count: int. How often each is called.

    Returns:
        dict of names and lists of `Turn`s.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(count):
        for name in order:
            start = time.perf_counter(), time.process_time()
            steps[name]()
            end = time.perf_counter(), time.process_time()
            turns[name].append(Turn(end[0] - start[0], end[1] - start[1]))
        order.append(order.pop(0))  # What comes after a slow one has the caches against it.
    return turns


def fastest(turns: dict[str, list[Turn]]) -> dict[str, float]:
    """Seconds of the fastest turn of each name. Other load can only make a turn slower."""
    return {name: min(turn.wall for turn in of_name) for name, of_name in turns.items()}


def medians(turns: dict[str, list[Turn]]) -> dict[str, float]:
    """Seconds of the median turn of each name."""
    return {
        name: statistics.median(turn.wall for turn in of_name) for name, of_name in turns.items()
    }


def undisturbed(turns: dict[str, list[Turn]]) -> dict[str, float]:
    """Seconds that each would take on a CPU that has nothing else to do.

    Threads that wait for a core do not compute, so while others use the cores, it is the time in
    which this process computes that tells how they compare.

    Args:
        turns: by name, what took turns with the others.
    """
    seconds, usual = fastest(turns), medians(turns)
    computed = {name: statistics.median(turn.cpu for turn in turns[name]) for name in turns}
    is_calm = all(usual[name] < _CALM * seconds[name] for name in turns)
    # Some systems count CPU time in steps that are longer than a turn.
    if is_calm or min(computed.values()) == 0:
        return seconds
    threads = max(turn.cpu / turn.wall for of_name in turns.values() for turn in of_name)
    return {name: computed[name] / threads for name in turns}
