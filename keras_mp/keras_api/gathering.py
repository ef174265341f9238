"""Workers gather the predictions of `Model.predict`, bfloat16 ones too."""

import functools
from typing import Any

import tensorflow as tf

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
