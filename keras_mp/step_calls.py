"""Was the loss scaled, and were the gradients unscaled? Exactly once each, or somebody hears of it.

RFC 293, "LossScaleOptimizer Overview": the four steps, and who performs them.
"""

import threading
from typing import Any

from keras_mp import keras_api, messages


class StepCalls(threading.local):
    """Which of the calls that belong to one step were made since the last step, in this thread.

    MirroredStrategy runs each replica in a thread of its own, so this is also by replica.

    Where no call was made, the step is taken for one like the last that was made well, in any
    thread: the function that computes gradients may have been traced long before the one that
    applies them. Without such a step it is what the stock class takes it for.

    Args:
        habit: dict that all threads share.
    """

    def __init__(self, habit: dict[str, bool]) -> None:
        self.scaled_for: str | None = None
        self.unscaled = False
        self._habit = habit

    def resolve(self) -> bool:
        """Ends the step. Returns whether its gradients are still scaled; warns of missing calls."""
        scaled_for, unscaled = self.scaled_for, self.unscaled
        self.scaled_for, self.unscaled = None, False
        if scaled_for and (unscaled or scaled_for == "apply_gradients"):
            self._habit["scaled"] = not unscaled
            return not unscaled
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
        if self._habit.get("scaled", keras_api.APPLY_TAKES_SCALED_GRADIENTS):
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
        return StepCalls(dict(self._habit))

    def __reduce__(self) -> tuple[Any, ...]:
        return StepCalls, (dict(self._habit),)


_EXAMPLE = """
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(loss_fn())
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
    optimizer.apply_gradients(zip(gradients, variables))"""
