"""Operations that a test runs by themselves count as those of a layer of keras_mp."""

from collections.abc import Iterator

import pytest
import tensorflow as tf

from keras_mp import kernels
from keras_mp.hooks import reach


@pytest.fixture(autouse=True)
def in_reach() -> Iterator[None]:
    """Runs a test in the reach of what keras_mp replaces."""
    kernels.install()
    with reach.entered(tf.bfloat16):
        yield
