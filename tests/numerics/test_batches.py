"""What is wrong with a batch."""

import numpy as np
import pytest
import tensorflow as tf

from keras_mp.numerics import batches
from keras_mp.numerics.batches import Batch
from tests.common import once


@once
def test_parts_that_are_not_finite():
    ragged = tf.RaggedTensor.from_row_lengths([1.0, np.inf, np.nan], [1, 2])
    batch = Batch({"a": tf.ones([2]), "ragged": ragged, "ids": tf.range(4)}, None, [1.0, np.nan])
    assert batches.not_finite(batch) == [("x", 2, 5), ("sample_weight", 1, 2)]
    assert batches.not_finite(Batch(tf.ones([2]), tf.range(2))) == []


@once
def test_inputs_without_values():
    batches.check_values({"a": tf.ones([2, 1]), "scalar": tf.constant(1.0), "none": None})
    for empty in (tf.ones([0, 3]), tf.ones([3, 0]), tf.RaggedTensor.from_row_lengths([], [])):
        with pytest.raises(ValueError, match="values in it. Received: x of the shape"):
            batches.check_values([tf.ones([2]), empty])


@once
def test_the_reason_of_an_error():
    def function(x):
        return tf.reshape(x, [3, 2]) @ tf.ones([3, 1])

    for run in (function, tf.function(function), tf.function(tf.function(function))):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as raised:
            run(tf.ones([6]))
        reason = batches.reason(raised.value)
        assert "\n" not in reason
        assert "must be equal" in reason or "Matrix size-incompatible" in reason
    assert batches.reason(ValueError("")) == ""
