"""Checks that all workers train alike.

They exchange facts, and errors show the differences. Workers sum gradients while these are scaled.
Then each of them divides by its own scale, and each asks for sums in its own dtype. If these
differ, weights drift apart, or a sum never ends. `check_alike` compares facts, the loss scale among
them, at the first step. Programs with one worker pay nothing.
"""

import collections
import itertools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.step import replicas
from keras_mp.step.gradients import Gradient
from keras_mp.support import host

# Further facts that have to be the same on all workers, by name. Other modules add theirs.
FACTS: dict[str, Callable[[], str]] = {}

# How long a worker waits for the others to make their first step.
TIMEOUT_IN_SECONDS = 1800.0
# TensorFlow numbers its own groups from 1.
_GROUP_KEY = 293_000_000
_instance_keys = itertools.count(1)
_known_to_be_alike: weakref.WeakSet[Any] = weakref.WeakSet()


def check_alike(owner: Any, grads: Sequence[Gradient], facts: Mapping[str, Any]) -> None:
    """Checks, at an owner's first step, that its facts are the same on all workers.

    Workers exchange facts before their first sum, since a sum of two dtypes would never end.

    Args:
        owner: the object that makes steps. A weak reference to it is kept.
        grads: the gradients of the step.
        facts: dict of the facts that have to be the same, by name. They are compared as text.

    Raises:
        ValueError: something differs. All workers raise it.
    """
    if owner in _known_to_be_alike or host.in_v1_graph():
        return
    present = [gradient for gradient in grads if gradient is not None]
    dtypes = collections.Counter(gradient.dtype.name for gradient in present)
    # If workers make their optimizers' first steps in different orders, different optimizers meet
    # here.
    shapes = [str(gradient.shape) for gradient in present if isinstance(gradient, tf.Tensor)]
    with tf.init_scope():  # In a graph the text of a loss scale has no number.
        own = {name: fact() for name, fact in FACTS.items()}
        own |= {name: str(fact) for name, fact in facts.items()}
    own["gradients"] = ", ".join(f"{count} of {name}" for name, count in sorted(dtypes.items()))
    own["shapes of dense gradients"] = ", ".join(shapes)
    try:
        of_workers = _exchange(own)
    except tf.errors.OpError as error:
        raise RuntimeError(
            "In the first step of an optimizer all workers compare how they train. This worker "
            f"has waited for the others for up to {TIMEOUT_IN_SECONDS:g} seconds. Let all workers "
            "make the first steps of their optimizers in the same order, and check whether one "
            f"has failed. Received: {error.message} (of type {type(error).__name__}), in the "
            f"first step of {own}"
        ) from error
    lines = [
        f"\n  {name}: "
        + "; ".join(f"worker {i}: {each.get(name)}" for i, each in enumerate(of_workers))
        for name in own
        if len({each.get(name) for each in of_workers}) > 1
    ]
    if lines:
        raise ValueError(
            "The workers do not run the same training, so sums of their gradients would be wrong, "
            "or would never end. Run the same program on all of them. What differs:"
            + "".join(lines)
        )
    _known_to_be_alike.add(owner)


def _exchange(own: dict[str, str]) -> list[dict[str, str]]:
    """Returns the facts of each worker, in the order of the workers."""
    strategy: Any = tf.distribute.get_strategy()
    text = json.dumps([strategy.cluster_resolver.task_id or 0, own])
    longest = max(size for [size] in _gather(np.array([len(text)])))
    rows = _gather(np.frombuffer(text.ljust(longest + -longest % 4).encode(), np.int32))
    of_workers = (json.loads(row.tobytes()) for row in rows)
    return [facts for _, facts in sorted(of_workers, key=lambda each: each[0])]


def _gather(numbers: np.ndarray) -> np.ndarray:
    """Returns the row of numbers of each worker, in any order."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.raw_ops.CollectiveGatherV2(
            input=numbers[np.newaxis],
            group_size=replicas.number_of_workers(),
            group_key=_GROUP_KEY,
            instance_key=next(_instance_keys),
            ordering_token=[],
            timeout_seconds=TIMEOUT_IN_SECONDS,
        ).numpy()
