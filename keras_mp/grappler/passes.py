"""The passes of grappler that move float32 operations to 16 bits.

They are turned on and off, also for sessions.

TensorFlow 1.15, `tf.train.experimental.enable_mixed_precision_graph_rewrite`.
"""

import threading
from typing import Any

import tensorflow as tf

from keras_mp.support import features, messages
from keras_mp.tensorflow_api import grappler
from keras_mp.tensorflow_api.features import SESSIONS

# What grappler calls them, and `tf.config.optimizer` as well.
PASSES = {"float16": "auto_mixed_precision", "bfloat16": "auto_mixed_precision_onednn_bfloat16"}

_lock = threading.Lock()
# The dtype whose pass was turned on here. Both passes were off before.
_turned_on: set[str] = set()


def enabled_dtype() -> str | None:
    """Returns the dtype that graphs are rewritten to, or None.

    It is "float16" or "bfloat16".
    """
    # TensorFlow's own functions may have turned it off.
    options = _options() if _turned_on else {}
    return next((dtype for dtype, name in PASSES.items() if options.get(name)), None)


def foreign_pass() -> str | None:
    """Returns the name of a rewrite that was not turned on here, or None."""
    if enabled_dtype() is not None:
        return None
    if features.is_on(SESSIONS) and grappler.is_rewrite_in_sessions():
        return "tf.compat.v1.mixed_precision.enable_mixed_precision_graph_rewrite"
    options = _options()
    found = next((name for name in PASSES.values() if options.get(name)), None)
    return found and f"tf.config.optimizer.set_experimental_options({{{found!r}: True}})"


def turn_on(dtype: str) -> None:
    """Lets TensorFlow rewrite the graphs of functions and sessions from now on.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    with _lock:
        _turned_on.add(dtype)
        tf.config.optimizer.set_experimental_options(_only(dtype))
        # A session that comes with a config of its own turns on the pass for float16 by that.
        if features.is_on(SESSIONS):
            grappler.rewrite_in_sessions(dtype == "float16")


def turn_off() -> bool:
    """Turns off what `turn_on` has turned on, and tells whether it was on."""
    with _lock:
        was_on = enabled_dtype() is not None
        if was_on:
            tf.config.optimizer.set_experimental_options(_only(None))
        if _turned_on and features.is_on(SESSIONS):
            grappler.rewrite_in_sessions(False)
        _turned_on.clear()
    return was_on


def refuse_policy(what: str) -> None:
    """Refuses a mixed policy while the rewrite is on.

    Args:
        what: str. The call or the model that brings the policy.

    Raises:
        ValueError: the rewrite is on.
    """
    dtype = enabled_dtype()
    if dtype is not None:
        raise ValueError(
            f"The graph rewrite to {dtype} is on, and does the same as a mixed policy by other "
            "means: use one of them. Call keras_mp.disable_mixed_precision_graph_rewrite() first. "
            f"Received: {what}"
        )


def warn_if_not_rewritten(what: str) -> None:
    """Warns of code that the rewrite does not reach, while it is on.

    Args:
        what: str. The code that is not rewritten, and why.
    """
    dtype = enabled_dtype()
    if dtype is not None:
        messages.warn(
            f"The graph rewrite is on and does not reach {what}: it computes in float32. Use a "
            f'policy, keras_mp.set_global_policy("mixed_{dtype}"), or change that.'
        )


def config_for_sessions(
    config: tf.compat.v1.ConfigProto | None, dtype: str | None
) -> tf.compat.v1.ConfigProto:
    """Returns a `ConfigProto` with the pass for a dtype on, and the other off.

    Args:
        config: `tf.compat.v1.ConfigProto`, which is not changed; None stands for one with the
            options of `tf.config.optimizer`.
        dtype: str, "float16" or "bfloat16"; None for both passes off.
    """
    result = tf.compat.v1.ConfigProto()
    if config is not None:
        result.CopyFrom(config)
    rewriter = result.graph_options.rewrite_options
    options = _options() if config is None else {}
    for name, value in {**options, **_only(dtype)}.items():
        if isinstance(value, bool) and not name.startswith("disable_"):
            value = rewriter.ON if value else rewriter.OFF
        setattr(rewriter, name, value)
    return result


def _only(dtype: str | None) -> dict[str, bool]:
    """Returns the options in which the pass for a dtype is on, and no other."""
    return {name: each == dtype for each, name in PASSES.items()}


def _options() -> dict[str, Any]:
    return tf.config.optimizer.get_experimental_options()
