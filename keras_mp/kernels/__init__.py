"""TensorFlow's kernels that are wrong or very slow in 16 bits.

This subpackage needs TensorFlow only.
"""

from keras_mp import hooks
from keras_mp.hooks import replica_threads
from keras_mp.hooks.once import once
from keras_mp.kernels import backward, functions, gelu, sums
from keras_mp.support import features
from keras_mp.tensorflow_api.features import FACES


def have_faces() -> bool:
    """Whether TensorFlow has all private names that the faces of tensors need."""
    return features.is_on(FACES)


@once
def install() -> None:
    """Opens the door, and replaces TensorFlow's functions that it is not enough for.

    It does so once in a process, when the process is in reach for the first time. Out of reach
    (`hooks/reach.py`), the new functions call TensorFlow's own.
    """
    rows = (*sums.replacements(), *functions.replacements(), *gelu.replacements())
    hooks.install([replica_threads.INHERITING, *backward.REPLACEMENTS, *rows])
