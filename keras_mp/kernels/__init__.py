"""What TensorFlow computes, computed so that it is right in 16 bits. Needs TensorFlow only."""

from keras_mp.kernels import convolutions, sums


def install() -> None:
    """Replaces the functions of TensorFlow whose kernels may be wrong, once in a process."""
    sums.install()
    convolutions.install()
