"""TensorFlow's kernels that are wrong or very slow in 16 bits. Needs TensorFlow only."""

import functools

from keras_mp.kernels import convolutions, slow, sums


@functools.cache
def install() -> None:
    """Replaces TensorFlow's functions whose kernels may be wrong or slow, once in a process."""
    sums.install()
    convolutions.install()
    slow.install()
