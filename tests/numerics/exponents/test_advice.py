"""Advice: it follows from the numbers, and a model that takes it loses nothing."""

import re

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.numerics import Report
from keras_mp.numerics.exponents.advise import advise
from keras_mp.numerics.exponents.histogram import Histogram
from keras_mp.numerics.exponents.rows import Row
from tests.common import Times, once
from tests.numerics.exponents.test_reports import report, row
from tests.numerics.tools import what_if

K = tf.keras


@once
def test_a_healthy_model_is_told_nothing():
    advice = advise(report(row(values=[2.0**-30, 1.0]), row("output", "a", values=[100.0])))
    assert advice == ([], {}, None)
    assert str(advice) == "Nothing is lost."
    assert advise(report(row(dtype="bfloat16")), "bfloat16").sentences == []


@once
def test_a_scale_that_is_too_small_or_too_large():
    rows = [row(values=[2.0**-30] * 9), row(path="b/kernel", values=[1.5])]
    first, second = advise(report(*rows, loss_scale=2.0)).sentences
    assert first == (
        "Fix the loss scale at 2^10: between 2^6 and 2^15 no gradient loses more than 0.1 %, in 10 "
        "of 100 steps. At 2^1, 100.0 % of `dense/kernel` is below float16."
    )
    assert second.startswith("bfloat16 would lose nothing that float16 loses here")
    assert "of 10 values none" in second
    too_large = advise(report(*rows, loss_scale=2.0**20))
    assert too_large.loss_scale == 2.0**10
    assert "At 2^20, 100.0 % of `b/kernel` is beyond float16." in too_large.sentences[0]
    # The tolerance is for those few that are next to zero.
    few = row(values=[2.0**-60, *[1.0] * 1999])
    assert advise(report(few)).sentences == []
    alone = advise(report(few), tolerance=0.0)
    assert (alone.policies, alone.loss_scale) == ({"dense": "float32"}, None)
    assert alone.sentences[0] == (
        "Run `dense` in float32: 1 of 2,000 values of `dense/kernel` is below float16 at any scale "
        "that does not overflow it, in 10 of 100 steps."
    )


@once
def test_no_scale_suits_all():
    rows = [
        row(path="embedding/embeddings", values=[2.0**14]),
        row(path="dense/kernel", values=[2.0**4]),
        row("output gradient", "dense_3", values=[2.0**-40, *[2.0**-20] * 7]),
        row(path="dense_3/kernel", values=[2.0**-40]),
    ]
    advice = advise(report(*rows, loss_scale=1.0))
    assert advice.policies == {"dense_3": "float32"}
    assert advice.sentences[0] == (
        "Run `dense_3` in float32: 100.0 % of `dense_3/kernel` is below float16 at any scale that "
        "does not overflow `embedding/embeddings`, in 10 of 100 steps."
    )
    assert advice.sentences[1].startswith("Then fix the loss scale at 2^")
    assert advice.loss_scale in (1.0, 2.0)
    large = row(path="large/kernel", values=[2.0**10])
    small = [row(path=f"{name}/kernel", values=[2.0**-40]) for name in "ab"]
    advice = advise(report(large, *small))
    assert advice.policies == {"large": "float32"}
    assert "is beyond float16 at any scale at which nothing of `a/kernel` is lost" in str(advice)
    # A loss scale is at least 1.
    advice = advise(report(row(path="huge/kernel", values=[2.0**30]), *small))
    assert advice.policies == {"huge": "float32"}
    assert "100.0 % of `huge/kernel` is beyond float16" in str(advice)


@once
def test_outputs_come_first():
    rows = [
        row(values=[2.0**-90], dtype="float32"),
        row("output", "mask", dtype="float32", values=[-1e9, 0, 1, 2]),
        row("output", "after", dtype="float32", values=[1.0]),
    ]
    advice = advise(report(*rows))
    assert advice.policies == {"mask": "float32"}
    assert advice.sentences[0] == (
        "Run `mask` in float32: 33.3 % of its output is beyond float16, in 10 of 100 steps."
    )
    in_half = [
        row("output", "mask", values=[-np.inf, 0]),
        row("output", "after", values=[np.nan, 1.0]),
    ]
    advice = advise(report(*in_half))
    assert advice.policies == {"mask": "float32"}
    assert len(advice.sentences) == 1  # Of bfloat16 nothing is known.


@once
def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="Received: dtype='float32'"):
        advise(report(row()), "float32")
    with pytest.raises(ValueError, match="Received: dtype='float8_e5m2'"):
        advise(report(), "float8_e5m2")
    with pytest.raises(ValueError, match="from 0 to 1. Received: tolerance=5"):
        advise(report(), tolerance=5)


