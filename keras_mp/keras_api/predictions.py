"""Predictions that workers gather, and metrics and losses get; for both Kerases."""

import functools
from typing import Any

import tensorflow as tf

from keras_mp.support import marks
from keras_mp.support.autograph import do_not_convert


def let_gather_bfloat16(strategy: tf.distribute.Strategy) -> None:
    """Lets a strategy of several workers gather bfloat16 tensors.

    Bit by bit, they are gathered as float16. TensorFlow's operation lacks the dtype, and `predict`
    uses it.

    Args:
        strategy: any strategy. A `MultiWorkerMirroredStrategy` gets an attribute `gather` of its
            own.
    """
    is_of_workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if not is_of_workers or "gather" in vars(strategy):
        return
    original = strategy.gather

    @functools.wraps(original)
    def gather(value: Any, axis: int) -> Any:
        first, *_ = strategy.experimental_local_results(value)
        if getattr(first, "dtype", None) != tf.bfloat16:
            return original(value, axis)
        bits = strategy.run(do_not_convert(lambda v: tf.bitcast(v, tf.float16)), args=(value,))
        return tf.bitcast(original(bits, axis), tf.bfloat16)

    vars(strategy)["gather"] = gather


def widen_for(model: tf.keras.Model, attribute: str, method: str, dtype: str = "float32") -> None:
    """Lets the losses or metrics of a compiled model get predictions in float32.

    Args:
        model: the model.
        attribute: str. Where Keras keeps them, if there are any.
        method: str. The method of this object that is called with labels and predictions.
        dtype: str. The dtype that is wide enough for them. Defaults to float32.
    """
    container: Any = getattr(model, attribute)
    # It may be None, or wide already.
    if type(container).__module__.startswith(("keras.", "tf_keras.")):
        container.__class__ = _wide(type(container), method, dtype)


@functools.cache
def _wide(container: type, method: str, dtype: str) -> type:
    original = getattr(container, method)
    widen = functools.partial(marks.widen, dtype=dtype)

    def call(self: Any, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
        y_pred = tf.nest.map_structure(widen, y_pred)
        return original(self, y_true, y_pred, *args, **kwargs)

    return type(f"Wide{container.__name__}", (container,), {method: call})
