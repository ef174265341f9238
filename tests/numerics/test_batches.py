"""What is wrong with a batch, and what the tools make of several."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import Times, once
from tests.numerics.tools import batches, dense, sequential

K = tf.keras


class Pairs(K.utils.Sequence):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.full([1], index), np.zeros([1])


@once
def test_what_are_several_batches():
    model = mixed_model()
    x, y = np.ones([4, 2]), np.zeros([4, 1])
    inputs = {"a": x, "scalar": tf.constant(1.0), "none": None}
    for one in (x, (x, y), [x], {"a": x}, (inputs, y), tf.ones([2])):
        assert len(batches.listed(model, one)) == 1
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    for several, shapes in (
        ([(x, y), (x,)], [[(4, 2), (4, 1)], [(4, 2)]]),
        (((x, y)[i] for i in range(2)), [[(4, 2)], [(4, 1)]]),
        (iter([(x, y)]), [[(4, 2), (4, 1)]]),
        (dataset, [[(2, 2), (2, 1)]] * 2),
        (dataset.map(lambda x, y: x), [[(2, 2)]] * 2),
        (Pairs(), [[(1,), (1,)]] * 2),
    ):
        found = batches.listed(model, several)
        assert [[tuple(part.shape) for part in batch.data] for batch in found] == shapes
    with pytest.raises(ValueError, match=r"a dataset that ends: pass dataset.take\(4\)"):
        batches.listed(model, dataset.repeat())
    with pytest.raises(ValueError, match="at least one batch"):
        batches.listed(model, iter(()))


def mixed_model(policy=None):
    """A layer that overflows where numbers are large."""
    layers = lambda: Times(1000.0, name="large"), dense(1, name="dense")
    return sequential(*layers, shape=[2], policy=policy, name="model")


def test_what_is_no_batch():
    model = mixed_model("mixed_float16")
    x, y = np.ones([4, 2]), np.zeros([4, 1])
    dataset = tf.data.Dataset.from_tensors((x, y))
    for batch, error, message in (
        (None, TypeError, "Expected a batch as `fit` takes it"),
        ((dataset, y), TypeError, r"Expected a batch as `fit` takes it.*next\(iter"),
        ((x, y, y, y), ValueError, "a tuple of 4"),
        ([x, y], ValueError, "Received a list of 2. For x and y, pass a tuple"),
        ((x[:0], y[:0]), ValueError, r"values in it. Received: x of the shape \(0, 2\)"),
        (({"a": x, "b": x[:, :0]}, y), ValueError, "values in it. Received: x of the shape"),
        ((tf.RaggedTensor.from_row_lengths([], []), y), ValueError, "values in it. Received: x of"),
        ((x[:, :1], y), ValueError, r"suit the training step of .model.. Received: x of the .*1\)"),
    ):
        for tool in (keras_mp.numerics.check, keras_mp.numerics.profile):
            with pytest.raises(error, match=message):
                tool(model, batch)


def pairs_of(*sizes):
    return [(np.full([4, 2], size, "float32"), np.ones([4, 1], "float32")) for size in sizes]


def test_check_has_the_worst_of_several_batches():
    model = mixed_model("mixed_float16")
    found = pairs_of(0.003, 100.0, 0.007)
    checked = keras_mp.numerics.check(model, iter(found))
    each = [keras_mp.numerics.check(model, one) for one in found]
    assert checked.comparison.batches == 3
    assert not each[0].findings
    assert checked.comparison.findings[0].path == each[1].comparison.findings[0].path == "large"
    assert "the worst of 3 batches" in str(checked.comparison)
    assert [one.hazard for one in checked.findings] == [one.hazard for one in each[1].findings]
    assert "(On 1 of 3 batches.)" in str(checked)
    sound = keras_mp.numerics.check(model, [found[0], found[2]])
    others = [max(row.units for row in one.comparison.layers) for one in (each[0], each[2])]
    assert max(row.units for row in sound.comparison.layers) == max(others)
    row = "output", "large"
    infinite = [one.report[row].fate("float16").infinite for one in (checked, *each)]
    assert infinite == [8, 0, 8, 0]
    assert checked.report[row].histogram.total == 24
    assert checked.advice().policies == {"large": "float32"}
