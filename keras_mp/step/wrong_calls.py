"""What users are told of a wrong call, or of one that is missing."""

import tensorflow as tf

from keras_mp.support import messages


def tell(call: str, stage: str) -> bool:
    """Warns of a wrong call of a `GradScaler` where nothing is known of the step.

    Args:
        call: str. The name of the method.
        stage: str. The name of the optimizer's `Stage`.

    Returns:
        True.

    Raises:
        ValueError: something is known of the step, or the call is in eager code.
    """
    text = f"{_WRONG[call, stage]}{_OF_GRAD_SCALER}"
    is_unknown = stage == "READY" or (call, stage) == ("step", "SPOILED")
    if tf.executing_eagerly() or not is_unknown:
        raise ValueError(text)
    messages.warn(f"The step was not made: {text}" if call == "step" else text)
    return True


def tell_missing(has_scaled: bool, has_begun: bool) -> None:
    """Warns of calls of a `LossScaleOptimizer` that are missing.

    Args:
        has_scaled: bool. Whether the loss was scaled, for `get_unscaled_gradients`.
        has_begun: bool. Otherwise: whether that has begun the step.
    """
    text = _NOT_UNSCALED if has_scaled else _NOT_SCALED if has_begun else _NEITHER
    messages.warn(f"{text}{_OF_OPTIMIZER}")


_OF_GRAD_SCALER = """ For example:
    with tf.GradientTape() as tape:
        scaled_loss = scaler.scale(loss_fn())
    scaler.step(optimizer, zip(tape.gradient(scaled_loss, variables), variables))
    scaler.update()"""
_BEFORE = (
    "was called, and no loss was scaled since the last update(). If these are gradients from "
    "before it, they are scaled by another number: make the steps of all optimizers first. Else "
    "scale the loss."
)
_TWICE = (
    "GradScaler.unscale() was given gradients that are unscaled already: do so once for each "
    "optimizer, with gradients that were added up before, or after each scale()."
)
_WRONG = {
    ("unscale", "READY"): f"GradScaler.unscale() {_BEFORE}",
    **{("unscale", stage): _TWICE for stage in ("BY_TAPE", "UNSCALED", "SPOILED")},
    ("unscale", "APPLIED"): "GradScaler.unscale() was called after step() with the same "
    "optimizer, which unscales by itself. Unscale before it, or not at all, and call update() "
    "after it.",
    ("step", "READY"): f"GradScaler.step() {_BEFORE}",
    ("step", "APPLIED"): "GradScaler.step() was called twice with this optimizer, and update() "
    "was not called in between. Call update() once after all optimizers have made their steps; "
    "after an exception, it begins anew.",
    ("step", "SPOILED"): "GradScaler.step() was given gradients for which unscale() was called "
    "wrongly, as a warning said: they would be too small. Call update(), which begins anew, and "
    "compute them again.",
    ("update", "READY"): "GradScaler.update() was called without a step() since the last "
    "update(), so the loss scale cannot move. Call it once after all optimizers have made their "
    "steps.",
}

_OF_OPTIMIZER = """
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(loss_fn())
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
    optimizer.apply_gradients(zip(gradients, variables))"""
_NOT_UNSCALED = (
    "get_scaled_loss() was called and get_unscaled_gradients() was not; apply_gradients() has "
    "divided the gradients by the loss scale instead. If they were divided by hand too, this step "
    "is too small. Call both:"
)
_NOT_SCALED = (
    "get_unscaled_gradients() was called and get_scaled_loss() was not, so the gradients of this "
    "step are too small by the loss scale, unless the loss was multiplied by hand. Call both:"
)
_NEITHER = (
    "Neither get_scaled_loss() nor get_unscaled_gradients() was called before apply_gradients(), "
    "so the gradients were applied as they are: this step was made without loss scaling, and small "
    "float16 gradients may have vanished. If the loss was multiplied by the loss scale by hand, "
    "say so: apply_gradients(..., scaled=True). Else call both, or `minimize`:"
)
