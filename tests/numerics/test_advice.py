"""Advice: it follows from the numbers, and a model that takes it loses nothing."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import Times, once
from tests.numerics import tools
from tests.numerics.test_reports import report, row
from tests.numerics.tools import both, sequential

K = tf.keras


def advise(*rows, tolerance=0.001, **how):
    """What a check of one batch advises, whose run in 16 bits has found this."""
    how = {"step": 0, "counted": 1, "loss_scale": 2.0**15, **how}
    return tools.advise(report(*rows, **how), tolerance, (), lambda path: path)


def lossy(path="dense/kernel", lost=1.0, **how):
    return row(path=path, lost=lost, is_noise=False, **how)


@once
def test_a_scale_that_is_too_small_or_too_large():
    rows = [lossy(values=[2.0**-30] * 9), lossy("b/kernel", 0.0, values=[1.5])]
    first, second = advise(*rows, loss_scale=2.0).sentences
    assert first == (
        "Start the loss scale at 2^10: between 2^6 and 2^15 no gradient in float16 loses more than "
        "0.1 %, in the batch. At 2^1, 100.0 % of `dense/kernel` is below float16."
    )
    assert second.startswith("bfloat16 would lose nothing that float16 loses here")
    assert "of 10 values none" in second
    at = {"lost": 0.0, "overflowed_at": 2.0**20}
    too_large = advise(*(row._replace(**at) for row in rows), loss_scale=2.0**20)
    assert too_large.loss_scale == 2.0**10
    assert "At 2^20, 100.0 % of `b/kernel` is beyond float16." in too_large.sentences[0]
    # The tolerance is for those few that are next to zero.
    few = lossy(lost=1 / 2000, values=[2.0**-60, *[1.0] * 1999])
    assert advise(few).sentences == []
    alone = advise(few, tolerance=0.0)
    assert (alone.policies, alone.loss_scale) == ({"dense": "float32"}, None)
    assert alone.sentences[0] == (
        "Run `dense` in float32: 1 of 2,000 values of `dense/kernel` is below float16 at 2^15, in "
        "the batch."
    )


@once
def test_no_scale_suits_all():
    rows = [
        lossy("embedding/embeddings", 0.0, values=[2.0**14]),
        lossy("dense/kernel", 0.0, values=[2.0**4]),
        lossy("dense_3", kind="output gradient", values=[2.0**-40, *[2.0**-20] * 7]),
        lossy("dense_3/kernel", values=[2.0**-40]),
    ]
    advice = advise(*rows, loss_scale=1.0)
    assert advice.policies == {"dense_3": "float32"}
    assert advice.sentences[0] == (
        "Run `dense_3` in float32: 100.0 % of `dense_3/kernel` is below float16 at 2^0, in the "
        "batch."
    )
    assert advice.sentences[1].startswith("Start the loss scale at 2^")
    assert advice.loss_scale in (1.0, 2.0)
    large = lossy("large/kernel", 0.0, values=[2.0**10])
    small = [lossy(f"{name}/kernel", values=[2.0**-40]) for name in "ab"]
    advice = advise(large, *small)
    assert advice.policies == {"large": "float32"}
    assert "100.0 % of `large/kernel` is beyond float16 at 2^35" in str(advice)
    # A loss scale is at least 1.
    advice = advise(lossy("huge/kernel", values=[2.0**30]), *small)
    assert advice.policies == {"huge": "float32"}
    assert "100.0 % of `huge/kernel` is beyond float16" in str(advice)


@once
def test_outputs_come_first():
    rows = [
        lossy(values=[2.0**-90]),
        row("output", "mask", values=[-1e9, 0, 1, 2]),
        row("output", "after", values=[1.0]),
    ]
    advice = advise(*rows)
    assert advice.policies == {"mask": "float32"}
    assert advice.sentences[0] == (
        "Run `mask` in float32: 33.3 % of the output of `mask` is beyond float16, in the batch."
    )


@once
def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="at most 1. Received: tolerance=5"):
        advise(tolerance=5)


HEAD = functools.partial(K.layers.Dense, 1, dtype="float32", name="head")


def squares(y, predictions):
    return tf.reduce_mean((tf.cast(predictions, tf.float32) - y) ** 2)


def test_rounding_noise_is_no_reason_for_advice():
    rng = np.random.default_rng(0)
    before = K.layers.Dense(8, name="before")  # whose bias the normalization takes away
    normalization = K.layers.BatchNormalization(name="normalization")
    model = sequential(before, normalization, HEAD(), shape=[4], loss=None)
    x, y = (rng.normal(size=[16, n]).astype(np.float32) for n in (4, 1))
    small = lambda y, predictions: squares(y, predictions) * 2.0**-14  # noqa: E731
    _, found = both(model, x, y, policy="mixed_float16", loss=small)
    assert found.noise == {("gradient", "before/bias")}
    how = {"counted": found.counted, "loss_scale": found.loss_scale}
    assert str(advise(*found.rows, **how)) == "Nothing is lost."
    # Were it taken for a gradient, it would be lost.
    rows = [row._replace(is_noise=False, lost=1.0) for row in found.rows]
    assert advise(*rows, **how).sentences


@once
def test_what_a_run_has_not_lost_is_no_reason_for_advice():
    values = [2.0**-45] * 8
    assert advise(lossy(lost=0.0, values=values)) == ([], {}, None)
    assert advise(lossy(lost=0.5, values=values)).loss_scale > 2.0**20


@once
def test_what_is_lost_inside_of_a_layer_narrows_the_window():
    # At 2^4, in whose window it is, a run has lost half of it.
    assert advise(lossy(lost=0.5, values=[1.0] * 8), loss_scale=2.0**4).loss_scale > 2.0**4


@once
def test_a_gradient_that_is_zero_beside_others_that_overflow_is_not_infinite():
    at = {"overflowed_at": 2.0**12, "lost": 0.0}
    advice = advise(lossy("dead/kernel", values=[0.0] * 4, **at), lossy(values=[2.0**5] * 4, **at))
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
