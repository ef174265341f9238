"""Was the loss scaled, and were the gradients unscaled? Exactly once each, or somebody hears of it.

RFC 293, "LossScaleOptimizer Overview": the four steps, and who performs them.
"""

import threading
from typing import Any

from keras_mp import keras_api, messages


class StepCalls(threading.local):
    """Which of the calls that belong to one step were made since the last step, in this thread.

    MirroredStrategy runs each replica in a thread of its own, so this is also by replica.
    """

    def __init__(self) -> None:
        self.scaled_for: str | None = None
        self.unscaled = False

    def resolve(self) -> bool:
        """Ends the step. Returns whether its gradients are still scaled; warns of missing calls."""
        scaled_for, unscaled = self.scaled_for, self.unscaled
        self.scaled_for, self.unscaled = None, False
        if scaled_for and (unscaled or scaled_for == "apply_gradients"):
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
        if keras_api.APPLY_TAKES_SCALED_GRADIENTS:
            messages.warn(
                "The loss was not scaled before apply_gradients(), which has divided the gradients "
                "by the loss scale, as it does in Keras 3: this step is too small unless the loss "
                f"was multiplied by hand. Scale the loss:{_EXAMPLE}"
            )
            return True
        messages.warn(
            "Neither get_scaled_loss() nor get_unscaled_gradients() was called before "
            "apply_gradients(), so this step was made without loss scaling and small float16 "
            f"gradients may have vanished. Call both, or `minimize`:{_EXAMPLE}"
        )
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepCalls":
        return StepCalls()

    def __reduce__(self) -> tuple[Any, ...]:
        return StepCalls, ()


_EXAMPLE = """
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(loss_fn())
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
    optimizer.apply_gradients(zip(gradients, variables))"""
