"""The spellings of other systems and of older versions.

`keras_mp.compat.v1` is for the optimizers of TensorFlow 1.
"""

from keras_mp.compat import v1

__all__ = ["v1"]