def model_with_a_mask():
    """A mask of -1e9, in which all of one row is masked, as where a sequence is empty."""
    inputs, mask = K.Input([6]), K.Input([6])
    scores = K.layers.Dense(6, name="scores")(inputs)
    far = Times(-1e9, name="far")(mask)
    masked = K.layers.Add(name="masked")([scores, far])
    weights = K.layers.Softmax(name="weights")(masked)
    return K.Model([inputs, mask], K.layers.Dense(1, dtype="float32", name="head")(weights))


@once
def test_a_model_that_takes_it_loses_nothing():
    rng = np.random.default_rng(0)
    mask = (rng.random([8, 6]) < 0.3).astype(np.float32)
    mask[0] = 1
    x, y = [rng.normal(size=[8, 6]).astype(np.float32), mask], np.ones([8, 1], np.float32)
    with keras_mp.policy_scope("mixed_float16"):
        mixed = model_with_a_mask()
    expected = keras_mp.convert(mixed, "float32")(x)
    mse = lambda y, predictions: tf.reduce_mean((predictions - y) ** 2)  # noqa: E731
    runs = {"loss": mse, "scales": [1.0, 2.0**8]}
    advised = set()
    for _ in range(4):
        result = what_if(mixed, x, y, **runs)
        advice = advise(result)
        if not advice.policies:
            break
        advised |= set(advice.policies)
        mixed = keras_mp.convert(mixed, advice.policies)
    assert advised == {"masked", "weights"}  # -1e9 makes float32 of "far", which loses nothing.
    assert not any(lost.infinite for lost in result[2.0**8].values())
    assert mixed.get_layer("scores").compute_dtype == "float16"
    np.testing.assert_allclose(mixed(x), expected, rtol=1e-2, atol=1e-2)


def test_rounding_noise_is_no_reason_for_advice():
    rng = np.random.default_rng(0)
    K.utils.set_random_seed(0)
    layers = [
        K.layers.Dense(8, name="before"),  # whose bias the normalization takes away
        K.layers.BatchNormalization(name="normalization"),
        K.layers.Dense(1, dtype="float32", name="head"),
    ]
    model = K.Sequential([K.Input([4]), *layers])

    def small(y, predictions):
        return tf.reduce_mean((tf.cast(predictions, tf.float32) - y) ** 2) * 2.0**-14

    x, y = rng.normal(size=[16, 4]), rng.normal(size=[16, 1])
    runs = {"loss": small, "scales": [2.0**15]}
    result = what_if(model, x.astype(np.float32), y.astype(np.float32), **runs)
    assert result.noise == {("gradient", "before/bias")}
    assert advise(result) == ([], {}, None)
    # Were it taken for a gradient, it would be lost at 2^15.
    result.noise.clear()
    assert advise(result).sentences


@once
def test_no_sentence_contradicts_the_runs():
    model = K.Sequential([K.Input([2]), K.layers.Dense(1, name="head", use_bias=False)])

    def inner_overflow(y, predictions):
        """Its gradients are about 1, and 2^10 in between."""
        narrow = tf.cast(predictions, tf.float16)
        return tf.reduce_mean(narrow * 2.0**-10 * 2.0**10)

    runs = {"scales": [1.0, 2.0**4, 2.0**9, 2.0**15]}
    x, y = np.ones([4, 2], np.float32), np.ones([4, 1], np.float32)
    result = what_if(model, x, y, loss=inner_overflow, **runs)
    assert [scale for scale in result.scales if not result.losses(scale)] == [1.0, 2.0**4]
    assert result.reference.window("float16").high >= 15
    [sentence, _] = advise(result).sentences
    assert sentence.startswith("Start the loss scale at 2^4: between 2^0 and 2^8 no gradient")


class Normalized(K.layers.Layer):
    """Divides each row by its length, whose square overflows in float16."""

    def call(self, x):
        return x / tf.sqrt(tf.reduce_sum(x * x, -1, keepdims=True))


def squares(y, predictions):
    return tf.reduce_mean((tf.cast(predictions, tf.float32) - y) ** 2)


def test_an_output_that_becomes_zero_is_lost():
    K.utils.set_random_seed(0)
    layers = [
        Times(300.0, name="large"),
        Normalized(name="norm"),
        K.layers.Dense(1, dtype="float32", name="head"),
    ]
    model = K.Sequential([K.Input([8]), *layers])
    x = np.random.default_rng(0).uniform(1, 2, size=[96, 8]).astype(np.float32)
    runs = {"loss": squares, "scales": [2.0**15]}
    result = what_if(model, x, np.ones([96, 1], np.float32), **runs)
    lost = result[2.0**15]["output", "norm"]
    assert (lost.zero, lost.values, lost.error) == (768, 768, 1.0)
    advice = advise(result)
    assert advice.policies == {"norm": "float32"}
    assert advice.sentences[0] == (
        "Run `norm` in float32: 100.0 % of its output is zero in float16, and not in float32, in "
        "the batch."
    )
    with keras_mp.policy_scope("mixed_float16"):
        mixed = keras_mp.convert(model, "mixed_float16")
    after = what_if(keras_mp.convert(mixed, advice.policies), x, np.ones([96, 1]), **runs)
    assert after[2.0**15]["output", "norm"].zero == 0
    assert advise(after).policies == {}


