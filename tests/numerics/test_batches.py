"""What is wrong with a batch, and what the tools make of several."""

import json

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.numerics import batches
from keras_mp.numerics.audit import audit
from keras_mp.numerics.batches import Batch
from keras_mp.numerics.compare import compare
from keras_mp.numerics.what_if import what_if
from tests.common import Times, once


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


K = tf.keras


class Pairs(K.utils.Sequence):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.full([1], index), np.zeros([1])


@once
def test_what_are_several_batches():
    x, y = np.ones([4, 2]), np.zeros([4, 1])
    for one in (x, (x, y), [x, x], {"a": x}, tf.ones([2]), None, []):
        assert batches.several(one) is None
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    for several, shapes in (
        ([(x, y), (x,)], [[(4, 2), (4, 1)], [(4, 2)]]),
        (([x, y][i] for i in range(2)), [[(4, 2)], [(4, 1)]]),
        (iter([(x, y)]), [[(4, 2), (4, 1)]]),
        (dataset, [[(2, 2), (2, 1)]] * 2),
        (dataset.map(lambda x, y: x), [[(2, 2)]] * 2),
        (Pairs(), [[(1,), (1,)]] * 2),
    ):
        found = list(batches.several(several))
        assert [[tuple(part.shape) for part in batch] for batch in found] == shapes
    with pytest.raises(ValueError, match="contain their labels and weights"):
        batches.several(dataset, y)
    with pytest.raises(ValueError, match=r"a dataset that ends: pass dataset.take\(4\)"):
        batches.several(dataset.repeat())
    with pytest.raises(ValueError, match="at least one batch"):
        batches.several(iter(()))


def mixed_model():
    """A layer that overflows where numbers are large."""
    model = K.Sequential(
        [
            K.Input([2]),
            Times(1000.0, name="large"),
            K.layers.Dense(1, name="dense"),
        ],
        name="model",
    )
    model.compile("sgd", "mse")
    return model


def pairs_of(*sizes):
    return [(np.full([4, 2], size, "float32"), np.ones([4, 1], "float32")) for size in sizes]


def test_compare_has_the_worst_and_the_mean_of_several_batches():
    with keras_mp.policy_scope("mixed_float16"):
        model = mixed_model()
    found = pairs_of(0.003, 100.0, 0.007)
    comparison = compare(model, iter(found), loss_scale=1.0)
    each = [compare(model, x, y, loss_scale=1.0) for x, y in found]
    # Which has "nan" for what is not known, and so equals itself.
    assert [one.to_dict() for one in comparison.batches] == [one.to_dict() for one in each]
    assert not each[0].findings
    assert comparison.first.path == each[1].first.path == "large"
    sound = compare(model, [found[0], found[2]], loss_scale=1.0)
    for worst, mean, *rows in zip(sound.layers, sound.mean.layers, each[0].layers, each[2].layers):
        if worst.output is not None:
            units = [row.output.units for row in rows]
            assert worst.output.units == max(units)
            assert mean.output.units == pytest.approx(sum(units) / 2)
    assert sound.losses[0] == pytest.approx((each[0].losses[0] + each[2].losses[0]) / 2)
    assert len(sound.to_dict()["batches"]) == 2
    assert "batches" not in each[0].to_dict()
    assert "the worst of 3 batches" in str(comparison)
    assert compare(model, found[:1], loss_scale=1.0).to_dict() == each[0].to_dict()
    assert each[0].mean is each[0]


@once
def test_what_if_has_the_worst_and_the_mean_of_several_batches():
    model, how = mixed_model(), {"dtypes": ["float16"], "scales": [1.0]}
    found = pairs_of(0.3, 100.0)
    dataset = tf.data.Dataset.from_generator(
        lambda: found, output_signature=(tf.TensorSpec([4, 2]), tf.TensorSpec([4, 1]))
    )
    result = what_if(model, dataset, **how)
    one, other = (what_if(model, x, y, **how) for x, y in found)
    row = ("output", "large")
    assert one["float16", 1.0][row].infinite == 0
    assert result["float16", 1.0][row] == other["float16", 1.0][row]
    assert result["float16", 1.0][row].infinite == 8
    mean = result.mean["float16", 1.0][row]
    assert (mean.values, mean.infinite) == (16, 8)
    assert result.reference[row].histogram.total == 16
    assert len(result.batches) == 2
    assert keras_mp.numerics.advise.advise(result).policies == {"large": "float32"}
    assert one.mean is one


@once
def test_audit_says_on_how_many_batches():
    with keras_mp.policy_scope("mixed_float16"):
        model = mixed_model()
    report = audit(model, pairs_of(0.3, 100.0, 200.0))
    first, *others = report.batches
    assert not first.findings
    assert {each.hazard for each in report.findings} == {
        each.hazard for other in others for each in other.findings
    }
    assert "(On 2 of 3 batches.)" in str(report)
    assert len(json.loads(report.to_json())["batches"]) == 3
    assert "batches" not in json.loads(first.to_json())
