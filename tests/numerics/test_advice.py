"""Advice: it follows from the numbers, and a model that takes it loses nothing."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import Times, once
from tests.numerics.test_reports import report, row
from tests.numerics.tools import advise, both, sequential

K = tf.keras


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
        "Run `dense` in float32: 1 of 2,000 values of `dense/kernel` is below float16 at 2^15, in "
        "10 of 100 steps."
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
        "Run `dense_3` in float32: 100.0 % of `dense_3/kernel` is below float16 at 2^1, in 10 of "
        "100 steps."
    )
    assert advice.sentences[1].startswith("Then fix the loss scale at 2^")
    assert advice.loss_scale in (1.0, 2.0)
    large = row(path="large/kernel", values=[2.0**10])
    small = [row(path=f"{name}/kernel", values=[2.0**-40]) for name in "ab"]
    advice = advise(report(large, *small))
    assert advice.policies == {"large": "float32"}
    assert "100.0 % of `large/kernel` is beyond float16 at 2^16" in str(advice)
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
    with pytest.raises(ValueError, match="at most 1. Received: tolerance=5"):
        advise(report(), tolerance=5)


HEAD = functools.partial(K.layers.Dense, 1, dtype="float32", name="head")


def squares(y, predictions):
    return tf.reduce_mean((tf.cast(predictions, tf.float32) - y) ** 2)


def of_a_run(*rows, loss_scale=2.0**15):
    return report(*rows, step=0, counted=1, loss_scale=loss_scale)


def test_rounding_noise_is_no_reason_for_advice():
    rng = np.random.default_rng(0)
    before = K.layers.Dense(8, name="before")  # whose bias the normalization takes away
    normalization = K.layers.BatchNormalization(name="normalization")
    model = sequential(before, normalization, HEAD(), shape=[4], loss=None)
    x, y = (rng.normal(size=[16, n]).astype(np.float32) for n in (4, 1))
    small = lambda y, predictions: squares(y, predictions) * 2.0**-14  # noqa: E731
    _, found = both(model, x, y, policy="mixed_float16", loss=small)
    assert found.noise == {("gradient", "before/bias")}
    assert advise(found) == ([], {}, None)
    assert str(advise(found)) == "Nothing is lost."
    # Were it taken for a gradient, it would be lost.
    rows = [row._replace(is_noise=False, lost=1.0) for row in found.rows]
    assert advise(of_a_run(*rows)).sentences


@once
def test_what_a_run_has_not_lost_is_no_reason_for_advice():
    sound = row(values=[2.0**-45] * 8, lost=0.0, is_noise=False)
    assert advise(of_a_run(sound)) == ([], {}, None)
    lossy = of_a_run(sound._replace(lost=0.5))
    assert advise(lossy).loss_scale > 2.0**20
    assert "in the batch" in advise(lossy).sentences[0]


@once
def test_what_is_lost_inside_of_a_layer_narrows_the_window():
    lossy = row(values=[1.0] * 8, lost=0.5, is_noise=False)
    # At 2^4, in whose window it is, a run has lost half of it.
    assert advise(of_a_run(lossy, loss_scale=2.0**4)).loss_scale > 2.0**4


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
def test_of_infinite_gradients_only_a_dynamic_scale_finds_the_size():
    infinite = [row(path=f"{n}/kernel", values=[np.inf], overflowed_at=2.0**15) for n in "abcd"]
    unknown = advise(report(*infinite, step=1, counted=1, loss_scale=2.0**15))
    assert unknown.loss_scale is None
    assert str(unknown).startswith(
        "Use a dynamic loss scale, which finds one: at 2^15 all of `a/kernel` (and of 3 more) is "
        "infinite or NaN, in 1 of 1 steps, so its size is unknown."
    )
    some = row(values=[*[2.0**3] * 99, np.inf], overflowed_at=2.0**10)
    fixed = advise(report(some, step=1, counted=1))
    assert fixed.loss_scale < 2.0**10
    assert "That only covers finite gradients." in str(fixed)
    assert str(fixed).endswith("a dynamic loss scale finds it.")


@once
def test_a_gradient_that_is_zero_beside_others_that_overflow_is_not_infinite():
    at = {"overflowed_at": 2.0**12, "lost": 0.0, "is_noise": False}
    dead, large = row(path="dead/kernel", values=[0.0] * 4, **at), row(values=[2.0**5] * 4, **at)
    advice = advise(of_a_run(dead, large))
    assert advice.loss_scale < 2.0**12
    assert "dead" not in str(advice)


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


@once
def test_infinity_that_a_softmax_takes_is_no_loss():
    far, softmax = Times(-1e9, name="far", dtype="float32"), K.layers.Softmax
    model = sequential(far, softmax, HEAD, shape=[6], policy="mixed_float16", loss=squares)
    x = np.float32(np.arange(48).reshape([8, 6]) % 6 > 2)
    checked = keras_mp.numerics.check(model, (x, np.ones([8, 1], np.float32)))
    assert (checked.findings, checked.advice().policies) == ((), {})
