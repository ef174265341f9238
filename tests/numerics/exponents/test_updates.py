"""Histograms of weights and of updates: what variables in 16 bits take, and what advice follows."""

import json
import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.numerics import Report, watch
from keras_mp.numerics.exponents.advise import advise
from keras_mp.numerics.exponents.counting import ExponentHistograms
from keras_mp.numerics.exponents.histogram import UPDATES, Histogram
from keras_mp.numerics.exponents.rows import Row
from tests.common import mirrored, once

K = tf.keras
NUMPY = {"bfloat16": tf.bfloat16.as_numpy_dtype, "float16": np.float16}


def model_of(policy, optimizer):
    K.utils.set_random_seed(0)
    layers = [K.layers.Dense(16, name="a", dtype=policy), K.layers.Dense(2, name="b", dtype=policy)]
    model = K.Sequential([K.Input([8]), *layers])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)  # of weights in 16 bits
        model.compile(optimizer, "mse", jit_compile=False)
    return model


def data(count=32):
    rng = np.random.default_rng(0)
    x = rng.normal(size=[count, 8]).astype(np.float32)
    return x, x[:, :2]


def fitted(model, **kwargs):
    monitor = watch(every=1, outputs=False, **kwargs)
    model.fit(*data(), batch_size=8, epochs=1, verbose=0, shuffle=False, callbacks=[monitor])
    return monitor.report()


def relative(before, after):
    before, after = (np.asarray(each, np.float32) for each in (before, after))
    return (after - before) / 2.0 ** np.floor(np.log2(np.abs(before)))


@once
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_border_is_that_of_what_a_variable_takes(dtype):
    rng = np.random.default_rng(0)
    weights = np.exp2(rng.uniform(-6, 6, 20_000)).astype(NUMPY[dtype])
    exact = weights.astype(np.float32)
    # Away from zero: towards it, numbers just below a power of two are closer to each other.
    updates = exact * np.exp2(rng.uniform(-16, -2, exact.size)).astype(np.float32)
    stay = (exact + updates).astype(NUMPY[dtype]) == weights
    histogram = Histogram.of(relative(exact, exact + updates))
    found = histogram.fate(UPDATES[dtype])
    assert 0.1 < stay.mean() < 0.9
    # Sums in float32 round updates that are next to the border onto it.
    assert abs(found.zero - stay.sum()) <= 0.001 * exact.size
    assert (found.subnormal, found.infinite) == (0, 0)
    larger = Row("update", "a", "float32", histogram).window(dtype)
    factor = 2.0**larger.low
    assert np.mean((exact + factor * updates).astype(NUMPY[dtype]) == weights) <= 0.1
    assert np.mean((exact + factor / 2 * updates).astype(NUMPY[dtype]) == weights) > 0.1


@once
@pytest.mark.parametrize("how", ["eager", "function", "xla"])
def test_updates_are_counted_as_numpy_does(how):
    model = model_of("mixed_bfloat16", K.optimizers.Adam(0.01))
    model.trainable_variables[1].assign(tf.range(16.0) - 3)  # one of them is zero
    histograms = ExponentHistograms(
        model, every=2, gradients="*kernel", outputs=False, updates=True, weights=["b/*"]
    )
    x, y = data(8)

    def step():
        with histograms.step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    model.optimizer.build(model.trainable_variables)
    if how != "eager":
        step = tf.function(step, jit_compile=how == "xla")
    expected: dict[str, Histogram] = {}
    for number in range(3):
        before = [v.numpy() for v in model.trainable_variables]
        step()
        if number % 2:
            continue
        for path, old, new in zip(
            ("a/kernel", "a/bias", "b/kernel", "b/bias"), before, model.trainable_variables
        ):
            with np.errstate(divide="ignore", invalid="ignore"):
                found = np.where(old, relative(old, new.numpy()), np.sign(new.numpy()))
            of_step = Histogram.of(found)
            expected[path] = expected[path] + of_step if path in expected else of_step
    report = histograms.read()
    assert {path: report["update", path].histogram for path in expected} == expected
    kinds = [(row.kind, row.path) for row in report.rows]
    assert kinds == [
        *(("gradient", path) for path in ("a/kernel", "b/kernel")),
        *(("weight", path) for path in ("b/kernel", "b/bias")),
        *(("update", path) for path in ("a/kernel", "a/bias", "b/kernel", "b/bias")),
    ]
    weights = model.get_weights()[2]
    found = report["weight", "b/kernel"]
    assert found.histogram == Histogram.of(weights)
    np.testing.assert_allclose(
        found.statistics,
        [
            np.abs(weights).max(),
            weights.mean(),
            weights.std(),
            np.abs(weights).sum(),
            np.sqrt((weights**2).sum()),
        ],
        rtol=1e-6,
        atol=1e-7,
    )
    assert "l2 norm" in str(report)


