"""TensorFlow's kernels that are wrong or very slow in 16 bits. Needs TensorFlow only."""

import functools
import importlib

import tensorflow as tf

from keras_mp.kernels import compositions, convolutions, slow, sums
from keras_mp.support import messages


def has_decided(op: tf.Operation) -> bool:
    """Whether keras_mp, and not the program, has decided in which dtype an operation computes.

    Those are the operations of a graph that stand in the place of a kernel that is wrong or slow in
    16 bits: in float32 inside, with casts around.

    Args:
        op: an operation of a graph that was traced in this process.
    """
    return getattr(op, "_keras_mp_is_decided", False)


@functools.cache
def install() -> None:
    """Replaces TensorFlow's functions whose kernels may be wrong or slow, once in a process.

    It is called when the process reaches code of ours for the first time. Outside of the reach
    (`support/reach.py`) the new functions call TensorFlow's own.
    """
    try:
        # It uses private names, which another version of TensorFlow may not have.
        importlib.import_module("keras_mp.kernels.backward").install()
    except (ImportError, AttributeError) as error:
        messages.warn(
            f"keras_mp does not know TensorFlow {tf.__version__}: sums of gradients in 16 bits "
            f"may be wrong, and gradients slow. TensorFlow lacks what this error names: {error}"
        )
    sums.install()
    compositions.install()
    convolutions.install()
    slow.install()
