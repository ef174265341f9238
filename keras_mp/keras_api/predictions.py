"""Predictions that workers gather and metrics get, alike in both Kerases."""

import functools
from typing import Any

import tensorflow as tf

from keras_mp.support import softmax_and_cross_entropy
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


@functools.cache
def wide_metrics(container: type) -> type:
    """Returns a subclass of the class in which Keras keeps the metrics of a model.

    They get predictions in float32.
    """

    class _WideMetrics(container):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            y_pred = tf.nest.map_structure(softmax_and_cross_entropy.widen, y_pred)
            super().update_state(y_true, y_pred, sample_weight)

    return _WideMetrics