def test_digits_that_are_kept_are_seen_and_weights_that_stay_are_advised_on():
    plain = fitted(model_of("bfloat16", K.optimizers.SGD(0.001)), updates=True)
    advice = advise(plain, "bfloat16")
    assert len(advice.sentences) == 1
    assert advice.policies == {}
    assert advice.sentences[0].startswith(
        "Compile the model with keras_mp.MasterWeightOptimizer(optimizer): "
    )
    assert "did not move, in 4 of 4 steps." in advice.sentences[0]
    assert plain["update", "a/kernel"].dtype == "bfloat16"
    assert "unknown" in str(plain)

    optimizer = keras_mp.MasterWeightOptimizer(K.optimizers.SGD(0.001))
    model = model_of("bfloat16", optimizer)
    kept = fitted(model, updates=True, weights="a/kernel")
    assert advise(kept, "bfloat16").sentences == []
    row = kept["update", "a/kernel"]
    assert row.dtype == "float32"
    # What bfloat16 would lose is what it has lost without.
    lost = row.fate("bfloat16").zero + row.histogram.zeros
    assert lost == pytest.approx(plain["update", "a/kernel"].histogram.zeros, rel=0.1)
    assert lost > 0.5 * row.histogram.total
    exact = optimizer.float32_weights()[0]
    assert kept["weight", "a/kernel"].histogram == Histogram.of(exact)
    assert "unknown" not in str(kept)


@once
def test_weights_that_need_not_move_are_not_advised_on():
    """Rows of an embedding of which a batch has none; a loss without a gradient."""
    embedding = K.layers.Embedding(64, 4, name="words", dtype="bfloat16")
    flatten = K.layers.Flatten(dtype="bfloat16")
    model = K.Sequential([K.Input([2], dtype="int32"), embedding, flatten])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
        model.compile(K.optimizers.SGD(0.5), "mse", jit_compile=False)
    embedding.embeddings.assign(tf.ones([64, 4], tf.bfloat16))
    x, y = np.arange(8, dtype=np.int32).reshape(4, 2), np.zeros([4, 8], np.float32)
    monitor = watch(every=1, outputs=False, updates=True)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[monitor])
    zeros = monitor.report()["update", "words/embeddings"].histogram.zeros
    assert zeros == 56 * 4
    assert advise(monitor.report(), "bfloat16").sentences == []


def test_a_skipped_step_updates_nothing():
    wrapper = keras_mp.LossScaleOptimizer(K.optimizers.SGD(0.1))
    model = model_of("mixed_float16", wrapper)
    x, y = data(8)
    monitor = watch(every=1, outputs=False, updates="b/kernel")
    x[0, 0] = np.inf
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[monitor])
    assert int(wrapper.steps_skipped) == 1
    histogram = monitor.report()["update", "b/kernel"].histogram
    assert histogram.zeros == histogram.total == 32


@once
def test_each_replica_counts_updates():
    strategy = mirrored(2)
    with strategy.scope():
        model = model_of("bfloat16", keras_mp.MasterWeightOptimizer(K.optimizers.SGD(0.01)))
    report = fitted(model, updates="a/*", weights="a/*")
    assert report["update", "a/kernel"].dtype == "float32"
    assert report["update", "a/kernel"].histogram.total == 2 * report.counted * 128
    assert report.counted == 4
    assert report["weight", "a/kernel"].histogram.total == 128


@once
def test_first_and_last_steps_and_patterns():
    model = model_of("mixed_bfloat16", "sgd")
    report = fitted(model, first_step=1, last_step=2, gradients="?/kernel")
    assert (report.step, report.counted) == (4, 2)
    assert [row.path for row in report.rows] == ["a/kernel", "b/kernel"]
    every = watch(every=3, outputs="b", first_step=2, last_step=9)
    model.fit(*data(), batch_size=4, epochs=2, verbose=0, callbacks=[every])
    assert [(each.step, each.counted) for each in every.history] == [(8, 2), (16, 1)]
    for name in ("gradients", "weights", "updates", "outputs"):
        with pytest.raises(ValueError, match=f"patterns of them, for `{name}`.*'c/\\*'"):
            ExponentHistograms(model, **{name: "c/*"})
    with pytest.raises(ValueError, match="last_step"):
        ExponentHistograms(model, first_step=3, last_step=2)
    with pytest.raises(ValueError, match="first_step"):
        ExponentHistograms(model, first_step=-1)


@once
def test_files_have_statistics_and_older_ones_are_read(tmp_path):
    report = fitted(model_of("mixed_bfloat16", "sgd"), weights=True, updates=True)
    report.to_json(tmp_path / "report.json")
    loaded = Report.from_json(tmp_path / "report.json")
    assert str(loaded) == str(report)
    assert loaded.rows[4].statistics == report.rows[4].statistics
    assert (report + report)["weight", "a/bias"].statistics == report.rows[5].statistics
    old = json.loads((tmp_path / "report.json").read_text())
    for row in old["rows"]:
        if row["statistics"] is None:
            del row["statistics"]
    assert "statistics" not in old["rows"][0]
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert str(Report.from_json(tmp_path / "old.json")) == str(report)
