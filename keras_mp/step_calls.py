"""Was the loss scaled, and were the gradients unscaled? Exactly once each, or somebody hears of it.

RFC 293, "LossScaleOptimizer Overview": the four steps, and who performs them.
"""

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp import keras_api, messages


class _Habit(NamedTuple):
    """How a step was made: its gradients still scaled? its calls in another function?"""

    scaled: bool
    elsewhere: bool


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class StepCalls(threading.local):
    """Which of the calls that belong to one step were made since the last step, in this thread.

    MirroredStrategy runs each replica in a thread of its own, so this is also by replica.

    Some steps make no call that can be seen: the function that computes gradients was traced long
    before. `habits` remembers, for eager steps and for traced ones, how the last step that made its
    calls was made. If they were made in another function than the gradients were applied in, a step
    without calls is one more of that kind. Otherwise it is reported, and taken for one like the
    last, or for what the stock class takes it for.

    Args:
        habits: dict that all threads share.
    """

    def __init__(self, habits: dict[bool, "_Habit"]) -> None:
        self._habits = habits
        self._scaled_for: str | None = None
        self._unscaled = False
        self._graph: Any = None
        self._applied: set[int] = set()
        self._was_scaled = False

    def scaled(self, counterpart: str) -> None:
        """Notes that the loss was scaled, which begins a step.

        Args:
            counterpart: str. The method that is to unscale.
        """
        self._scaled_for, self._unscaled = counterpart, False
        self._graph = _graph()

    def unscaled(self) -> None:
        """Notes that gradients were unscaled."""
        self._unscaled = True
        self._graph = _graph()

    def forget(self) -> None:
        """Drops what was noted: a step is made that needs none of it."""
        self._scaled_for, self._unscaled, self._graph = None, False, None
        self._applied = set()

    def resolve(self, variables: Iterable[Any]) -> bool:
        """Ends the step; warns of missing calls.

        Args:
            variables: iterable of what the gradients are applied to.

        Returns:
            Are the gradients still scaled?
        """
        scaled_for, unscaled = self._scaled_for, self._unscaled
        graph, before = self._graph, self._applied
        self.forget()
        applied = {id(variable) for variable in variables}
        if before and before.isdisjoint(applied) and not scaled_for and not unscaled:
            # Other variables than just before: the same step goes on.
            self._applied = before | applied
            return self._was_scaled
        if scaled_for and (unscaled or scaled_for == "apply_gradients"):
            self._habits[tf.executing_eagerly()] = _Habit(
                scaled=not unscaled, elsewhere=graph is not _graph()
            )
            self._applied, self._was_scaled = applied, not unscaled
            return not unscaled
        return self._report(scaled_for, unscaled)

    def _report(self, scaled_for: str | None, unscaled: bool) -> bool:
        habit = self._habits.get(tf.executing_eagerly())
        if not scaled_for and not unscaled and habit and habit.elsewhere:
            return habit.scaled
        if unscaled:
            messages.warn(
                "get_unscaled_gradients() was called and get_scaled_loss() was not, so the "
                "gradients of this step are too small by the loss scale, unless the loss was "
                f"multiplied by hand. Call both:{_EXAMPLE}"
            )
            return False
        if scaled_for:
            messages.warn(
                "get_scaled_loss() was called and get_unscaled_gradients() was not; "
                "apply_gradients() has divided the gradients by the loss scale instead. If they "
                f"were divided by hand too, this step is too small. Call both:{_EXAMPLE}"
            )
            return True
        habit = habit or self._habits.get(not tf.executing_eagerly())
        if habit.scaled if habit else keras_api.APPLY_TAKES_SCALED_GRADIENTS:
            messages.warn(
                "The loss was not scaled before apply_gradients(), which has divided the gradients "
                "by the loss scale all the same: this step is too small, unless the loss was "
                "scaled in another function or thread, or multiplied by hand. Scale the loss where "
                f"the gradients are computed:{_EXAMPLE}"
            )
            return True
        messages.warn(
            "Neither get_scaled_loss() nor get_unscaled_gradients() was called before "
            "apply_gradients(), so, unless they were called in another function or thread, this "
            "step was made without loss scaling and small float16 gradients may have vanished. "
            f"Call both, or `minimize`:{_EXAMPLE}"
        )
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepCalls":
        return StepCalls(dict(self._habits))

    def __reduce__(self) -> tuple[Any, ...]:
        return StepCalls, (dict(self._habits),)


_EXAMPLE = """
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(loss_fn())
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
    optimizer.apply_gradients(zip(gradients, variables))"""
