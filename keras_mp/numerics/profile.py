"""Why is a model not faster? Its dtypes, the time of a step by class, and changes, tried."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.numerics import traces
from keras_mp.numerics.census import Census, census
from keras_mp.numerics.results import Result
from keras_mp.numerics.step_times import StepTimes, step_times
from keras_mp.support import text_tables


@dataclasses.dataclass(frozen=True)
class Profile(Result):
    """The results of `profile`. `str` of it, and `print`, give a text.

    Attributes:
        census: `Census`, what computes in which dtype, and why.
        times: `StepTimes`, the time of a step, and the changes that save most; None for what has no
            training step, or for another device.

    Example:

    >>> profile = keras_mp.numerics.profile(tf.matmul, tf.ones([2, 3]), tf.ones([3, 4]))
    >>> profile.census.traced.work(), profile.times
    ({'float32': 48}, None)
    """

    census: Census
    times: StepTimes | None

    def to_text(self, rows: int | None = text_tables.MOST) -> str:
        """Returns what `print` shows: the times, what saves time, and the dtypes.

        Args:
            rows: int. How many layers, and how many casts, are shown at most; None for all of
                them. Defaults to 10.

        Returns:
            str of several lines.
        """
        parts = [str(self.times)] if self.times is not None else []
        return "\n\n".join([*parts, self.census.to_text(rows)])

    def to_dict(self) -> dict[str, Any]:
        """Returns the times and the census, as JSON has them."""
        return {"times": self.times and self.times.to_dict(), "census": self.census.to_dict()}


def profile(
    function: Callable[..., object],
    *args: Any,
    device: str | None = None,
    steps: int = 9,
    **kwargs: Any,
) -> Profile:
    """Says what a model computes in which dtype and why, where its time goes, and what saves time.

    Args:
        function: a model of `tf.keras`; or a `tf.function`, a concrete function or another
            callable, which is not timed.
        *args: of a model, a batch as `fit` takes it. Of a function, its arguments.
        device: str. A GPU and its compute capability, such as "GPU 7.0": what would TensorFlow make
            of the graph there? Nothing is timed then. Defaults to this machine.
        steps: int. How many steps of each copy of a compiled model are timed; 0 for none, so that
            nothing runs. Defaults to 9.
        **kwargs: more arguments of a function.

    Returns:
        A `Profile`.

    Raises:
        TypeError: `function` cannot be called, or a model comes without a batch, or with a dataset.
        ValueError: the batch does not suit the model, the model cannot be copied, or `device` is no
            GPU.

    Example:

    >>> model = tf.keras.Sequential([tf.keras.Input([8]), tf.keras.layers.Dense(4)])
    >>> model.compile("sgd", "mse")
    >>> profile = keras_mp.numerics.profile(model, (tf.ones([2, 8]), tf.ones([2, 4])), steps=1)
    >>> profile.times.seconds > 0
    True
    """
    counted = census(function, *args, device=device, **kwargs)
    model: Any = function if isinstance(function, tf.keras.Model) else None
    if device is not None or model is None or not steps or not traces.trains(model):
        return Profile(counted, None)
    return Profile(counted, step_times(model, args[0], steps))