@once
def test_what_a_run_has_lost_outranks_what_a_histogram_predicts():
    K.utils.set_random_seed(0)
    layers = [
        K.layers.Dense(16, name="first"),
        Times(2.0**-22, name="tiny"),
        Times(2.0**22, name="back"),
        K.layers.Dense(1, dtype="float32", name="head"),
    ]
    model = K.Sequential([K.Input([8]), *layers])
    x = np.random.default_rng(0).normal(size=[32, 8]).astype(np.float32)
    runs = {"loss": squares}
    result = what_if(model, x, np.ones([32, 1], np.float32), **runs)
    lost = [scale for scale in result.scales if result.losses(scale, 0.001)]
    assert lost
    mixed, advice = keras_mp.convert(model, "mixed_float16"), advise(result)
    assert advice.policies
    for _ in range(3):
        claim = r"between 2\^(-?\d+) and 2\^(-?\d+) no gradient"
        for low, high in re.findall(claim, str(advice)):
            assert not any(2.0 ** int(low) <= scale <= 2.0 ** int(high) for scale in lost)
        if not advice.policies:
            break
        mixed = keras_mp.convert(mixed, advice.policies)
        result = what_if(mixed, x, np.ones([32, 1], np.float32), **runs)
        lost = [scale for scale in result.scales if result.losses(scale, 0.001)]
        advice = advise(result)
    assert advice.policies == {}


@once
def test_zeros_of_a_run_in_16_bits_are_unknown():
    lossy = row(values=[*[0.0] * 29, *[2.0**-24] * 71])
    advice = advise(report(lossy, loss_scale=1.0))
    assert advice == (
        [
            "29.0 % of `dense/kernel` is zero in float16 at a loss scale of 1. Whether it is zero "
            "in float32, too, is unknown: `keras_mp.numerics.check` tells."
        ],
        {},
        None,
    )
    assert "may be values that were too small for float16" in str(report(lossy, loss_scale=1.0))
    # Zeros beside values of an ordinary size come from elsewhere: a ReLU, a pixel that is black.
    assert advise(report(row(values=[*[0.0] * 29, *[0.5] * 71]))) == ([], {}, None)
    # Unknown zeros do not hide an overflow.
    large = row(path="b/kernel", values=[4.0], overflowed_at=2.0**15)
    both = advise(report(lossy, large, loss_scale=2.0**15))
    assert both.loss_scale < 2.0**15
    assert "for the steps that overflowed is unknown" in str(both)
    in_float32 = row(dtype="float32", values=[0.0, 2.0**-24])
    assert advise(report(in_float32, loss_scale=1.0)).sentences == []


@once
def test_rounding_noise_of_float32_does_not_narrow_the_window_of_a_report():
    rows = [
        row(path="a/kernel", dtype="float32", values=[1.0, 0.5]),
        row(path="a/bias", dtype="float32", values=[2.0**-30]),
    ]
    assert report(*rows).noise == {("gradient", "a/bias")}
    assert report(*rows).window("float16") == report(rows[0]).window("float16")
    small = row(path="a/bias", dtype="float32", values=[2.0**-12])
    assert report(rows[0], small).noise == set()


def test_the_first_line_and_the_table_say_the_same():
    K.utils.set_random_seed(0)
    layers = [
        K.layers.Dense(8, name="before"),
        K.layers.BatchNormalization(name="normalization"),
        K.layers.Dense(1, dtype="float32", name="head"),
    ]
    model = K.Sequential([K.Input([4]), *layers])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=[16, 4]).astype(np.float32), rng.normal(size=[16, 1])
    result = what_if(model, x, y.astype(np.float32), loss=squares)
    head, table = str(result).split("\n", 1)
    assert "2^3" in head
    assert "none of the scales" not in head
    assert "before/bias (noise)" in table


def test_a_small_gradient_that_may_be_noise_is_no_loss_that_goes_unsaid():
    histograms = {"kernel": Histogram.of(np.float32([1.0] * 8))}
    histograms["bias"] = Histogram.of(np.float32([2.0**-26] * 8))
    rows = [Row("gradient", f"dense/{name}", "float16", each) for name, each in histograms.items()]
    advice = advise(Report(rows, step=10, counted=10, loss_scale=1.0))
    assert len(advice.sentences) == 1
    assert "`dense/bias` is below float16" in advice.sentences[0]
    assert "check" in advice.sentences[0]
    assert not advise(Report(rows, step=10, counted=10, loss_scale=2.0**15)).sentences
