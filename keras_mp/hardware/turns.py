"""Times functions in turns, so that other load slows all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping


def take(steps: Mapping[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Calls functions in turns.

    Args:
        steps: mapping from names to functions, which return when they have computed.
        count: int. The number of calls of each.

    Returns:
        dict from names to lists of the seconds of each call.
    """
    turns: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(count):
        for name in order:
            start = time.perf_counter()
            steps[name]()
            turns[name].append(time.perf_counter() - start)
        order.append(order.pop(0))  # After a slow function, the caches hold other data.
    return turns


def medians(turns: Mapping[str, list[float]]) -> dict[str, float]:
    """Returns the seconds of the median turn of each name."""
    return {name: statistics.median(seconds) for name, seconds in turns.items()}
